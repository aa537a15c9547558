"""Rows of all ranks: `RowDealer` plans who runs which rows, and moves the rows and what is computed from them."""

from typing import Any

import numpy as np
import torch

from ..errors import ConfigurationError
from ..node_settings import NodeSettings
from .batching import Plan, plan_micro_steps
from .layouts import PER_TOKEN, Row, cut_rows, lengths, record_to_row, row_to_record
from .row_exchange import RowExchange, topology_of_ranks

Tensors = dict[str, torch.Tensor]


class Share:
    """Rows that one rank runs, with the source and target rank of every row.

    Args:
        plan ([`Plan`]), sizes (`np.ndarray` of shape `(rows, 2)`):
            Plan, and prompt and completion tokens, of the rows of all ranks.
        rank (`int`):
            This rank.
        inputs (`dict[str, torch.Tensor]`):
            Slice of the rows, whose scalars hold for all rows.
    """

    def __init__(self, plan: Plan, sizes: np.ndarray, rank: int, inputs: Tensors):
        self.plan, self.sizes = plan, sizes
        self.owners, self.targets = plan.owners, plan.targets
        # rows that this rank holds before the exchange
        self.own = np.flatnonzero(self.owners == rank).tolist()
        self.scalars = {
            name: value for name, value in inputs.items() if value is not None and value.ndim == 0
        }
        self.steps: list[dict[int, Row]] = []  # rows that this rank runs, by micro-step


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
        self._planned_lengths = np.empty(0)  # of `_last_plan`

    def share(self, inputs: list[Tensors]) -> Share:
        """Plan the rows of all ranks, exchange them, and return this rank's share."""
        table = self.exchange.all_lengths(torch.cat([lengths(part) for part in inputs]))
        padded = -(-table.sum(2) // self._multiple) * self._multiple
        self._check(padded)
        share = Share(self._plan(padded), table.reshape(-1, 2), self.exchange.rank, inputs[0])
        own = [row for part in inputs for row in cut_rows(part, self.per_token)]
        rows = dict(zip(share.own, own, strict=True))
        rows |= self._exchanged(rows, share)
        for numbers in share.plan.bins(self.exchange.rank):
            share.steps.append({number: rows[number] for number in numbers})
        return share

    def _exchanged(self, rows: dict[int, Row], share: Share) -> dict[int, Row]:
        """Send the rows that other ranks run, and return those of other ranks that this one runs."""
        like = next(iter(rows.values()))
        in_row = [name for name in like if name in self.per_token]
        others = sum(
            value.numel() for name, value in like.items() if name not in (*in_row, "prompt_ids")
        )
        record_sizes = share.sizes[:, 0] + len(in_row) * share.sizes[:, 1] + others
        leaving = {}
        for number, row in rows.items():
            if share.targets[number] != self.exchange.rank:
                leaving[number] = row_to_record(row)
        arrived = self.exchange.move(leaving, record_sizes, share.owners, share.targets)
        return {
            number: record_to_row(record, like, share.sizes[number], self.per_token)
            for number, record in arrived.items()
        }

    def send_back(self, share: Share, values: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Send values per completion token to the ranks that hold the rows; return those of this rank's own rows."""
        records = {}
        for number, of_row in values.items():
            if share.owners[number] != self.exchange.rank:
                records[number] = row_to_record({"values": of_row})
        sizes = share.sizes[:, 1]
        back = self.exchange.move(records, sizes, share.targets, share.owners)
        return {number: record.view(torch.float32) for number, record in back.items()}

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
