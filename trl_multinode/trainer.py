"""`MultiNodeGRPOTrainer`: TRL's `GRPOTrainer` with the engines of every node wired in, and rounds made ahead."""

import copy
from functools import partial

from trl import GRPOTrainer

from .batches.microbatches import BalancedGRPOTrainer
from .config import MultiNodeGRPOConfig
from .host import NodeHost
from .node_trainer import RewardedNodeTrainer
from .pictures import check_pictures, with_lists_of_pictures
from .rollouts.generation import Prompts
from .rollouts.look_ahead import UpcomingBatches
from .rollouts.monitor import DivergenceMonitor


class MultiNodeGRPOTrainer(RewardedNodeTrainer, BalancedGRPOTrainer):
    """
    TRL's [`~trl.GRPOTrainer`] where every node generates on its own vLLM engines.

    A drop-in replacement: same arguments. With `use_vllm=True` and `vllm_mode="node"` (the defaults of
    [`MultiNodeGRPOConfig`]) the local main process of every node starts the node's engines on the GPUs that no rank of
    the node trains on; prompts and completions stay on the node, and the weights come out of the ZeRO-3 shards through
    the node's memory. With any other mode it does what TRL does.

    Args:
        model (`str` or [`~transformers.PreTrainedModel`]):
            As in TRL.
        reward_funcs:
            As in TRL.
        args ([`MultiNodeGRPOConfig`] or [`~trl.GRPOConfig`], *optional*):
            A plain `GRPOConfig` is taken literally: it needs `use_vllm=True, vllm_mode="node"`.
        **kwargs:
            As in TRL.

    Raises:
        `ConfigurationError`: before any weights file is opened, the same on every rank.
    """

    _trl, _config = GRPOTrainer, MultiNodeGRPOConfig

    def _wire(self, host: NodeHost) -> None:
        super()._wire(host)
        self._monitor = DivergenceMonitor(host, self.args, self.model, self.vllm_generation)
        self._upcoming: UpcomingBatches | None = None

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        if self.max_staleness:
            if self._upcoming is None or self._upcoming.source is not epoch_iterator:
                self._upcoming = UpcomingBatches(epoch_iterator, self.steps_per_round)
            epoch_iterator = self._upcoming.open_window()
        return super().get_batch_samples(epoch_iterator, num_batches, device)

    def _generate_and_score_completions(self, inputs):
        if self.host is None:
            return super()._generate_and_score_completions(inputs)
        if self._is_vlm:
            check_pictures(self.accelerator, inputs)
        make = partial(super()._generate_and_score_completions, with_lists_of_pictures(inputs))
        output = self._one_round(make, partial(self._prompts_after, inputs) if self.max_staleness else None)
        if self.vllm_generation.generated:  # a `rollout_func` may have its log-probs from elsewhere
            self._monitor.check(output, stale=self.model.training and self.vllm_generation.lag[0] > 0)
        if self.model.training:
            self._meter.add_weights(output)
        return output

    def _tokenize_prompts(self, prompts):
        """TRL 1.16 says `None` for a prompt without pictures, which processors refuse when the batch is scored; an
        empty list they take."""
        prompt_ids, images, fields = super()._tokenize_prompts(prompts)
        if self.host is not None and images is not None:
            images = [pictures or [] for pictures in images]
        return prompt_ids, images, fields

    def _prompts_after(self, inputs) -> Prompts | None:
        """Token ids of the next round's prompts; `None` if there is no such round, or one that cannot be foreseen."""
        if self._upcoming is None:
            return None
        ahead = self.steps_per_round - self._step % self.steps_per_round
        left = (self.state.max_steps - self.state.global_step) * self.args.gradient_accumulation_steps
        batch = self._upcoming.after(inputs, ahead)
        if batch is None or ahead >= left - self._upcoming.place_in_window(inputs):
            return None
        if "image" in batch[0] or "images" in batch[0]:  # TRL builds the prompts of pictures while it scores
            return None
        prompt_ids, images, _ = self._tokenize_prompts([copy.deepcopy(row["prompt"]) for row in batch])
        return prompt_ids if images is None else None
