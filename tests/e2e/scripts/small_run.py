"""Two steps. Usage: small_run.py FOLDER ours|plain|balanced|bf16: with our config, TRL's own with `vllm_mode="node"`
in it, our config with balanced micro-batches, or with bfloat16 training and a float32 engine.
"""

import os
import sys

os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")

import trl
from common import Recorder, make_trainer, write_result

from multinode_kit.models import tiny_qwen2
from trl_multinode import MultiNodeGRPOConfig

# not in the launch: imports read it, and forked ranks share theirs
os.environ["HF_TOKEN"] = os.environ["TEST_TOKEN"]
folder, config = sys.argv[1:]
settings = {"per_device_train_batch_size": 4, "learning_rate": 1e-2, "max_steps": 2}
if config == "plain":
    import common

    common.GRPOConfig = trl.GRPOConfig
    settings |= {"use_vllm": True, "vllm_mode": "node"}
else:
    settings["rollout_seed"] = 5
    settings["micro_batch_tokens"] = 50 if config == "balanced" else None  # 2 of the longest rows
    settings |= {"bf16": config == "bf16", "engine_kwargs": {"dtype": "float32"}}
    if config == "ours":  # a checkpoint, in which no token may be
        settings |= {"hub_token": os.environ["HF_TOKEN"], "save_strategy": "steps", "save_steps": 2}
recorder = Recorder()
trainer = make_trainer(
    tiny_qwen2(tied=False), recorder, folder, [f"{i} =" for i in range(32)], **settings
)
trainer.train()
write_result(
    folder,
    ours=isinstance(trainer.args, MultiNodeGRPOConfig),
    world=trainer.accelerator.num_processes,
    version=trainer.vllm_generation.version.update,
    difference=trainer._monitor.last,
    limit=trainer._monitor.limit,
    nan_shares=[
        entry["logprobs/nan_share"] for entry in trainer.state.log_history if "loss" in entry
    ],
    rows=len(recorder.rows),
    micro_steps=[
        entry["balance/micro_steps"]
        for entry in trainer.state.log_history
        if "balance/micro_steps" in entry
    ],
    losses=[entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry],
)
