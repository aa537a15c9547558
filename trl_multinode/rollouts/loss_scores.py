"""The loss pass's own log-probs in the place of TRL's scoring pass, where both are those of the same weights.

With vLLM, TRL computes `old_per_token_logps` of every round in a pass without gradients, for its importance-sampling
correction. If no optimizer step lies between a round and the losses of its rows, the loss pass has the same numbers.
TRL leaves the pass out by this rule when it does not correct, so the correction is turned off while it scores a round,
and the ratio is computed in the loss, before TRL reads it. What TRL and the check of the engines read of the scores is
collected there too, for the rank that generated a row, and judged before the last backward pass of the optimizer step:
under DeepSpeed that one is already the step.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..libraries import replaced
from ..run.reporter import report
from .monitor import DivergenceMonitor, trained_mask
from .staleness import StalenessMeter

# TRL's fields of a batch
RATIO, SAMPLED, SCORED = (
    "importance_sampling_ratio",
    "sampling_per_token_logps",
    "old_per_token_logps",
)
# Fields that this module adds to a round: the place of its generating rank in the sums, and what the engines' present
# weights give to its tokens (NaN: not asked), if other weights have generated them
ORIGIN, PRESENT = "origin", "present_logps"
LOGGED = ("sampling/sampling_logp_difference", "sampling/importance_sampling_ratio")


class Sums(NamedTuple):
    """Sums over the tokens of rows: first as tensors of shape `(rows, completion)`, then as numbers of a rank."""

    difference: Any  # |trainer - sampler|
    compared: Any  # number of tokens in it
    present: Any  # |trainer - present weights of an engine|
    asked: Any  # number of tokens in it
    ratio: Any
    of_ratio: Any  # number of values in it
    tokens: Any  # that are trained
    nan_trainer: Any  # those of them for which the trainer has NaN
    nan_any: Any  # the same for trainer or sampler


class Extremes(NamedTuple):
    """Greatest values of rows."""

    difference: Any
    ratio: Any
    minus_ratio: Any


class LossScores:
    """
    Scores of the rows of an optimizer step, collected in its losses.

    Args:
        trainer ([`MultiNodeGRPOTrainer`]), monitor ([`DivergenceMonitor`]), meter ([`StalenessMeter`]):
            Objects of the calling rank.
        reason (`Callable[[], str | None]`):
            Returns why TRL's scoring pass is needed, the same on every rank. A collective of all training ranks.
    """

    def __init__(
        self,
        trainer: Any,
        monitor: DivergenceMonitor,
        meter: StalenessMeter,
        reason: Callable[[], str | None],
    ):
        self._trainer, self._monitor, self._meter = trainer, monitor, meter
        self._reason = reason
        self._replaces: bool | None = None  # `None`: not decided
        self._accelerator = trainer.accelerator
        self._batch: dict[str, Any] | None = None  # of the loss that runs
        self._metrics: dict[str, list[float]] = {}
        self.begin()

    def begin(self) -> None:
        """Begin an optimizer step, and drop what an unfinished one has left."""
        # whether engines made the rows, by round of this optimizer step
        self._generated: list[bool] = []
        self._sums: torch.Tensor | None = None  # by origin
        self._extremes: torch.Tensor | None = None
        self._weights = torch.zeros(4, dtype=torch.float64)

    def decide(self) -> None:
        """Decide in the first step of this trainer, when the model is prepared, whether the losses give the scores."""
        if self._replaces is not None:
            return
        if not self._trainer.vllm_importance_sampling_correction:
            self._replaces = False  # TRL follows the same rule itself, and needs no ratio
            return
        self._trainer.model.train()  # as the step does, because dropout depends on it
        reason = self._reason()
        self._replaces = reason is None
        if reason and self._accelerator.is_main_process:
            report(f"a scoring pass before every round, as in TRL: {reason}")

    @contextmanager
    def in_place_of_pass(self) -> Iterator[None]:
        """Let TRL leave its scoring pass out of the training round that it makes in this context."""
        if not (self._replaces and self._trainer.model.training):
            yield
            return
        with replaced(self._trainer, "vllm_importance_sampling_correction", False):
            yield

    def is_for(self, output: Mapping[str, Any]) -> bool:
        """Return whether a round was left to the losses."""
        return bool(self._replaces) and self._trainer.model.training and SCORED not in output

    def add_round(self, output: dict[str, Any]) -> None:
        """Add the fields by which the losses know whose rows they have, to an output of TRL's
        `_generate_and_score_completions` that was left to them."""
        if not self.is_for(output):
            return
        rounds, world = len(self._generated), self._accelerator.num_processes
        origin = rounds * world + self._accelerator.process_index
        self._generated.append(self._trainer.vllm_generation.generated)
        output[ORIGIN] = torch.full_like(output["completion_mask"][:, 0], origin)
        # in every round, because rows of several ones share a batch
        if self._trainer.max_staleness:
            output[PRESENT] = self._monitor.present_logps(output)

    # ---- the losses -------------------------------------------------------------------------------------------------

    @contextmanager
    def of(self, inputs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield a copy of a batch, into which `add` writes the ratio before TRL's loss reads it."""
        self._batch = dict(inputs)
        try:
            yield self._batch
        finally:
            self._batch = None

    def add(self, logps: torch.Tensor) -> None:
        """Take the log-probs of the loss that runs, shape `(rows, completion)`; nothing outside of such a loss."""
        if self._batch is None or RATIO in self._batch:
            return
        batch, args = self._batch, self._trainer.args
        batch[RATIO] = ratio = importance_ratio(
            logps,
            batch[SAMPLED],
            trained_mask(batch),
            args.vllm_importance_sampling_mode,
            self._trainer.vllm_importance_sampling_clip_min,
            self._trainer.vllm_importance_sampling_clip_max,
        )
        self._collect(batch, logps, ratio)

    def _collect(self, batch: dict[str, Any], logps: torch.Tensor, ratio: torch.Tensor) -> None:
        mask = trained_mask(batch).bool()
        sampled = batch[SAMPLED]
        difference, compared = _known((logps - sampled).abs(), mask)
        present, asked = _known((logps - batch.get(PRESENT, sampled)).abs(), mask)
        of_ratio = mask if ratio.shape == mask.shape else torch.ones_like(ratio, dtype=torch.bool)
        weighed = ratio.masked_fill(~of_ratio, 0.0)
        unknown = logps.isnan() & mask
        columns = Sums(
            difference, compared, present, asked, weighed, of_ratio, mask, unknown, unknown | sampled.isnan() & mask,
        )  # fmt: skip
        rows = torch.stack([column.double().sum(-1) for column in columns], dim=-1)
        highest = Extremes(
            difference.amax(-1),
            ratio.masked_fill(~of_ratio, -torch.inf).amax(-1),
            -ratio.masked_fill(~of_ratio, torch.inf).amin(-1),
        )
        extremes = torch.stack(highest, dim=-1).double()
        if self._sums is None or self._extremes is None:
            # a round may begin between the losses of another one
            steps = self._trainer.args.gradient_accumulation_steps
            places = steps // self._trainer.steps_per_round * self._accelerator.num_processes
            self._sums = rows.new_zeros(places, rows.shape[-1])
            self._extremes = extremes.new_full((places, extremes.shape[-1]), -torch.inf)
        origin = batch[ORIGIN].long().flatten()
        self._sums.index_add_(0, origin, rows)
        index = origin[:, None].expand_as(extremes)
        self._extremes.scatter_reduce_(0, index, extremes, "amax")
        weights = self._meter.weight_sums(batch | {SCORED: logps}).sum(0)
        self._weights = self._weights.to(weights.device) + weights

    # ---- the end of the optimizer step ------------------------------------------------------------------------------

    def judge(self) -> None:
        """
        Raise if the log-probs of this rank's rows cannot be right. A collective of all training ranks, after the last
        forward pass of an optimizer step and before its last backward pass.

        Raises:
            `LogprobDivergenceError`: as [`DivergenceMonitor.check`].
        """
        sums, extremes, generated = self._sums, self._extremes, self._generated
        assert sums is not None and extremes is not None
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(sums)
            dist.all_reduce(extremes, dist.ReduceOp.MAX)
        self._meter.add_weight_sums(self._weights.tolist())
        shape = (-1, self._accelerator.num_processes)
        rounds, highest = (
            found.view(*shape, found.shape[-1]).tolist() for found in (sums, extremes)
        )
        self.begin()
        # the last step of an epoch may have fewer rounds
        for of_ranks, most, is_ours in zip(rounds, highest, generated, strict=False):
            self._log([*map(Sums._make, of_ranks)], [*map(Extremes._make, most)])
            mine = Sums._make(of_ranks[self._accelerator.process_index])
            if is_ours:
                tokens = int(mine.tokens)
                self._monitor.judge_sums(mine.present, mine.asked, tokens, int(mine.nan_trainer))
                self._meter.add(trained_tokens=tokens, nan_tokens=mine.nan_any)

    def _log(self, sums: list["Sums"], extremes: list["Extremes"]) -> None:
        """Add TRL's metrics of a round: of each rank, then the mean, the least or the greatest of all ranks."""
        differences = [one.difference / max(one.compared, 1.0) for one in sums]
        ratios = [one.ratio / max(one.of_ratio, 1.0) for one in sums]
        pairs = list(zip(sums, extremes, strict=True))
        values = {
            f"{LOGGED[0]}/mean": sum(differences) / len(differences),
            f"{LOGGED[0]}/max": max(0.0, *(most.difference for most in extremes)),
            f"{LOGGED[1]}/min": min(
                -most.minus_ratio if one.of_ratio else 0.0 for one, most in pairs
            ),
            f"{LOGGED[1]}/mean": sum(ratios) / len(ratios),
            f"{LOGGED[1]}/max": max(most.ratio if one.of_ratio else 0.0 for one, most in pairs),
        }
        for name, value in values.items():
            self._metrics.setdefault(name, []).append(value)

    def give_metrics(self, metrics: Mapping[str, list[float]]) -> None:
        """Append what `judge` has found to the trainer's metrics, after the micro-step."""
        for name, values in self._metrics.items():
            metrics[name].extend(values)
        self._metrics.clear()


