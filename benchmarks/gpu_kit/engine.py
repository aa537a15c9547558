"""The library's engine, but an update freezes running requests: `python -m gpu_kit.engine SPEC.json`.

Without running requests an update takes the library's own path; only stage d updates while requests run.
"""

from trl_multinode.engine_process.main import main
from trl_multinode.engine_process.vllm_backend import VllmBackend


class FreezingBackend(VllmBackend):
    """Backend whose updates pause running requests, which then continue with the new weights."""

    drains = False


if __name__ == "__main__":
    main(FreezingBackend)
