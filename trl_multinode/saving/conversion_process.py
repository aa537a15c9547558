"""A process that converts a ZeRO checkpoint into one that any number of ranks can load.

It is started as `python -m trl_multinode.saving.conversion_process OWNER STATES TARGET`, with the pid of its rank and
two folders: DeepSpeed's files of the checkpoint, and the place of the converted ones.

DeepSpeed's converter writes trained parameters and the optimizer's state. Its loader then leaves frozen parameters and
buffers as the model has them, so this process writes those into `KEPT`.
"""

import os
import signal
import sys
from argparse import Namespace
from pathlib import Path

import torch
from safetensors.torch import save_file

from ..wire.process_end import end_with_parent

KEPT = "kept.safetensors"
WORKERS = 4  # processes of DeepSpeed's converter; each holds the states of one rank


def convert(states: Path, target: Path) -> None:
    """Write the converted checkpoint into a new folder."""
    from deepspeed.checkpoint.ds_to_universal import main as write_universal

    arguments = Namespace(
        input_folder=str(states),
        output_folder=str(target),
        num_extract_workers=WORKERS,
        num_merge_workers=WORKERS,
        keep_temp_folder=False,
        strict=True,
        # transformers' checkpoints have no entry with DeepSpeed's patterns of parameters
        inject_missing_state=True,
    )
    write_universal(arguments)
    save_file(kept_tensors(states), target / KEPT)


def kept_tensors(states: Path) -> dict[str, torch.Tensor]:
    """Return buffers and frozen parameters, as far as the checkpoint has them: with PEFT it has no frozen ones."""
    # names differ by the number of the rank
    files = sorted(states.glob("*_model_states.pt"), key=lambda path: (len(path.name), path.name))
    ranks = [torch.load(path, "cpu", mmap=True, weights_only=True) for path in files]
    first = ranks[0]
    not_kept = {name for group in first["param_shapes"] for name in group}
    # other names of tied parameters
    not_kept |= set(first["shared_params"] or {})
    # under ZeRO-3 only buffers have data here
    found = {
        name: tensor.contiguous().clone()
        for name, tensor in first["module"].items()
        if name not in not_kept and tensor.numel() > 0
    }
    for name, shape in (first["frozen_param_shapes"] or {}).items():
        flat = torch.cat([rank["frozen_param_fragments"][name].flatten() for rank in ranks])
        found[name] = flat[: shape.numel()].reshape(shape).clone()
    return found


def main(owner: str, states: str, target: str) -> None:
    """Convert, and end with the rank; the workers end with this process."""
    end_with_parent(int(owner), signal.SIGKILL)
    own = os.getpid()
    os.register_at_fork(after_in_child=lambda: end_with_parent(own, signal.SIGKILL))
    convert(Path(states), Path(target))


if __name__ == "__main__":
    main(*sys.argv[1:])