def importance_ratio(
    logps: torch.Tensor,
    sampled: torch.Tensor,
    mask: torch.Tensor,
    mode: str,
    low: float | None,
    high: float | None,
) -> torch.Tensor:
    """
    Return the ratio of trainer and sampler as TRL's `vllm_importance_sampling_mode` defines it: per token, shape
    `(rows, completion)`, or per sequence, shape `(rows, 1)`; 1 where the sampler's log-prob is NaN.

    Args:
        logps (`torch.Tensor` of shape `(rows, completion)`), sampled (`torch.Tensor` of the same shape):
            Log-probs of trainer and sampler.
        mask (`torch.Tensor` of the same shape):
            1 for tokens that are trained.
        mode (`str`):
            `"token_truncate"`, `"token_mask"`, `"sequence_truncate"` or `"sequence_mask"`.
        low (`float`, *optional*), high (`float`, *optional*):
            Limits of the ratio.
    """
    logs = ((logps - sampled) * mask).nan_to_num(nan=0.0)
    if mode.startswith("sequence_"):
        logs = logs.sum(-1, keepdim=True)
    ratio = logs.exp()
    low = -torch.inf if low is None else low
    high = torch.inf if high is None else high
    if mode.endswith("_truncate"):
        return ratio.clamp(low, high)
    return ratio.masked_fill((ratio < low) | (ratio > high), 0.0)


def _known(values: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values with 0 for what is masked or NaN, and what is neither."""
    known = mask & ~values.isnan()
    return values.masked_fill(~known, 0.0), known


def moves_the_generator(trainer: Any) -> bool:
    """
    Return whether a forward pass of the trained model in training mode draws random numbers, as dropout does. A
    collective of all training ranks, as the forward pass of a sharded model is one. The generators stay as they were.
    """
    device = trainer.accelerator.device
    ids = torch.full((1, 2), trainer._tokenizer.pad_token_id or 0, device=device)
    devices = [device] if device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices):
        before = _generators(device)
        trainer.model(input_ids=ids, attention_mask=torch.ones_like(ids))
        after = _generators(device)
    return not all(map(torch.equal, before, after))


def _generators(device: torch.device) -> list[torch.Tensor]:
    found = [torch.get_rng_state()]
    return [*found, torch.cuda.get_rng_state(device)] if device.type == "cuda" else found
