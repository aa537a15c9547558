"""ZeRO checkpoints that another number of ranks wrote, by way of DeepSpeed's universal checkpoints.

```python
conversion = Conversion(checkpoint, num_ranks, output_dir, rank)
conversion.make()               # one process of the run, or one per folder
conversion.load(engine, load)   # every rank
conversion.delete()             # when all ranks have loaded it
```
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from ..errors import ConfigurationError
from ..libraries import replaced
from ..rollouts.scoring_pool import environment
from ..run.values import listed
from ..weights.names import is_zero3
from .checkpoint_files import METADATA_FILE, OWN, STATE_FILE, from_its_weights, no_resume
from .conversion_process import KEPT
from .rotation import DELETING, delete, sync_tree
from .saved_weights import has_adapter

PREFIX = "universal-"
# limit of a conversion, whose disk may be slow: so many seconds, and one for so many bytes
LEAST_S, BYTES_PER_S = 600, 10 * 2**20
SHOWN = 5  # names in a message


class Conversion:
    """Copy of a ZeRO checkpoint that any number of ranks can load.

    Args:
        source (`Path`):
            Folder of the checkpoint.
        num_ranks (`int`):
            Number of ranks that wrote it.
        output_dir (`Path`):
            Folder of the run's own checkpoints. The copy is in `_multinode` below it, which Hub pushes exclude.
        rank (`int`):
            Rank of this process.
    """

    def __init__(self, source: Path, num_ranks: int, output_dir: Path, rank: int):
        self._source = source
        self._num_ranks = num_ranks
        self._own = output_dir / OWN
        self._rank = rank
        # no other checkpoint has these digests of its files and these losses of its run
        files = [source / name for name in (METADATA_FILE, STATE_FILE)]
        content = b"".join(path.read_bytes() for path in files if path.is_file())
        self.folder = self._own / f"{PREFIX}{blake2b(content, digest_size=8).hexdigest()}"

    def make(self) -> None:
        """Convert the checkpoint, unless that was done. The copy gets its name when it is whole.

        Raises:
            `ConfigurationError`: if the files of a rank are missing, if the disk has too little space, or if DeepSpeed
                cannot convert the checkpoint.
        """
        if self.folder.is_dir():
            return
        states = self._source / (self._source / "latest").read_text().strip()
        self._check_files(states)
        sizes = [path.stat().st_size for path in states.iterdir()]
        size = sum(sizes)
        self._own.mkdir(parents=True, exist_ok=True)
        # DeepSpeed cuts all states into pieces before it joins them, and keeps those of a rank
        needed = 2 * size + max(sizes)
        if (free := shutil.disk_usage(self._own).free) < needed:
            raise ConfigurationError(
                f"{self._source} must be converted for another number of ranks, which takes {needed} bytes in "
                f"{self._own}, where {free} are free.",
                setting="output_dir",
                got=free,
                expected=needed,
                cure="Free some space, use an `output_dir` on another disk, or launch as many ranks as before.",
            )
        # the next start deletes what has such a name
        part = self._own / f"{DELETING}{self.folder.name}-{self._rank}"
        part.mkdir()
        self._run(states, part / states.name, LEAST_S + size / BYTES_PER_S)
        sync_tree(part)
        try:
            part.rename(self.folder)
        except OSError:
            # a node that shares the folder was faster
            if not self.folder.is_dir():
                raise

    def _check_files(self, states: Path) -> None:
        """Check that the files of all ranks are in this folder, which several nodes may have written."""
        names = [
            f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(self._num_ranks)
        ]
        if missing := [name for name in names if not any(states.glob(f"*{name}"))]:
            raise ConfigurationError(
                f"{self._source} was written by {self._num_ranks} ranks and must be converted for another number, but "
                f"these files of {states.name} are not on the node of rank {self._rank}: {listed(missing, SHOWN)}.",
                setting="resume_from_checkpoint",
                got=missing,
                rank=self._rank,
                cure="Copy the `global_step*` folders of all nodes to every node, or use an `output_dir` that all "
                f"nodes share, or launch {self._num_ranks} ranks again.",
            )

    def _run(self, states: Path, target: Path, limit_s: float) -> None:
        module = "trl_multinode.saving.conversion_process"
        command = [sys.executable, "-m", module, str(os.getpid()), str(states), str(target)]
        without_gpus = environment() | {"DS_ACCELERATOR": "cpu"}
        try:
            done = subprocess.run(
                command, env=without_gpus, capture_output=True, text=True, timeout=limit_s
            )
        except subprocess.TimeoutExpired:
            reason = f"it took more than {limit_s:.0f} s"
        else:
            if done.returncode == 0:
                return
            reason = (done.stderr.strip() or f"code {done.returncode}").splitlines()[-1]
        raise self._refused(
            f"another number of ranks wrote it, and DeepSpeed cannot convert it: {reason}"
        )

    def _refused(self, reason: str) -> ConfigurationError:
        return no_resume(
            self._source,
            f"{self._source} cannot be resumed: {reason}.",
            f"Launch as many ranks as before, or {from_its_weights(self._source)}",
        )

    def load(self, engine: Any, load: Callable[..., None], **keywords: Any) -> None:
        """Load the copy into a DeepSpeed engine, with frozen parameters and buffers. A collective.

        Args:
            engine (`DeepSpeedEngine`):
                Engine of this rank.
            load (`Callable`):
                transformers' `deepspeed_load_checkpoint`.
            keywords (`dict`):
                Further arguments of `load`.

        Raises:
            `ConfigurationError`: if the checkpoint lacks a frozen parameter or a buffer.
        """
        with replaced(engine._config, "load_universal_checkpoint", True):
            load(engine, str(self.folder), **keywords)
        separate_steps(engine.optimizer.optimizer)
        (states,) = self.folder.glob("global_step*")
        if engine.zero_optimization_partition_weights():
            restore_groups(engine, states)
        self._restore_kept(engine.module, states / KEPT)

    @torch.no_grad()
    def _restore_kept(self, module: torch.nn.Module, path: Path) -> None:
        from deepspeed import zero

        persistent = module.state_dict().keys()
        expected = {name: one for name, one in module.named_buffers() if name in persistent}
        # PEFT's checkpoints have no frozen parameters: they are those of the base model, as in any resume
        if not has_adapter(module):
            parameters = module.named_parameters()
            expected |= {name: one for name, one in parameters if not one.requires_grad}
        with safe_open(path, framework="pt") as file:
            if missing := sorted(expected.keys() - file.keys()):
                raise self._refused(f"it has no values of {listed(missing, SHOWN)}")
            for name, tensor in expected.items():
                with zero.GatheredParameters([tensor], modifier_rank=0, enabled=is_zero3(tensor)):
                    if self._rank == 0 or not is_zero3(tensor):
                        tensor.copy_(file.get_tensor(name))

    def delete_others(self) -> None:
        """Delete the copies that killed runs have left of other checkpoints."""
        copies = self._own.glob(f"{PREFIX}*")
        if others := [path for path in copies if path != self.folder]:
            delete(others, self._own)

    def delete(self) -> None:
        """Delete this copy after the load, and all others."""
        self.delete_others()
        if self.folder.is_dir():
            delete([self.folder], self._own)


def separate_steps(optimizer: torch.optim.Optimizer) -> None:
    """Give each state a count of steps of its own, where the optimizer's kernel reads it.

    DeepSpeed's loader gives all states of ZeRO-3 one tensor, to which each of them would add its steps, and leaves
    that of every stage on the CPU.
    """
    on_device = any(optimizer.defaults.get(name) for name in ("fused", "capturable"))
    for parameter, state in optimizer.state.items():
        if torch.is_tensor(step := state.get("step")):
            device = parameter.device if on_device else step.device
            state["step"] = step.to(device, copy=True)


def restore_groups(engine: Any, states: Path) -> None:
    """Restore the hyperparameters of each parameter group: DeepSpeed gives all of them those of the first one."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum

    path = states / "zero" / "optimizer_state.pt"
    with torch.serialization.safe_globals([DynamicLossScaler, LossScaler, ZeroStageEnum]):
        saved = torch.load(path, "cpu", mmap=True, weights_only=True)["optimizer_state_dict"]
    own = engine.optimizer.optimizer.param_groups
    for group, values in zip(own, saved["param_groups"], strict=True):
        group.update({name: value for name, value in values.items() if name != "params"})
