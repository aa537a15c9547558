"""The text of an error of unknown code: its `__str__` may raise, may never return, or may return 20 MB."""

from typing import Any

from ...wire.secret_names import without_forms

LONGEST = 4000  # characters; the store, a terminal and a job's mail show a line
END = 1000  # of them, from the end of a longer text


def text_of_error(error: Any) -> str:
    """Return the text of an error, or of another object that ends a script, shortened and without tokens."""
    try:
        text = str(error)
    except BaseException as fault:
        return f"(its text cannot be shown: {type(error).__name__}.__str__ raised {type(fault).__name__})"
    if len(text) > LONGEST:
        text = f"{text[: LONGEST - END]} ... ({len(text) - LONGEST} characters left out) ... {text[-END:]}"
    return without_forms(text)  # addresses with a password are in many errors of clients


# Texts of other libraries that do not say what is wrong in a run of this one
EXPLAINED = {
    "Connection reset by peer": "The rank at the other end has ended: read its last lines. gloo aborts a rank whose "
    "collective is another than that of its peers, as when only some ranks save or gather",
    "vllm_mode must be either": "This is TRL's own trainer with a config of node mode: import the trainer from "
    "trl_multinode, as in `from trl_multinode import GRPOTrainer`",
}


def described(error: BaseException) -> str:
    """Return class and text of an error, with the cure of one of another library that has none."""
    text = text_of_error(error)
    cures = [cure for words, cure in EXPLAINED.items() if words in text]
    return f"{type(error).__name__}: {'. '.join([text.rstrip('.'), *cures]) if cures else text}"
