"""Check for wrong engine weights in every round, on every node: equal weights must give equal log-probs."""

from functools import cached_property
from typing import Any

import torch

from ..engine.client import EngineClient
from ..errors import LogprobDivergenceError
from ..run.reporter import warn
from ..wire.messages import WeightVersion
from ..wire.sampling import TRUNCATING
from .generation import NodeGeneration
from .recorded import Turn
from .rounds import NEUTRAL
from .rows import raw_image

NAN_LIMIT = 0.01  # share of a rank's trained tokens
# keys of TRL's output
SIDES = {
    "engine": "sampling_per_token_logps",
    "trainer": "old_per_token_logps",
}
# Settings that forbid tokens or end a completion: the log-probs over the whole vocabulary do not depend on them
SCORED_KEYS = {
    *TRUNCATING,
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "max_tokens",
    "include_stop_str_in_output",
}
NAN_CURES = {
    "engine": "The trainer has numbers for them: a float16 engine overflows above 65504, so try "
    "`engine_kwargs={'dtype': 'bfloat16'}`; leave out those that choose kernels, caches or quantization.",
    "trainer": "Training has diverged: resume from an earlier checkpoint with a lower `learning_rate` or "
    "`max_grad_norm`, and train in bfloat16 instead of float16.",
}


class DivergenceMonitor:
    """Monitor of the difference between engine and trainer log-probs, which TRL computes anyway.

    It costs one subtraction and no collective, and for stale completions a prefill of one row.

    Args:
        host ([`NodeHost`]), args ([`~trl.GRPOConfig`]), generation ([`NodeGeneration`]):
            Objects of the calling rank.
    """

    def __init__(self, host: Any, args: Any, generation: NodeGeneration):
        self._host = host
        self._where = str(host.topology)
        self._generation = generation
        self._turn_off_for(args)
        self.last = 0.0
        self._temperature = args.temperature
        self._turn = -1
        # row, number of scored tokens, engine, request id
        self._requested: tuple[int, int, EngineClient, int] | None = None
        generation.on_stale = self.ask

    def _turn_off_for(self, sampling: Any) -> None:
        """Turn the check off if TRL scores completions without some of the sampling settings."""
        if names := settings_not_scored(sampling):
            if self._host.settings.logprob_divergence_limit != 0:
                warn(
                    "The check of engine against trainer log-probs is off, because TRL scores completions without "
                    f"{', '.join(names)}."
                )
            self.limit = 0.0

    @cached_property
    def limit(self) -> float:
        """Limit for the mean difference per token; 0 if the check is off. Its first use is in the first round."""
        return self._host.updates.divergence_limit

    def check(self, output: dict, in_losses: bool = False) -> tuple[int, int]:
        """Raise if the log-probs of engine and trainer differ too much on this rank, or if too many are NaN.

        If older weights made these completions, their log-probs do not test the engine's current weights. The
        difference is then that of the row whose score `ask` requested, if any.

        Args:
            output (`dict`):
                Output of TRL's `_generate_and_score_completions`.
            in_losses (`bool`, *optional*, defaults to `False`):
                True if the losses will have the trainer's log-probs, for `judge_sums`. This check is then of NaN from
                the engine only.

        Returns:
            Number of trained tokens, and of those whose log-prob is NaN.

        Raises:
            `LogprobDivergenceError`: if the mean difference exceeds the limit, or if more than 1 % of the trained
                tokens have a NaN log-prob; the message names node, rank and weight version.
        """
        if self.limit:
            self._turn_off_for(self._generation)  # a callback may have changed its settings
        # once, because it makes the host wait for the device
        trained = trained_mask(output).nonzero(as_tuple=True)
        scores = {
            side: output[key][trained].float() for side, key in SIDES.items() if key in output
        }
        counts = check_nan(
            self._where, scores, self._generation.used_version, self._generation.version
        )
        if len(scores) == len(SIDES):
            present = self.present_logps(output)[trained]
            difference = (scores["trainer"] - present).abs()
            # 0 if there is no number
            self._judge(difference.nanmean().nan_to_num(posinf=float("inf")).item())
        elif self.limit and not in_losses:
            warn(
                "The log-prob check of the engines is off, because vllm_importance_sampling_correction is False."
            )
            self.limit = 0.0
        return counts

    def present_logps(self, output: dict) -> torch.Tensor:
        """
        Return what the engines' present weights give to a round's tokens, shape `(rows, completion)`: what they gave
        when they generated, or for stale completions the score of the row that `ask` requested; NaN: not known.
        """
        sampled = output[SIDES["engine"]]
        if not self._generation.stale:
            return sampled.clone()
        found = torch.full_like(sampled, torch.nan)
        if self._requested is not None and (row := self._requested[0]) < len(found):
            scored = self._fetched()
            found[row, : len(scored)] = scored.to(found)
            trained = trained_mask(output)[row].bool()
            scores = {"engine": found[row][: len(scored)][trained[: len(scored)]]}
            check_nan(self._where, scores, self._generation.version, self._generation.version)
        return found

    def judge_sums(self, difference: float, compared: float, tokens: int, nan: int) -> None:
        """Do what `check` does with the sums of this rank's rows of a round.

        Args:
            difference (`float`), compared (`float`):
                Sum of the differences between engine and trainer, and number of tokens in it.
            tokens (`int`), nan (`int`):
                Trained tokens, and those of them for which the trainer has NaN.
        """
        raise_for_nan(self._where, tokens, nan, ["trainer"], self._generation.version)
        self._judge(difference / compared if compared else 0.0)

    def _judge(self, difference: float) -> None:
        self.last = difference
        if self.limit and self.last > self.limit:
            kwargs = ", ".join(self._host.settings.engine_kwargs) or "none set"
            raise LogprobDivergenceError(
                f"{self._where}: engine and trainer differ by {self.last:.3f} per token (limit {self.limit:g}) with "
                f"the weights of {self._generation.version}: {noise_of(self._host.updates.model)}some of the engine's "
                f"weights are stale or wrong, its `engine_kwargs` ({kwargs}) make it compute something else, or the "
                "completions are not the engine's (a `rollout_func`, an environment, edited rows). Check that vLLM "
                "supports reloading this architecture; `logprob_divergence_limit` sets the limit, 0 turns it off."
            )

    def ask(self, made: Turn) -> None:
        """Request the score of one of these rows under an engine's current weights; `check` waits for the reply.

        Each engine of a node gets it from one rank, and from another one in the next round; with fewer ranks than
        engines, each rank asks the next ones in turn. The request is a prefill of one row. It must go out before the
        next round's prompts, or it queues behind them.
        """
        self._requested = None
        if not self.limit:
            return
        self._turn += 1
        engines, topology = self._generation.engines, self._host.topology
        place = (topology.local_rank + self._turn) % topology.local_world_size
        if place >= len(engines):
            return
        asking = min(topology.local_world_size, len(engines))
        client = engines[(place + self._turn * asking) % len(engines)]
        row = self._turn % len(made.rows)
        prompt = made.prompts[row]
        # vLLM adds one token
        tokens = [*prompt, *made.rows[row].tokens.tolist()][: engines.max_model_len - 1]
        if len(tokens) > len(prompt) and client.lost is None:
            with client.loss_accepted():  # a check whose engine ends is left out
                images = made.images[row] if made.images is not None else None
                request_id = client.post_score(
                    tokens,
                    self._temperature,
                    tuple(map(raw_image, images or ())),
                    self._generation.version.update,
                )
                self._requested = row, len(tokens) - len(prompt), client, request_id

    def _fetched(self) -> torch.Tensor:
        """Wait for the score that `ask` requested; empty if its engine has ended."""
        assert self._requested is not None
        _, kept, client, request_id = self._requested
        self._requested = rollout = None
        with client.loss_accepted():
            rollout = client.scored(request_id) if client.lost is None else None
        if rollout is None:
            return torch.empty(0)
        return torch.from_numpy(rollout.logprobs[-kept:].copy())


