"""A tokenizer for several threads: fast tokenizers fail when two threads use one at the same time."""

import copy
import functools
import threading
from collections.abc import Callable
from typing import Any

METHODS = (
    "__call__", "apply_chat_template", "batch_decode", "convert_ids_to_tokens", "convert_tokens_to_ids", "decode",
    "encode", "pad", "parse_response", "tokenize",
)  # fmt: skip


def locked_copies(*tokenizers: Any) -> tuple[Any, ...]:
    """Return copies of tokenizers or processors of which one thread at a time runs a method.

    Two threads with one fast tokenizer get "Already borrowed" from its Rust half. A copy per thread would cost the
    memory of a vocabulary each time. A processor and its own tokenizer stay a pair, with one lock.
    """
    lock = threading.RLock()
    copies = copy.deepcopy(tokenizers)
    for one in {id(found): found for found in copies if found is not None}.values():
        one.__class__ = _locked_kind(type(one), lock)
    return copies


def _locked_kind(kind: type, lock: Any) -> type:
    methods = {name: _locked(getattr(kind, name), lock) for name in METHODS if hasattr(kind, name)}
    return type(f"Locked{kind.__qualname__}", (kind,), methods)


def _locked(method: Callable, lock: Any) -> Callable:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        with lock:
            return method(*args, **kwargs)

    return call
