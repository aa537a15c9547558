"""`micro_batch_tokens` in TRL's trainer: balanced micro-batches of the rows of an optimizer step.

The accumulating calls of `training_step` only collect TRL's slices; the last call runs all micro-steps through
transformers' own `training_step`. TRL's `training_step` calls both, and counts steps and seconds. The gradient equals
TRL's: `docs/use/balance.md` has the formula.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from transformers import Trainer
from trl import GRPOTrainer

from ..errors import ConfigurationError
from ..images import every_row_has_images, may_skip_vision_tower
from ..node_settings import NodeSettings
from ..run.reporter import report
from .layouts import Compact, Row, join_rows
from .local_metrics import LocalMetrics, mode_of
from .own_loss import reason_of_loss
from .row_images import TYPE_IDS, images_in
from .session_rows import PART, parts_of
from .shares import RowDealer, Share, Tensors

# the loss of a micro-batch is a mean over its rows
MEAN_OVER_ROWS = (
    "grpo",
    "sapo",
    "dr_grpo",
    "luspo",
)
# the loss is a sum, divided by the tokens of the generation block
SUM_OVER_TOKENS = (
    "dapo",
    "cispo",
    "vespo",
)
# Rows begin in column 0, so padding follows the tokens, which a recurrent layer reads in their order
KNOWN_LAYERS = {"full_attention", "sliding_attention", "linear_attention"}

# log-probs, entropies, auxiliary loss
Scores = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


def reason_against(trainer: GRPOTrainer) -> str | None:
    """Return the reason to keep TRL's micro-batches, the same on every rank, or `None` if there is none."""
    reasons = {
        f"loss_type={trainer.loss_type!r} is not a sum over rows": (
            trainer.loss_reduction is None
            and trainer.loss_type not in MEAN_OVER_ROWS + SUM_OVER_TOKENS
        ),
        "a mean over rows does not know which of them are of one session": (
            trainer._has_sessions and trainer.loss_reduction == "rows"
        ),
        "the entropy bonus is a mean over the tokens of a micro-batch": trainer._entropy_bonus_enabled,
        "top_entropy_quantile is taken over a micro-batch": trainer.top_entropy_quantile < 1.0,
        "the router's auxiliary loss is taken over a micro-batch": trainer.aux_loss_enabled,
        "not every row has an image, and ranks must run the vision tower together": (
            trainer._is_vlm
            and not may_skip_vision_tower(trainer.args, trainer.accelerator)
            and not every_row_has_images(trainer.train_dataset)
        ),
        **_reasons_of_model(trainer.model),
        "context parallelism cuts the batch itself": bool(
            getattr(trainer.accelerator, "parallelism_config", None)
        ),
    }
    return reason_of_loss(type(trainer)) or next(
        (reason for reason, holds in reasons.items() if holds), None
    )


def _reasons_of_model(model: Any) -> dict[str, bool]:
    """Return why the model's scores may depend on the place of the padding, and whether each reason holds."""
    config = model.config.get_text_config()
    rotary = any("rotary" in type(module).__name__.lower() for module in model.modules())
    rope = str(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None))
    layers = sorted({*(getattr(config, "layer_types", None) or [])} - KNOWN_LAYERS)
    return {
        f"{type(model).__name__} has no rotary positions, so they may be absolute": not rotary,
        f"rotary frequencies depend on the padded length: {rope}": "dynamic" in rope
        or "longrope" in rope,
        f"layers of type {layers} may see padding": bool(layers),
    }


def with_tool_mask(trainer: Any, inputs: Tensors) -> Tensors:
    """Give all rows of a `rollout_func` a mask of tool tokens, in one dtype.

    Such a function may return one on some ranks or in some rounds only, and of any numbers, but the rows that ranks
    exchange must have the same fields and dtypes. The slice may be used again, so it stays unchanged.
    """
    if trainer.rollout_func is None:
        return inputs
    mask = inputs.get("tool_mask")
    return {
        **inputs,
        "tool_mask": (torch.ones_like(inputs["completion_ids"]) if mask is None else mask).float(),
    }


