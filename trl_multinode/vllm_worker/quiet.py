"""Level of vLLM's log in each of its processes once the engine has started.

`import trl` sets VLLM_LOGGING_LEVEL to ERROR, so that the log of an engine would show neither its stages nor why it
fails. An engine therefore starts at INFO; afterwards every weight update would write six lines, one of them
"RotaryEmbedding: Failed to load weights", which is harmless and does not look so.
"""

import logging
import os

from ..wire.messages import LATER_LEVEL


def quiet_vllm() -> None:
    """Set the level for the time after the start, if the engine's environment has one."""
    if level := os.environ.get(LATER_LEVEL):
        logging.getLogger("vllm").setLevel(level)
