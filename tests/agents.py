"""Agents in one process: trainers with tools on an engine that lives in this process and speaks by a script.

An assistant's turn depends on the conversation and the seed of its row alone, so conversations end after different
numbers of turns, and are the same whenever a row is made. Log-probs are the model's own, so the library's alarms work.
"""

import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
import trl
from datasets import Dataset
from replays import Gradients
from tokenizers import AddedToken

import trl_multinode
from multinode_kit.models import tiny_qwen2, tiny_tokenizer
from trl_multinode.engine.client import EngineClient, Rollout
from trl_multinode.engine.stream import Peeking, Request
from trl_multinode.host.updates import Updates
from trl_multinode.weights.timings import SyncTimings
from trl_multinode.wire.messages import WeightVersion

GROUP, CONTEXT, VOCABULARY = 4, 2048, 300
END = "<|im_end|>"
SYSTEM = (  # parts of the template's text, a token each: rows of bytes would be four times as long
    "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
    "\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with "
    "function signatures within <tools></tools> XML tags:\n<tools>",
    "</tools>\n\nFor each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>',
    '{"type": "function", "function": {"name": "',
    '", "description": "',
    '", "parameters": {"type": "object", "properties": {"',
    '": {"type": "integer", "description": "',
    '"}}, "required": ["',
    '"]}, "return": {"type": "',
    '"}}}',
    "string",
    "number",
    "The ",
    "<tool_response>",
    "</tool_response>",
    '<tool_call>\n{"name": "',
    '", "arguments": {',
    "}}\n</tool_call>",
)


