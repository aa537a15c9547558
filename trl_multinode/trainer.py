"""`MultiNodeGRPOTrainer`: TRL's `GRPOTrainer` on the engines of every node, with rounds generated ahead."""

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from trl import GRPOTrainer
from trl.data_utils import is_conversational

from .batches.microbatches import BalancedGRPOTrainer
from .batches.own_loss import LOSSES, RatioCheck, owner_of
from .batches.session_rows import check_session_loss, parts_of
from .call_checks import check_harness
from .config import MultiNodeGRPOConfig
from .errors import ConfigurationError, RolloutError
from .host import NodeHost
from .images import (
    check_images,
    has_images,
    may_have_images,
    may_skip_vision_tower,
    with_lists_of_images,
    without_empty_images,
)
from .node_settings import NodeSettings, is_node_mode
from .node_trainer import RewardedNodeTrainer, bound_arguments
from .rehearsal.rehearsal import Rehearsal
from .rollouts.generation import Prompts
from .rollouts.groups import Group
from .rollouts.loss_scores import ORIGIN, LossScores, moves_the_generator
from .rollouts.recorded import PART, Recorded
from .rollouts.replay import Replay
from .rollouts.sampling_again import SamplingAgain
from .rollouts.scoring import GroupScorer
from .rollouts.stand_in import Ask, Recorder
from .rollouts.tool_calls import ToolCalls, unwrapped
from .rollouts.upcoming import Batch, UpcomingBatches
from .sessions.harness import Harness, harness_reward
from .sessions.rollout import COUNTS, LOGGED, TEXTS, HarnessRollout, left_out
from .sessions.running import Sessions


