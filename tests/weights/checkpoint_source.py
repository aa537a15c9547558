"""A weight source as one file, for a test: the tensors of a state dict. It shows all that a new one has to write.

In the package, `weights/building.py` is the second file: `plan_sync` chooses the source of a run.
"""

from contextlib import contextmanager

from trl_multinode.transports.pieces import Pieces
from trl_multinode.weights.buckets import WeightMeta
from trl_multinode.weights.finite import check_finite
from trl_multinode.weights.source import WeightSource


class CheckpointSource(WeightSource):
    """Weights of a state dict that every rank holds whole, so that gathering them takes no collective."""

    def __init__(self, state):
        super().__init__()
        self._state = state

    def metadata(self):
        return [
            WeightMeta(name, tensor.dtype, tuple(tensor.shape))
            for name, tensor in self._state.items()
        ]

    def check(self, weights, step, frozen):
        named = [(meta.name, self._state[meta.name], meta.dtype) for meta in weights]
        check_finite(named, "node 0, rank 0", step, sends_whole=True)

    @contextmanager
    def gathering(self, bucket, holder=0):
        yield lambda: [Pieces.whole(self._state[meta.name]) for meta in bucket]
