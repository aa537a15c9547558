"""Updates sent while an engine generates, and what transformers gives for rows that hold several versions."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from waiting import until

from multinode_kit.engines import SyncDriver, connected_again, worst_difference
from trl_multinode.engine.client import Rollout
from trl_multinode.engine.stream import Request
from trl_multinode.wire.messages import WeightVersion

LIMIT = 1e-5  # mean difference of log-probs in fp32
# Tokens of a row. A busy machine may let short rows end before an update; then longer ones are tried
NUM_TOKENS = (240, *[900] * 9)


@dataclass
class MixedRows:
    """Rows that were running while updates were sent."""

    prompts: list[list[int]]
    rows: list[Rollout]
    # the trainer's model at each update
    models: dict[int, torch.nn.Module] = field(default_factory=dict)

    @property
    def mixed_share(self) -> float:
        return sum(len(row.versions) > 1 for row in self.rows) / len(self.rows)

    def difference(self, recomputed: bool) -> float:
        """Mean |engine - transformers| over all tokens, each under the weights of its span."""
        found = [
            (self.expected(prompt, row, recomputed) - torch.from_numpy(row.logprobs.copy())).abs()
            for prompt, row in zip(self.prompts, self.rows, strict=True)
        ]
        return torch.cat(found).mean().item()

    @torch.no_grad()
    def expected(self, prompt: list[int], row: Rollout, recomputed: bool) -> torch.Tensor:
        """Log-probs of transformers: of each span's own weights, or, if the keys and values were not computed again,
        of weights that continue the `past_key_values` of those before them."""
        ids, cache, start, parts = torch.tensor([[*prompt, *row.tokens.tolist()]]), None, 0, []
        for span in row.versions:
            known = 0 if cache is None else cache.get_seq_length()
            end = len(prompt) + span.end - 1  # the last token of a span is sampled, and not yet fed
            output = self.models[span.update](
                ids[:, known:end], past_key_values=cache, use_cache=True
            )
            cache = None if recomputed else output.past_key_values
            parts.append(output.logits[0, len(prompt) + start - 1 - known :])
            start = span.end
        scores = torch.cat(parts).log_softmax(-1)
        return scores.gather(1, ids[0, len(prompt) :, None])[:, 0]


class RowsUnderWay:
    """Rows that run on a connection of their own, one request each."""

    def __init__(
        self,
        trainer: SyncDriver,
        prompts: list[list[int]],
        num_tokens: int,
        seconds: float,
        seeded: bool,
    ):
        self._rank = connected_again(trainer.engines)
        sampling = {"temperature": 1.0, "ignore_eos": True} | slowed(trainer, seconds)
        self._stream = self._rank.open_stream(num_tokens, sampling)
        self.requests = [
            Request(
                prompt,
                seed=7 * row if seeded else None,
                min_update=trainer.version.update,
                group=(0, row),
            )
            for row, prompt in enumerate(prompts)
        ]
        self.ended: dict[Request, Rollout] = {}
        self._stream.add(self.requests)

    def look(self) -> list[tuple[Request, Rollout]]:
        """Return the rows that have a token and have not ended, as far as they are made."""
        peeking = self._stream.peek()
        while not peeking.complete.is_set():
            self.ended |= {request: row for request, (row,) in self._stream.poll()}
        return peeking.rows

    @property
    def all_ended(self) -> bool:
        return len(self.ended) == len(self.requests)

    def wait_for_a_token(self) -> list[tuple[Request, Rollout]]:
        """Wait until a row under way has a token that it has not now, and return the rows then; none if all end."""
        before = self._num_tokens(self.look())
        rows: list[tuple[Request, Rollout]] = []

        def has_grown() -> bool:
            rows[:] = self.look()
            return self.all_ended or self._num_tokens(rows) > before

        until(has_grown, "a token of the rows under way")
        return rows

    def _num_tokens(self, rows: list[tuple[Request, Rollout]]) -> int:
        return sum(len(row.tokens) for row in (*self.ended.values(), *(row for _, row in rows)))

    def results(self) -> list[Rollout]:
        """Wait for all rows, and return them in the order of their prompts."""
        while not self.all_ended:
            self.ended |= {request: row for request, (row,) in self._stream.poll()}
        return [self.ended[request] for request in self.requests]

    def close(self) -> None:
        self._stream.close()
        self._rank.close()


def generate_while_sending(
    trainer: SyncDriver,
    recompute_kv: bool,
    seeded: bool = False,
    change: Callable[[], None] | None = None,
    updates: int = 3,
) -> MixedRows:
    """Send some updates in flight, each with changed weights, while eight rows run, and each after a further token.

    The models are made before, because a busy machine would let the rows end meanwhile. If it lets them end before the
    first update, the weights and the version are set back, and longer rows run.
    """
    models, first = [copy.deepcopy(trainer.model)], trainer.version
    for _ in range(
        updates
    ):  # more perturbations would make logits, and their rounding errors, large
        (change or trainer.perturb)()
        models.append(copy.deepcopy(trainer.model))
    for attempt, num_tokens in enumerate(NUM_TOKENS):
        if attempt:
            trainer.model.load_state_dict(models[0].state_dict())
            send_as(trainer, first.update)
        trainer.sync.in_flight, trainer.sync.recompute_kv = True, recompute_kv
        try:
            found = _generate(trainer, seeded, num_tokens, models)
        finally:
            trainer.sync.in_flight = trainer.sync.recompute_kv = False
        if found.mixed_share > 0.3:
            break
    return found


def _generate(
    trainer: SyncDriver, seeded: bool, num_tokens: int, models: list[torch.nn.Module]
) -> MixedRows:
    """Send the models after the first one, which the engine has, while rows run."""
    prompts = [[5, 6, 7 + row] for row in range(8)]
    sent = {trainer.version.update: models[0]}
    rows = RowsUnderWay(trainer, prompts, num_tokens, 5e-4, seeded)
    try:
        for model in models[1:]:
            rows.wait_for_a_token()
            trainer.model.load_state_dict(model.state_dict())
            sent[trainer.send().update] = model
        return MixedRows(prompts, rows.results(), sent)
    finally:
        rows.close()


def send_as(trainer: SyncDriver, update: int) -> WeightVersion:
    """Send the weights as this update, whatever the engine has."""
    trainer.version = WeightVersion(update - 1, 10 * (update - 1))
    return trainer.send()


def slowed(trainer: SyncDriver, seconds: float) -> dict:
    """Settings with which vLLM sleeps for so long at each token of a row. Without them a row of the tiny model can end
    on a busy machine before the engine's front end has read the next message. The engine needs `SlowTokens`."""
    is_fake = trainer.engines[0].ready.model_runner == "fake"
    return {} if is_fake else {"extra_args": {"seconds_a_token": seconds}}


def differences_with_a_cached_prefix(
    trainer: SyncDriver, change: Callable[[], None]
) -> tuple[float, float]:
    """Difference to transformers of a row whose prompt the engine has cached: with the weights that cached it, and
    after an update in flight, which leaves the cache of running rows as it is."""
    prompt, sampling = [5 + i % 290 for i in range(200)], {"temperature": 1.0}

    def difference() -> float:
        for seed in (1, 2):  # the second row has the prefix of the first
            groups = trainer.engines.generate(
                [Request(prompt, 1, seed)], 8, sampling, trainer.version.update
            )
        return worst_difference(trainer, groups, [prompt])

    before = difference()
    change()
    trainer.sync.in_flight = True
    try:
        trainer.send()
    finally:
        trainer.sync.in_flight = False
    return before, difference()
