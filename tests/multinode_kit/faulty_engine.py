"""The real engine with faults: `python -m multinode_kit.faulty_engine skip_load@2-2 SPEC.json`.

[`Faults`](faults.py) makes the words before the spec.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from trl_multinode.engine_process.main import main
from trl_multinode.engine_process.vllm_backend import VllmBackend
from trl_multinode.wire.messages import EngineSpec

from .faults import Faults

LATE_S = (
    1.0  # longer than an update; vLLM waits 0.02 s after a pause for outputs that are not read yet
)


class FaultyBackend(VllmBackend):
    """Backend that delays requests, or their outputs, and makes vLLM's workers use the faulty receiver."""

    worker_extension = "multinode_kit.faulty_receiver.FaultyWorkerExtension"

    def __init__(self, spec: EngineSpec):
        self._faults = Faults.from_command_line()
        # vLLM passes it to the workers as it is
        more = {"additional_config": {"faults": self._faults.words}}
        super().__init__(msgspec.structs.replace(spec, engine_args=spec.engine_args | more))

    async def _outputs(self, *request: Any) -> AsyncIterator:
        await asyncio.sleep(self._faults.delay_s(self._spec.index))
        async for output in super()._outputs(*request):
            yield output
            if self._faults.delays_outputs(self._update.version.update):
                await asyncio.sleep(LATE_S)


if __name__ == "__main__":
    main(FaultyBackend)