class MultiNodeGRPOTrainer(RewardedNodeTrainer, BalancedGRPOTrainer):
    """
    TRL's [`~trl.GRPOTrainer`] with generation on each node's own vLLM engines.

    It is a drop-in replacement with the same arguments. With `use_vllm=True` and `vllm_mode="node"` (the defaults of
    [`MultiNodeGRPOConfig`]), the local main process of every node starts engines on the GPUs that no rank of the node
    trains on. Prompts and completions stay on the node, and the weights go from the ZeRO-3 shards to the engines
    through the node's memory. With any other `vllm_mode` it does what TRL does.

    Args:
        model (`str` or [`~transformers.PreTrainedModel`]):
            Model to train, as in TRL.
        reward_funcs:
            Reward functions, as in TRL.
        args ([`MultiNodeGRPOConfig`] or [`~trl.GRPOConfig`], *optional*):
            Training arguments. A plain `GRPOConfig` keeps TRL's defaults, so node mode needs
            `use_vllm=True, vllm_mode="node"` in it.
        harness ([`Harness`] or `Callable`, *optional*):
            Agent that owns its loop: an async function of a [`Session`]. See docs/use/agents.md.
        **kwargs:
            Further arguments, as in TRL.

    Raises:
        `ConfigurationError`: if node mode cannot run as configured; the same on every rank, before any weights file is
            opened.
    """

    _trl, _config = GRPOTrainer, MultiNodeGRPOConfig
    _tool_calls: ToolCalls | None = None
    _recorder: Recorder | None = None  # of whole rollouts, if they run ahead of their round
    _scorer: GroupScorer | None = None  # of groups, before their round
    _again: SamplingAgain | None = None  # of groups with equal rewards, with `dynamic_sampling`
    _loss_scores: LossScores | None = None  # in the place of TRL's scoring pass
    _ratio_check: RatioCheck | None = None  # of a loss of the user's own, with rounds ahead
    _first_row = 0  # of the batch that generates, among the rows of this rank
    _harness: HarnessRollout | None = None
    session_inputs: Batch  # rows of the dataset for which sessions run

    def __init__(self, *args: Any, harness: Any = None, **kwargs: Any):
        if harness is not None:
            kwargs = with_harness(harness, bound_arguments(self._trl, self, *args, **kwargs))
            self._harness, args = kwargs["rollout_func"], ()
            self._has_sessions = True
        with nullcontext() if self._harness is None else warnings.catch_warnings():
            if self._harness is not None:
                # TRL's warning is of an argument that the user has not given
                warnings.filterwarnings("ignore", message=".*'rollout_func'")
            super().__init__(*args, **kwargs)
        if NodeSettings.of(self.args).rehearse_longest:
            self.add_callback(Rehearsal(self))

    def _wire(self, host: NodeHost) -> None:
        super()._wire(host)
        if self._is_vlm and may_skip_vision_tower(self.args, self.accelerator):
            self.model.register_forward_pre_hook(without_empty_images, with_kwargs=True)
        self._loss_scores = LossScores(
            self, self._monitor, self._meter, partial(reason_to_score, self)
        )
        self._upcoming: UpcomingBatches | None = None
        self._tool_calls = ToolCalls.of(host, host.settings.tool_errors == "raise")
        self._tool_failures: list[RolloutError] = []
        host.presence.user_calls = [self._tool_calls.state, self._reward_calls.state]
        if self._harness is not None:
            self._harness.sessions = Sessions(
                self._harness.harness,
                host,
                self.vllm_generation,
                self.chat_template_kwargs,
                self._harness.returns_text,
            )
            host.presence.user_calls.append(self._harness.sessions.state)
        if self.environment_factories is not None:
            self._tool_calls.watch_environments(self)
        owner = owner_of(type(self), *LOSSES)
        self._ratio_check = (
            RatioCheck(owner) if owner is not None and host.settings.max_staleness else None
        )
        if host.settings.dynamic_sampling:
            self._again = SamplingAgain(host.settings, self._meter, self)
        if runs_ahead(self, host.settings):
            self._recorder = Recorder(self, self._tool_calls)
            self._scorer = (
                GroupScorer(self, host, self._reward_calls) if host.settings.scores_groups else None
            )
            self.vllm_generation.record(self._make_group)
            if self._harness is not None:
                groups, sessions = self.vllm_generation.rounds.groups, self._harness.sessions
                groups.is_stopped = lambda: sessions.stopped
                sessions.on_stopped = groups.look_again

    def _check_call(self, host: NodeHost, settings: Any, call: dict[str, Any]) -> None:
        super()._check_call(host, settings, call)
        if self._harness is not None:
            check_session_loss(settings)
            check_harness(host, settings, call)
        if (
            host.settings.dynamic_sampling
            and (owner := owner_of(type(self), "_calculate_rewards")) is not None
        ):
            raise ConfigurationError(
                f"`dynamic_sampling` looks at the rewards of the functions, and `{owner.__name__}` has a "
                "`_calculate_rewards` of its own, so groups would be dropped for rewards that are not "
                "trained.",
                setting="dynamic_sampling",
                got=owner.__name__,
                cure="Shape the rewards in a reward function, or leave `dynamic_sampling` out.",
            )

    def close(self) -> None:
        if self._recorder is not None:  # after an error, threads of groups may be in tools
            self.vllm_generation.rounds.groups.forget()
        if self._harness is not None and self.host is not None:
            self._harness.sessions.close()
        super().close()
        if self._scorer is not None:
            self._scorer.close()

    def train(self, *args: Any, **kwargs: Any) -> Any:
        if self._loss_scores is not None:
            self._loss_scores.begin()
        return super().train(*args, **kwargs)

    def get_batch_samples(
        self, epoch_iterator: Iterator, num_batches: int, device: torch.device
    ) -> tuple[list, torch.Tensor | int | None]:
        if self.max_staleness:
            if self._upcoming is None or self._upcoming.source is not epoch_iterator:
                self._upcoming = UpcomingBatches(
                    epoch_iterator, self.max_staleness * self.steps_per_round
                )
            epoch_iterator = self._upcoming.open_window()
        return super().get_batch_samples(epoch_iterator, num_batches, device)

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        inputs = super()._prepare_inputs(generation_batch)
        # balanced micro-batches are made of slices that this library reads whole, so only they themselves are watched
        is_read_by_the_loss = self._balance is None or self._balance.inside
        if self._ratio_check is None or not self.model.training or not is_read_by_the_loss:
            return inputs
        return self._ratio_check.watched(inputs)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self._loss_scores is not None:
            self._loss_scores.decide()
        loss = super().training_step(*args, **kwargs)
        if self._loss_scores is not None:
            self._loss_scores.give_metrics(self._metrics["train"])
        if self._ratio_check is not None and self.accelerator.sync_gradients:
            self._ratio_check.check()
        return loss

    def _generate_and_score_completions(self, inputs: Batch) -> dict[str, Any]:
        self.session_inputs = inputs
        if self.host is None:
            return super()._generate_and_score_completions(inputs)
        self._check_groups(inputs)
        score = super()._generate_and_score_completions

        def make() -> dict[str, Any]:
            rows = self._rows_to_train(inputs)
            with self._replaying(len(rows)), self._loss_scores.in_place_of_pass():  # type: ignore[union-attr]
                return score(with_lists_of_images(rows))

        # a `rollout_func` may generate fewer in its first call
        self.vllm_generation.seeds.num_rows = len(inputs)
        output = self._one_round(make)
        if self.session_parts is not None:
            output[PART] = parts_of(self.session_parts, output["completion_ids"])
            self.session_parts = None
        self._loss_scores.add_round(output)  # type: ignore[union-attr]
        if self.model.training:
            self._meter.add_weights(output)
            if self.host.settings.in_flight:
                self._meter.add_taken(self.vllm_generation.rounds)
        return output

    @contextmanager
    def _replaying(self, num_rows: int) -> Iterator[None]:
        """Let TRL use the recorded rollouts of this round, if there are any, and free their environments."""
        if not (self.model.training and self._recorder is not None):
            with self._tool_calls.naming(self, num_rows):  # type: ignore[union-attr]
                yield
            return
        taken = [group.recorded for group in self.vllm_generation.rounds.taken]
        scored = self._scorer.replaying(taken) if self._scorer is not None else nullcontext()
        with Replay(self, taken).open(), scored:
            yield
        for recorded in taken:
            self._recorder.give_back(recorded)

    def _make_group(self, group: Group, ask: Ask) -> Recorded:
        """Make a complete group, in its thread; with `dynamic_sampling` from another prompt if it teaches nothing."""
        if self.accelerator.device.type == "cuda":  # a new thread's is GPU 0
            torch.cuda.set_device(self.accelerator.device)
        if self._again is None:
            return self._record_group(group, ask)
        give_back = self._recorder.give_back  # type: ignore[union-attr]
        return self._again.sample(group, partial(self._record_group, ask=ask), give_back)

    def _record_group(self, group: Group, ask: Ask) -> Recorded:
        recorded = self._recorder.record(group, ask)  # type: ignore[union-attr]
        if self._scorer is not None:
            recorded.scores = self._scorer.score(recorded)
            if self._harness is not None and recorded.output is not None:
                recorded.scores.leave_out(left_out(recorded.output[COUNTS]))
        return recorded

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        rewards = super()._calculate_rewards(*args, **kwargs)
        if self._harness is not None and self.host is not None:
            left_out = torch.tensor(self._left_out, device=rewards.device)
            rewards[self.accelerator.gather(left_out)] = torch.nan
        if self._again is not None and self.model.training:
            self._again.check_round(rewards)
        return rewards

    def _generate(self, prompts: list) -> tuple:
        # a group's thread, which has no host, makes no collective
        checks = self._is_vlm and self.host is not None
        rows: list[dict] = [{"prompt": prompt} for prompt in prompts]
        if checks and not self.tools:
            check_images(self.accelerator, rows)
        found = super()._generate(prompts)
        if checks and self.tools:
            check_images(self.accelerator, rows + [{"images": images} for images in found[-1]])
        return found if self._harness is None else self._with_sessions(prompts, found)

    def _with_sessions(self, prompts: list, found: tuple) -> tuple:
        """Take out of TRL's result what only a harness adds to it, and put its texts in."""
        *before, completions, logprobs, fields, images, tool_images = found
        self.session_parts = fields.pop(PART)
        texts, counts = fields.pop(TEXTS, None), fields.pop(COUNTS)
        self._left_out = left_out(counts)
        for name in LOGGED:
            # TRL logs their mean over all rows of all ranks
            self._pending_metrics[f"harness/{name}"] += [float(one[name]) for one in counts]
        if texts is not None:
            texts = [text or "" for text in texts]
            talks = is_conversational({"prompt": prompts[0]})
            completions = (
                [[{"role": "assistant", "content": text}] for text in texts] if talks else texts
            )
        return (*before, completions, logprobs, fields, images, tool_images)

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> tuple:
        self._raise_tool_failure()
        return super()._generate_single_turn(*args, **kwargs)

    def _tool_call_loop(self, *args: Any, **kwargs: Any) -> tuple:
        if self._tool_calls is None:
            return super()._tool_call_loop(*args, **kwargs)
        self._tool_calls.watch(self, self._first_row, self._tool_failures)
        with unwrapped():
            found = super()._tool_call_loop(*args, **kwargs)
        self._raise_tool_failure()
        return found

    def _raise_tool_failure(self) -> None:
        """Raise the error of an async tool, which TRL took for an answer."""
        if self._tool_calls is not None and self._tool_failures:
            failure = self._tool_failures[0]
            self._tool_failures.clear()  # a notebook may train again
            raise failure

    def _rows_to_train(self, inputs: Batch) -> Batch:
        """Return the rows that this round trains: those of the batch or, with rounds in flight, of complete groups."""
        if self.vllm_generation.rounds is None or not self.model.training:
            return inputs
        settings = self.host.settings  # type: ignore[union-attr]
        size = self._group_size(len(inputs), settings)
        taken = self.vllm_generation.take_groups(
            len(inputs), size, partial(self._batch_ahead, inputs)
        )
        keeps_the_batch = self._recorder is None and not settings.in_flight
        return inputs if taken is None or keeps_the_batch else taken

    def _group_size(self, num_rows: int, settings: NodeSettings) -> int:
        """Return how many of a rank's rows are generated together, and taken together."""
        whole = not (settings.in_flight or settings.scores_groups)
        if whole and (
            self._recorder is None
            or self.rollout_func is not None
            or num_rows % self.num_generations
        ):
            return num_rows  # one wait for all, as TRL calls a `rollout_func`, or groups that straddle ranks
        return self.num_generations

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        if self._loss_scores is None or ORIGIN not in inputs:
            return super()._compute_loss(model, inputs)
        with self._loss_scores.of(inputs) as batch:
            loss = super()._compute_loss(model, batch)
        if self.accelerator.sync_gradients:
            self._loss_scores.judge()
        return loss

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> tuple:
        found = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if self._loss_scores is not None and torch.is_grad_enabled():
            self._loss_scores.add(found[0].detach())
        return found

    def _check_completions(self, output: dict[str, Any]) -> tuple[int, int]:
        in_losses = self._loss_scores.is_for(output)  # type: ignore[union-attr]
        counts = self._monitor.check(output, in_losses)
        return (0, 0) if in_losses else counts  # the losses count

    def _tokenize_prompts(self, prompts: list) -> tuple[Prompts, list[list] | None, dict[str, Any]]:
        """Replace `None`, which TRL 1.16 returns for a prompt without images, with an empty list: processors reject
        `None` when the batch is scored."""
        prompt_ids, images, fields = super()._tokenize_prompts(prompts)
        if self.host is not None and images is not None:
            images = [row or [] for row in images]
        return prompt_ids, images, fields

    def _batch_ahead(self, inputs: Batch, rounds: int) -> tuple[Batch, Prompts] | None:
        """Return the batch that is `rounds` generation rounds ahead of `inputs`, and its prompts as token ids."""
        # not from `after`: a resumed run may generate in the middle of a block, whose first batches were never fetched
        batch = inputs if rounds == 0 else self._after(inputs, rounds)
        if batch is None:
            return None
        if self._recorder is not None:
            # its group's thread tokenizes it, after the `reset` of its environment
            return batch, [[] for _ in batch]
        # of a stream without columns: TRL builds these prompts while it scores
        if any(map(has_images, batch)):
            return None
        prompt_ids, *_ = self._tokenize_prompts([copy.deepcopy(row["prompt"]) for row in batch])
        return batch, prompt_ids

    def _after(self, inputs: Batch, rounds: int) -> Batch | None:
        if self._upcoming is None:
            return None
        ahead = rounds * self.steps_per_round - self._step % self.steps_per_round
        left = (
            self.state.max_steps - self.state.global_step
        ) * self.args.gradient_accumulation_steps
        batch = self._upcoming.after(inputs, ahead)
        return None if ahead >= left - self._upcoming.place_in_window(inputs) else batch


