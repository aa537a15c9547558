"""Rows of all ranks: `RowDealer` plans who runs which rows, and moves the rows and what is computed from them."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..errors import ConfigurationError
from ..node_settings import NodeSettings
from .batching import Plan, plan_micro_steps
from .layouts import PER_TOKEN, Row, cut_rows, num_words, record_to_row, row_to_record, to_words
from .row_exchange import RowExchange, topology_of_ranks
from .session_rows import MEANS, PART, cut_session, empty_row

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Share:
    """Rows that one rank runs.

    Args:
        plan ([`Plan`]), sizes (`np.ndarray` of shape `(rows, 2)`):
            Plan, and prompt and completion tokens, of the rows of all ranks.
        own (`list[int]`):
            Numbers of the rows that this rank holds before the exchange.
        steps (`list[dict[int, Row]]`):
            Rows that this rank runs, by micro-step.
        scalars (`dict[str, torch.Tensor]`):
            Fields with one value for all rows.
    """

    plan: Plan
    sizes: np.ndarray
    own: list[int]
    steps: list[dict[int, Row]]
    scalars: Tensors


class RowDealer:
    """Owner of the exchange of rows between ranks. Its methods `share` and `send_back` are collectives of all ranks.

    Args:
        trainer ([`BalancedGRPOTrainer`]):
            Trainer of this rank, with `micro_batch_tokens`. All ranks build their dealer at the same point, because it
            creates process groups.
    """

    def __init__(self, trainer: Any):
        settings = NodeSettings.of(trainer.args)
        assert settings.micro_batch_tokens is not None
        self._cap = settings.micro_batch_tokens
        self._longest_completion = trainer.args.max_completion_length
        device = trainer.accelerator.device
        host = getattr(trainer, "host", None)
        self._topology = topology_of_ranks(device) if host is None else host.topology
        self.exchange = RowExchange(self._topology, settings.balance_across, device)
        self._linear = 6 * trainer.model.config.get_text_config().hidden_size
        self._multiple = trainer.pad_to_multiple_of or 1
        per_sequence = trainer.vllm_importance_sampling_mode.startswith("sequence_")
        self.per_token = frozenset(PER_TOKEN) - (
            {"importance_sampling_ratio"} if per_sequence else set()
        )
        self._has_share = trainer.loss_reduction is None and trainer.loss_type in MEANS
        self._planned_lengths = np.empty(0)  # of `_last_plan`

    def share(self, inputs: list[Tensors]) -> Share:
        """Plan the rows of all ranks, exchange them, and return this rank's share."""
        cut = [row for part in inputs for row in cut_rows(part, self.per_token)]
        if PART in cut[0]:
            cut = self._rows_of_sessions(cut)
        mine = [[len(row["prompt_ids"]), len(row["completion_ids"]), num_words(row)] for row in cut]
        table = self.exchange.all_lengths(cut[0]["prompt_ids"].new_tensor(mine))
        padded = -(-table[..., :2].sum(2) // self._multiple) * self._multiple
        self._check(padded)
        plan, rank = self._plan(padded), self.exchange.rank
        sizes, words = np.split(table.reshape(-1, 3), [2], axis=1)
        own = np.flatnonzero(plan.owners == rank).tolist()
        rows = dict(zip(own, cut, strict=True))
        rows |= self._arriving(rows, plan, words[:, 0])
        steps = [{number: rows[number] for number in numbers} for numbers in plan.bins(rank)]
        scalars = {
            name: value
            for name, value in inputs[0].items()
            if isinstance(value, torch.Tensor) and value.ndim == 0
        }
        return Share(plan, sizes, own, steps, scalars)

    def _arriving(self, rows: dict[int, Row], plan: Plan, words: np.ndarray) -> dict[int, Row]:
        """Send the rows that others run, and return those that come from others. `words`: length of each record."""
        leaving = {
            number: row_to_record(row)
            for number, row in rows.items()
            if plan.targets[number] != self.exchange.rank
        }
        arrived = self.exchange.move(leaving, words, plan.owners, plan.targets)
        return {number: record_to_row(record) for number, record in arrived.items()}

    def send_back(self, share: Share, values: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Send values per completion token to the ranks that hold the rows; return those of this rank's own rows."""
        owners, records = share.plan.owners, {}
        for number, of_row in values.items():
            if owners[number] != self.exchange.rank:
                records[number] = to_words(of_row)
        sizes = share.sizes[:, 1]
        back = self.exchange.move(records, sizes, share.plan.targets, owners)
        return {number: record.view(torch.float32) for number, record in back.items()}

    def _rows_of_sessions(self, sessions: list[Row]) -> list[Row]:
        """Cut sessions into rows, and add empty ones, so that all ranks have the same number."""
        rows: list[Row] = []
        for session in sessions:
            rows += cut_session(session, self.per_token, self._has_share)
        most = self.exchange.most(rows[0]["prompt_ids"].new_tensor(len(rows)))
        return rows + [empty_row(rows[0], self.per_token)] * (most - len(rows))

    def _plan(self, padded: np.ndarray) -> Plan:
        """Plan rows of these lengths. The passes of the old and the reference log-probs share a plan."""
        if not np.array_equal(self._planned_lengths, padded):
            self._last_plan = plan_micro_steps(
                padded, self.exchange.groups, self._cap, self._linear
            )
            self._planned_lengths = padded
        return self._last_plan

    def _check(self, padded: np.ndarray) -> None:
        """Raise on every rank if any row is too long; every rank has all lengths."""
        if padded.max() > self._cap:
            rank = int(padded.max(axis=1).argmax())
            raise ConfigurationError(
                f"a row of rank {rank} has {padded.max()} tokens with its prompt, more than "
                f"`micro_batch_tokens` {self._cap}.",
                setting="micro_batch_tokens",
                got=int(padded.max()),
                node=self._topology.node,
                rank=self._topology.rank,
                cure="Raise `micro_batch_tokens` to at least the longest prompt + completion "
                f"(`max_completion_length` {self._longest_completion}), or shorten prompts.",
            )