def agent_tokenizer():
    """Qwen2.5's chat template over bytes."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([AddedToken(text, special=True) for text in ("<|im_start|>", END)])
    tokenizer.add_tokens([AddedToken(text) for text in SYSTEM])
    tokenizer.eos_token = END
    tokenizer.chat_template = (
        resources.files("trl").joinpath("chat_templates/qwen2_5.jinja").read_text()
    )
    return tokenizer


def agent_model(seed: int = 0):
    model = tiny_qwen2(VOCABULARY, tied=False, seed=seed)
    model.config.eos_token_id = model.generation_config.eos_token_id = (
        agent_tokenizer().convert_tokens_to_ids(END)
    )
    return model


def call_of(name: str, **arguments: object) -> str:
    """One call of a tool, as the model writes it."""
    shown = ", ".join(f'"{key}": {value}' for key, value in arguments.items())
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{{shown}}}}}\n</tool_call>'


# ---- the engine -----------------------------------------------------------------------------------------------------


class Speaker:
    """What an assistant says: a call of one of the tools that its prompt offers, or of two, or an answer that ends.

    Args:
        calls (`dict[str, list[str]]`):
            Name of a tool -> calls of it. Tools that are in no prompt are called by nobody.
        share (`float`, *optional*, defaults to 0.6):
            Share of the turns that call a tool.
    """

    def __init__(self, calls: dict[str, list[str]], share: float = 0.6):
        self._calls, self._share = calls, share

    def __call__(self, conversation: str, seed: int) -> str:
        random = np.random.default_rng([seed, len(conversation)])
        offered = [name for name in self._calls if re.search(rf'"name": ?"{name}"', conversation)]
        if not offered or random.random() > self._share:
            return f"ok {random.integers(1000)}"[: 2 + int(random.integers(5))]
        names = random.choice(offered, size=1 + int(random.random() < 0.25))
        return "".join(str(random.choice(self._calls[name])) for name in names)


class ScriptedEngine:
    """The engines of a node, and a rank's connections to them. `speak(conversation, seed)` is an assistant's turn."""

    max_model_len = CONTEXT
    name = "engine 0 of node 0"
    check_version = EngineClient.check_version
    loss_accepted = EngineClient.loss_accepted
    ready = SimpleNamespace(truncated_logprobs="")
    lost, tolerant = None, False

    def __init__(self, model, speak: Callable[[str, int], str], turn_s: float = 0.0):
        self._trainer = model
        self._model = deepcopy(model).eval()
        self._speak = speak
        self._tokenizer = agent_tokenizer()
        self.turn_s = turn_s  # of every turn made ahead
        self.version = WeightVersion()
        self.stream: ScriptedStream | None = None

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator["ScriptedEngine"]:
        yield self

    def __getitem__(self, index: int) -> "ScriptedEngine":
        return self

    @property
    def rows_left(self) -> int:
        return self.stream.rows_left if self.stream else 0

    def expect(self, version: WeightVersion) -> None:
        """All versions are accepted."""

    def update(self, version: WeightVersion) -> None:
        self._model.load_state_dict(self._trainer.state_dict())
        self.version = version

    def generate(self, requests, max_tokens: int, sampling: dict, min_update: int):
        return [self.completions(request, max_tokens) for request in requests]

    def completions(self, request: Request, max_tokens: int) -> list[Rollout]:
        """Return all completions of a request."""
        return [
            self.complete(request, request.seed + row, max_tokens)
            for row in range(request.num_completions)
        ]

    def complete(self, request: Request, seed: int, max_tokens: int) -> Rollout:
        """Return one completion of a request."""
        return self.row(request.prompt, seed, max_tokens)

    @torch.no_grad()
    def row(self, prompt, seed: int, max_tokens: int) -> Rollout:
        text = self._speak(self._tokenizer.decode(prompt), seed) + END
        tokens = self._tokenizer.encode(text, add_special_tokens=False)[:max_tokens]
        ids = torch.tensor([[*prompt, *tokens]])
        scores = self._model(ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        logprobs = scores.gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()
        return Rollout(np.array(tokens, dtype=np.int32), logprobs, self.version, 0)

    def close(self) -> None:
        """There is no connection."""

    def post_score(self, tokens, temperature, images=(), min_update=0) -> Rollout:
        return self.row_of(list(tokens))

    @torch.no_grad()
    def row_of(self, tokens: list[int]) -> Rollout:
        ids = torch.tensor([tokens])
        scores = self._model(ids).logits[0, :-1].float().log_softmax(-1)
        return Rollout(
            ids[0, 1:].numpy(), scores.gather(1, ids[0, 1:, None])[:, 0].numpy(), self.version, 0
        )

    def scored(self, request_id: Rollout) -> Rollout:
        return request_id

    def open_stream(self, max_tokens: int, sampling: dict) -> "ScriptedStream":
        self.stream = ScriptedStream(self, max_tokens)
        return self.stream


class ScriptedStream:
    """Rows under way, as [`~trl_multinode.engine.stream.RequestStream`] has them; `turns` keeps all that ended."""

    stopped = False

    def __init__(self, engine: ScriptedEngine, max_tokens: int):
        self._engine, self._max_tokens = engine, max_tokens
        self._waiting: deque[tuple[float, Request]] = deque()
        self._changed = threading.Condition()
        self.num_added = self.num_ended = 0
        self.turns: list[tuple[Request, Rollout]] = []

    @property
    def rows_left(self) -> int:
        return self.num_added - self.num_ended

    rows_under_way = rows_left

    def add(self, requests) -> None:
        with self._changed:
            self.num_added += sum(request.num_completions for request in requests)
            self._waiting.extend(
                (time.monotonic() + self._engine.turn_s, request) for request in requests
            )
            self._changed.notify_all()

    def poll(self, timeout_s: float = 0.05):
        with self._changed:
            self._changed.wait_for(lambda: self._waiting, timeout_s)
            ready = [request for at, request in self._waiting if at <= time.monotonic()]
            self._waiting = deque(one for one in self._waiting if one[1] not in ready)
        if not ready:
            time.sleep(0.005)
        found = [
            (request, self._engine.completions(request, self._max_tokens)) for request in ready
        ]
        self.turns += [(request, row) for request, rows in found for row in rows]
        self.num_ended += sum(len(rows) for _, rows in found)
        return found

    def peek(self) -> Peeking:
        peeking = Peeking()
        peeking.complete.set()
        return peeking


# ---- trainers -------------------------------------------------------------------------------------------------------


@contextmanager
def engines_here(
    speak: Callable[[str, int], str],
    turn_s: float = 0.0,
    kind: type[ScriptedEngine] = ScriptedEngine,
) -> Iterator[None]:
    """Let trainers that are built inside have a [`ScriptedEngine`] of this process."""

    def start(updates, model, processing_class, keywords):
        updates.model, updates.dtype = model, torch.float32
        updates.engines = updates.ahead_engines = kind(model, speak, turn_s)
        return updates.engines

    def sync(updates, version) -> SyncTimings:
        updates.engines.update(version)
        return SyncTimings()

    with (
        mock.patch.object(Updates, "start", start),
        mock.patch.object(Updates, "launch"),  # beside the load of a model
        mock.patch.object(Updates, "sync", sync),
        mock.patch.object(Updates, "end"),
    ):
        yield


SETTINGS = {
    "use_cpu": True, "bf16": False, "num_generations": GROUP, "max_completion_length": 400, "logging_steps": 1,
    "report_to": [], "save_strategy": "no", "gradient_checkpointing": False, "disable_tqdm": True, "optim": "sgd",
    "max_grad_norm": 0.0, "learning_rate": 0.05, "max_steps": 3, "per_device_train_batch_size": 2 * GROUP,
    "lr_scheduler_type": "constant", "max_tool_calling_iterations": 4,
    "vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 2.0,
}  # fmt: skip


def chats(rows: int = 12, **columns: list) -> Dataset:
    prompts = [[{"role": "user", "content": f"{i} + {i + 1}?"}] for i in range(rows)]
    return Dataset.from_dict({"prompt": prompts} | columns)


class Seen:
    """A reward function that keeps what it got. Reward: letters of the completion, so no group is flat."""

    __name__ = "seen"

    def __init__(self, *columns: str):
        self.rounds: list[dict] = []
        self._columns = columns

    def __call__(self, prompts, completions, completion_ids, environments=None, **columns):
        extra = {name: list(columns[name]) for name in self._columns}
        self.rounds.append(
            {
                "prompts": deepcopy(prompts),
                "completions": deepcopy(completions),
                "ids": deepcopy(completion_ids),
            }
            | extra
        )
        return [float(sum(ids) % 11) for ids in completion_ids]


def build(
    kind: type,
    folder: Path,
    reward,
    dataset: Dataset | None = None,
    keywords: dict | None = None,
    **settings,
):
    """A trainer on the tiny agent. `trainer.gradients` has the gradient of every step."""
    config = (
        trl_multinode.GRPOConfig if issubclass(kind, trl_multinode.GRPOTrainer) else trl.GRPOConfig
    )
    gradients = Gradients()
    trainer = kind(
        agent_model(), reward, config(output_dir=str(folder), **(SETTINGS | settings)),
        chats() if dataset is None else dataset, processing_class=agent_tokenizer(), callbacks=[gradients],
        **(keywords or {}),
    )  # fmt: skip
    trainer.gradients = gradients.steps
    return trainer


def ours(
    folder: Path, reward, dataset: Dataset | None = None, keywords: dict | None = None, **settings
):
    """Our trainer, inside of `engines_here`."""
    return build(
        trl_multinode.GRPOTrainer,
        folder,
        reward,
        dataset,
        keywords,
        **({"rollout_seed": 5} | settings),
    )


def keep_outputs(trainer) -> list[dict]:
    """What TRL made of each round of training, from now on: its masks, tokens, log-probs and advantages."""
    kept, score = [], trainer._generate_and_score_completions

    def scored(inputs):
        output = score(inputs)
        if trainer.model.training:
            kept.append(dict(output))
        return output

    trainer._generate_and_score_completions = scored
    return kept


def numbers(log: list[dict]) -> list[dict]:
    """What TRL logs and no clock made."""
    clocks = ("time", "runtime", "per_second", "flos", "vllm")
    return [
        {key: value for key, value in entry.items() if not any(word in key for word in clocks)}
        for entry in log
    ]