def with_harness(given: Any, call: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of TRL's trainer for one with a harness.

    Raises:
        `ConfigurationError`: if another kind of loop is given too.
    """
    if others := [
        name for name in ("tools", "rollout_func", "environment_factory") if call.get(name)
    ]:
        raise ConfigurationError(
            f"A `harness` owns its loop, so it cannot be used with {', '.join(others)}.",
            setting="harness",
            got=others,
            cure="Give the harness its own tools, or leave it out.",
        )
    if call.get("args") is not None and not is_node_mode(call["args"]):
        raise ConfigurationError(
            f"A `harness` calls the engines of node mode, got vllm_mode={call['args'].vllm_mode!r}.",
            setting="harness",
            got=call["args"].vllm_mode,
            cure="Set `use_vllm=True, vllm_mode='node'`.",
        )
    scores = call.get("reward_funcs") or harness_reward
    rollout = HarnessRollout(Harness.of(given), returns_text=scores is not harness_reward)
    return call | {"reward_funcs": scores, "rollout_func": rollout}


def runs_ahead(trainer: MultiNodeGRPOTrainer, settings: NodeSettings) -> bool:
    """Return whether whole rollouts are made ahead of their round, by threads, and not by TRL in the main call."""
    if settings.scores_groups:
        return True
    if not settings.max_staleness:
        return False
    is_agent = trainer.tools or trainer.rollout_func or trainer.environment_factories
    # TRL builds prompts with images only while it scores them, so a group's thread does so ahead
    return bool(is_agent) or may_have_images(trainer.train_dataset, trainer._is_vlm)


# Methods of TRL's trainer between whose calls the losses take the place of the scoring pass
OF_SCORES = (
    *LOSSES,
    "_generate_and_score_completions",
    "_get_per_token_logps_and_entropies",
)


def reason_to_score(trainer: MultiNodeGRPOTrainer) -> str | None:
    """Return why TRL's scoring pass is needed, the same on every rank. A collective of all training ranks."""
    args = trainer.args
    every = args.steps_per_generation * trainer.num_iterations
    if args.gradient_accumulation_steps % every:
        return (
            f"`gradient_accumulation_steps` {args.gradient_accumulation_steps} is no multiple of steps_per_generation "
            f"x num_iterations = {every}, so rows are trained after a step that follows their round"
        )
    if (owner := owner_of(type(trainer), *OF_SCORES)) is not None:
        return f"`{owner.__name__}` replaces one of {', '.join(OF_SCORES)}"
    if moves_the_generator(trainer):
        return "the model draws random numbers in training, as dropout does, so two passes differ"
    return None
