"""Three steps with a LoRA adapter under ZeRO-3. Usage: adapter.py FOLDER auto|merged."""

import sys
from math import prod

from common import Recorder, make_trainer, write_result
from peft import LoraConfig

from trl_multinode.testing.models import tiny_qwen2

folder, lora_sync = sys.argv[1:]
config = LoraConfig(r=4, lora_alpha=8, use_rslora=True, target_modules=["q_proj", "v_proj", "down_proj"])
recorder = Recorder()
trainer = make_trainer(
    tiny_qwen2(tied=False), recorder, folder, [f"{i} =" for i in range(32)], peft_config=config, lora_sync=lora_sync,
    per_device_train_batch_size=4, learning_rate=0.1, max_steps=3, rollout_seed=5,
)  # fmt: skip
before = {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in trainer.model.named_parameters()}
trainer.train()
steps = [entry for entry in trainer.state.log_history if "loss" in entry]
write_result(
    folder,
    world=trainer.accelerator.num_processes,
    sharded=all(p.numel() == 0 for name, p in trainer.model.named_parameters() if "lora_" in name),
    version=trainer.vllm_generation.version.update,
    difference=trainer._monitor.last,
    mib=[entry["sync/mib"] for entry in steps],
    grad_norms=[entry["grad_norm"] for entry in steps],
    adapter_mib=sum(prod(shape) for name, shape in before.items() if "lora_" in name) * 4 / 2**20,
    model_mib=sum(prod(shape) for name, shape in before.items() if "lora_" not in name) * 4 / 2**20,
)