def trained_mask(output: Any) -> torch.Tensor:
    """Return 1 for the completion tokens that are trained: neither padding, nor cut, nor of a tool."""
    mask = output["completion_mask"]
    return mask * output["tool_mask"] if output.get("tool_mask") is not None else mask


def check_nan(
    where: str,
    scores: dict[str, torch.Tensor],
    engine_version: WeightVersion,
    trainer_version: WeightVersion,
) -> tuple[int, int]:
    """Raise if more than 1 % of a rank's log-probs are NaN, and return how many there are and how many are NaN.

    Args:
        where (`str`):
            Node and rank, for the message.
        scores (`dict[str, torch.Tensor]`):
            Log-probs of the same tokens from `"engine"`, `"trainer"` or both.
        engine_version (`WeightVersion`), trainer_version (`WeightVersion`):
            Weights with which each side computed them.

    Raises:
        `LogprobDivergenceError`: the message names the side, its weights and the cure.
    """
    if not scores:
        return 0, 0
    nan = torch.stack([values.isnan() for values in scores.values()])
    tokens, count = nan.shape[1], int(nan.any(0).sum())
    sides = [side for side, found in zip(scores, nan.any(1).tolist(), strict=True) if found]
    version = trainer_version if "trainer" in sides else engine_version
    raise_for_nan(where, tokens, count, sides, version)
    return tokens, count


def raise_for_nan(
    where: str, tokens: int, count: int, sides: list[str], version: WeightVersion
) -> None:
    """Raise if `count` of so many trained tokens, those whose log-prob is NaN on one of `sides`, are too many."""
    if count > NAN_LIMIT * tokens:
        raise LogprobDivergenceError(
            f"{where}: {100 * count / tokens:.1f} % of the trained tokens ({count} of {tokens}) have a NaN log-prob "
            f"(limit {100 * NAN_LIMIT:g} %), from the {' and the '.join(sides)}, with the weights of {version}. "
            f"{NAN_CURES[sides[-1]]}"
        )


def noise_of(model: Any) -> str:
    """Return a clause about the dropout in the trainer's log-probs, if a layer of the model or its adapter has any."""
    modules = model.modules() if isinstance(model, torch.nn.Module) else ()
    rates = [
        one.p for one in modules if isinstance(one, torch.nn.Dropout) and one.training and one.p > 0
    ]
    if not rates:
        return ""
    return (
        f"the trainer's have the noise of {len(rates)} dropout layers (up to {max(rates):g}), which "
        "`disable_dropout=True` turns off; or "
    )


def settings_not_scored(args: Any) -> list[str]:
    """Return the names of the settings that change the engine's probabilities and that TRL's scores do not include.

    Args:
        args ([`~trl.GRPOConfig`] or [`NodeGeneration`]):
            Object with the settings.
    """
    given = args.generation_kwargs or {}
    neutral = NEUTRAL | {"logit_bias": {}, "temperature": args.temperature}
    used = {"repetition_penalty": args.repetition_penalty} | given
    changed = []
    for key, value in used.items():
        if key not in SCORED_KEYS and value not in (None, neutral.get(key)):
            changed.append(f"generation_kwargs[{key!r}]" if key in given else key)
    return changed
