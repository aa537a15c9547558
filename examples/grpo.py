"""GRPO on many nodes, with model, dataset and rewards from the command line. Run this on every node, K = 0 to 3:

    accelerate launch --config_file accelerate_configs/4node.yaml --machine_rank K --main_process_ip HOST0 \
        examples/grpo.py

This trains the small model of TRL's own examples. Choose yours with these arguments and those of TRL's `GRPOConfig`:

    --model_name_or_path Qwen/Qwen3-4B --dataset_name trl-lib/DeepMath-103K \
        --reward_funcs accuracy_reward think_format_reward --output_dir outputs/qwen3-4b-math --push_to_hub

The script itself is trl_multinode/examples/grpo.py; copy that file to change it. Without this repository,
`trl-multinode grpo` runs it.
"""

from trl_multinode.examples.grpo import main

if __name__ == "__main__":
    main()
