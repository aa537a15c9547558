"""Two steps, a checkpoint that is pushed, then pushes that the hub treats in all ways, each to a revision of its own.

Usage: pushing.py FOLDER full|lora TOKEN. Ends with an error on the main process that the other ranks cannot see.
"""

import io
import sys
from pathlib import Path

import deepspeed
import torch
from common import RANK, WORLD, Recorder, make_trainer, write_result
from peft import LoraConfig
from safetensors.torch import load_file, save_file

from trl_multinode.errors import MultiNodeError
from trl_multinode.saving import pushing

folder, kind, token = sys.argv[1:]
pushing.WAITS_S = (0.1, 0.2, 0.3)
out = Path(folder) / kind
config = (
    LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"]) if kind == "lora" else None
)
trainer = make_trainer(
    f"{folder}/model", Recorder(), str(out), [f"{i} =" for i in range(32)], peft_config=config, push_to_hub=True,
    hub_strategy="every_save", hub_token=token, save_strategy="steps", save_steps=2, max_steps=2, learning_rate=0.01,
    per_device_train_batch_size=4, model_init_kwargs={"dtype": "float32"},
)  # fmt: skip
created_at_start = trainer.hub_model_id is not None
trainer.train()


def push(revision: str) -> str:
    try:
        return "pushed" if trainer.push_to_hub(revision=revision) is not None else "not pushed"
    except MultiNodeError as error:
        return f"{type(error).__name__}: {error}"


def save_wrong(*args, **kwargs) -> None:
    """What ZeRO-3 once saved: a shard as it is."""
    save_right(*args, **kwargs)
    (file,) = Path(args[0] if args else kwargs.get("output_dir") or out).glob("*model.safetensors")
    tensors = load_file(file)
    tensors[sorted(tensors)[0]] = torch.empty(0)
    save_file(tensors, file, metadata={"format": "pt"})


found = {name: push(name) for name in ("denied", "conflict", "hiccup", "cut")}
save_right, trainer._save = trainer._save, save_wrong
found["wrong"] = push("wrong")
trainer.accelerator.wait_for_everyone()  # nobody waits anywhere else
trainer._save = save_right
found["main"] = push("main")

trained = [(name, p) for name, p in trainer.model.named_parameters() if p.requires_grad]
sharded = all(p.numel() == 0 for _, p in trained)
with deepspeed.zero.GatheredParameters([p for _, p in trained]):
    if RANK == 0:
        tensors = {name: parameter.detach().clone().contiguous() for name, parameter in trained}
        save_file(tensors, f"{folder}/{kind}-trained.safetensors")
plain = io.BytesIO()
torch.save(trainer.args, plain)  # as transformers does it
write_result(
    folder, kind, world=WORLD, sharded=sharded, found=found, created_at_start=created_at_start,
    token_is_pickled=token.encode() in plain.getvalue(),
)  # fmt: skip

if kind == "lora":
    trainer.args.hub_push_must_succeed = True
    trainer.push_to_hub(revision="denied")
else:
    trainer._save = save_wrong
    trainer._save_checkpoint(trainer.model, None)
trainer.accelerator.wait_for_everyone()