class MicroSteps(Trainer):
    """Link between TRL's trainer and transformers': the `super().training_step` of TRL's trainer is the one below."""

    _balance: "Balance | None" = None

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Drop what an unfinished step has left, after Ctrl-C in a notebook, then train."""
        if self._balance is not None:
            self._balance.reset()
        return super().train(*args, **kwargs)

    def training_step(
        self,
        model: torch.nn.Module,
        inputs: Any,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        if self._balance is None:
            return super().training_step(model, inputs, num_items_in_batch)
        model.train()  # first, as in transformers, because `_prepare_inputs` depends on the mode
        self._balance.slices.append(with_tool_mask(self, self._prepare_inputs(inputs)))
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        slices, self._balance.slices = self._balance.slices, []
        micro_step = super().training_step
        return self._balance.run(
            slices, model, lambda batch: micro_step(model, batch, num_items_in_batch)
        )


class BalancedGRPOTrainer(GRPOTrainer, MicroSteps):
    """
    TRL's [`~trl.GRPOTrainer`] with `micro_batch_tokens`; without it every method is TRL's.

    It works with every `vllm_mode` and without vLLM, with one process and with many. All training ranks take part in
    its collectives. Each no-grad pass and each optimizer step gathers the lengths once and exchanges rows once; with a
    loss that sums over tokens, a step does both for each of its generation blocks. A no-grad pass also sends the
    log-probs back, and an optimizer step gathers the metrics once.

    A subclass with a `_compute_loss` or `compute_loss` of its own keeps TRL's micro-batches, with a line, unless it
    declares `loss_reduction`:

    ```python
    class MyTrainer(GRPOTrainer):
        loss_reduction = "rows"  # the mean over the rows of the batch; "tokens": TRL's sum over tokens

        def _compute_loss(self, model, inputs): ...
    ```

    Raises:
        `ConfigurationError`: while training, on every rank, if a row is longer than `micro_batch_tokens`; with
            sessions also at the start, if TRL's micro-batches must be kept.
    """

    # How a subclass with a loss of its own reduces it: "rows", the mean over the rows of its batch, or "tokens", the
    # sum over its tokens divided by `inputs["num_items_in_batch"]`; `None` is TRL's loss with its `loss_type`
    loss_reduction: ClassVar[str | None] = None
    # TRL's rows are sessions, which are cut into rows; set before `__init__`
    _has_sessions = False
    # values of `PART` of each session of a round, while the round is scored
    session_parts: list[list[int]] | None = None

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if NodeSettings.of(self.args).micro_batch_tokens is None:
            return
        if reason := reason_against(self):
            if self._has_sessions:
                raise ConfigurationError(
                    f"`harness` needs balanced micro-batches, and they cannot be used: {reason}.",
                    setting="harness",
                    cure="Use another model or loss, or a loop of your own (`rollout_func`).",
                )
            if self.accelerator.is_main_process:
                report(f"micro_batch_tokens is off, the micro-batches are TRL's: {reason}")
            return
        self._balance = Balance(self)

    @property
    def is_mean_over_rows(self) -> bool:
        """`True` if the loss of a micro-batch is a mean over its rows."""
        if self.loss_reduction is not None:
            return self.loss_reduction == "rows"
        return self.loss_type in MEAN_OVER_ROWS

    def _prepare_inputs(self, generation_batch: Any) -> Tensors:
        if self._balance is not None and self._balance.inside:
            return generation_batch  # transformers' `training_step` passes a finished micro-batch
        return super()._prepare_inputs(generation_batch)

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: Tensors,
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        if self._balance is None or not self._balance.inside:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        with self._balance.metrics.kept_local(self):
            loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        return loss * self._balance.scale(len(inputs["prompt_ids"]))

    def prediction_step(
        self,
        model: torch.nn.Module,
        inputs: Any,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple:
        step = super().prediction_step
        if self._balance is None or not self._has_sessions:
            return step(model, inputs, prediction_loss_only, ignore_keys)
        slices = [with_tool_mask(self, self._prepare_inputs(inputs))]
        loss = self._balance.run(slices, model, lambda batch: step(model, batch, True)[0])
        # of all ranks, because transformers counts only some of them in a last batch that was filled up
        return self.accelerator.reduce(loss, "mean"), None, None

    def _get_per_token_logps_and_entropies(
        self,
        model: torch.nn.Module,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        **kwargs: Any,
    ) -> Scores:
        score = super()._get_per_token_logps_and_entropies
        if self._balance is None or not (self.model.training or self._has_sessions):
            return score(model, input_ids, attention_mask, logits_to_keep, batch_size, **kwargs)

        def compact(ids: torch.Tensor, mask: torch.Tensor, keep: int, fields: dict) -> Scores:
            layout = Compact(mask, keep, self.pad_to_multiple_of or 1)
            call = partial(layout.call, model)
            keep = layout.logits_to_keep
            for name in TYPE_IDS:
                if fields.get(name) is not None:
                    fields = fields | {name: layout.ids(fields[name])}
            found = score(call, layout.ids(ids), layout.attention_mask, keep, **fields)
            return layout.restore(found[0]), layout.restore(found[1]), found[2]

        if torch.is_grad_enabled() or self._balance.inside:
            return compact(input_ids, attention_mask, logits_to_keep, kwargs)
        images = images_in(kwargs)
        logps = self._balance.score(compact, input_ids, attention_mask, logits_to_keep, images)
        return logps, None, None


class Balance:
    """Owner of this rank's rows during an optimizer step: it collects and runs them.

    Args:
        trainer ([`BalancedGRPOTrainer`]):
            Trainer of this rank, with `micro_batch_tokens`. All ranks build their `Balance` at the same point, because
            it creates process groups.
    """

    def __init__(self, trainer: BalancedGRPOTrainer):
        self._trainer = trainer
        self.dealer = RowDealer(trainer)
        self.inside = False  # true during a micro-step
        self._slice_rows = 0
        self.reset()

    def reset(self) -> None:
        """Drop the slices and metrics of an optimizer step that did not end."""
        # slices of this optimizer step; TRL may use these objects again
        self.slices: list[Tensors] = []
        self.metrics = LocalMetrics()
        self.dealer.exchange.take_moved()

    @contextlib.contextmanager
    def rehearsing(self, rows: int) -> Iterator[None]:
        """Let TRL's loss take a batch of `rows` rows as a finished micro-batch, and drop its metrics."""
        before = self.metrics, self._slice_rows
        self.metrics, self._slice_rows, self.inside = LocalMetrics(), rows, True
        try:
            yield
        finally:
            self.inside = False
            self.metrics, self._slice_rows = before

    def scale(self, rows: int) -> float:
        """Return the factor that makes a micro-batch's loss its part of TRL's loss: see docs/use/balance.md."""
        return rows / self._slice_rows if self._trainer.is_mean_over_rows else 1.0

    def run(
        self,
        slices: list[Tensors],
        model: torch.nn.Module,
        micro_step: Callable[[Tensors], torch.Tensor],
    ) -> torch.Tensor:
        """Run all micro-steps of the slices of an optimizer step, or of one batch of an evaluation.

        Returns this rank's loss, scaled like the sum over TRL's calls.
        """
        self._slice_rows = len(slices[0]["prompt_ids"])
        shares = [self.dealer.share(block) for block in self._blocks(slices)]
        batches = [(share.scalars, rows) for share in shares for rows in share.steps]
        loss = torch.zeros((), device=self._trainer.args.device)
        start, self.inside = time.perf_counter(), True
        try:
            for index, (scalars, rows) in enumerate(batches):
                batch = self._join(rows) | scalars
                with self._synchronized(model, last=index == len(batches) - 1):
                    loss += micro_step(batch)
        finally:
            self.inside = False
        self._log(shares, time.perf_counter() - start)
        return loss

    def _blocks(self, slices: list[Tensors]) -> list[list[Tensors]]:
        """Group slices whose rows may mix. A sum over tokens is divided by the tokens of its own generation block."""
        if self._trainer.is_mean_over_rows:
            return [slices]
        blocks: dict[float, list[Tensors]] = {}
        for part in slices:
            blocks.setdefault(part["num_items_in_batch"].item(), []).append(part)
        return list(blocks.values())

    @contextlib.contextmanager
    def _synchronized(self, model: torch.nn.Module, last: bool) -> Iterator[None]:
        """Let only the last micro-step reduce the gradients, as in transformers' own loop."""
        accelerator = self._trainer.accelerator
        accelerator.gradient_state._set_sync_gradients(last)
        each = accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
        if last or each or accelerator.distributed_type == "DEEPSPEED":
            yield
        else:
            with accelerator.no_sync(model=model):
                yield

    @torch.no_grad()
    def score(
        self,
        compact: Callable[[torch.Tensor, torch.Tensor, int, dict], Scores],
        input_ids: torch.Tensor,
        mask: torch.Tensor,
        keep: int,
        images: dict[str, Any],
    ) -> torch.Tensor:
        """Return the completions' per-token log-probs, shape `(rows, keep)`, equal to those of TRL's fixed chunks."""
        rows_of_trl = {
            "prompt_ids": input_ids[:, :-keep],
            "prompt_mask": mask[:, :-keep],
            "completion_ids": input_ids[:, -keep:],
            "completion_mask": mask[:, -keep:],
            **images,
        }
        is_completion = rows_of_trl["completion_mask"].bool()
        if self._trainer.session_parts is not None:
            parts = parts_of(self._trainer.session_parts, rows_of_trl["completion_ids"])
            rows_of_trl[PART] = parts
            is_completion = is_completion & (parts % 2 == 0)
        share = self.dealer.share([rows_of_trl])
        found: dict[int, torch.Tensor] = {}
        for rows in share.steps:
            batch = self._join(rows)
            ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
            masks = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
            width = batch["completion_ids"].shape[1]
            logps = compact(ids, masks, width, images_in(batch))[0]
            for number, row in zip(rows, logps, strict=True):
                found[number] = row[: share.sizes[number, 1]]
        found |= self.dealer.send_back(share, found)
        result = logps.new_zeros(len(input_ids), keep)
        result[is_completion] = torch.cat([found[number] for number in share.own]).to(result)
        return result

    def _join(self, rows: dict[int, Row]) -> Tensors:
        return join_rows(
            list(rows.values()), self.dealer.per_token, self._trainer._tokenizer.pad_token_id
        )

    def _log(self, shares: list[Share], seconds: float) -> None:
        """Log TRL's metrics, with a collective of all ranks, and the `balance/` metrics, which need no collective."""
        self.metrics.finish(self._trainer)
        costs = np.concatenate([share.plan.costs() for share in shares], axis=1)
        cheapest_rank, lock_step = costs.sum(axis=1).min(), costs.max(axis=0).sum()
        slots = np.concatenate([share.plan.slots() for share in shares], axis=1)
        moved, crossed = self.dealer.exchange.take_moved()
        values = {
            "real_token_share": float(sum(share.sizes.sum() for share in shares) / slots.sum()),
            "mean_rows": sum(len(share.sizes) for share in shares) / costs.size,
            "micro_steps": costs.shape[1],
            "moved_mib": moved / 2**20,
            "moved_between_nodes_mib": crossed / 2**20,
            "lost_s": seconds * float(1 - cheapest_rank / lock_step),
        }
        for name, value in values.items():
            self._trainer._metrics[mode_of(self._trainer)][f"balance/{name}"].append(value)
