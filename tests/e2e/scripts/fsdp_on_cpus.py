"""accelerate 1.15 makes FSDP of several GPUs only; with this imported of several CPUs too, by the same plugin."""

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

of_accelerate = AcceleratorState.__init__


def with_fsdp(self, *args, fsdp_plugin=None, **kwargs):
    of_accelerate(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
    if fsdp_plugin is not None and self.device.type == "cpu":
        self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
        PartialState._shared_state["distributed_type"] = self.distributed_type  # as for GPUs


AcceleratorState.__init__ = with_fsdp
