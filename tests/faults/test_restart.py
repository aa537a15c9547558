"""An engine that dies is started again: the rows are those of a run in which no engine dies. Rows 1 to 4 and 8.

The node here has one rank, and real engine processes behind the code of the fleet, the host and the generation. The
launches with several ranks and nodes are in `tests/e2e/test_restarted.py`.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import HashStore
from waiting import HANG_S, until

from multinode_kit.engines import ENGINE_ARGS, below
from multinode_kit.faults import FAKE, HOOK, TREE
from multinode_kit.forking import from_template
from multinode_kit.models import tiny_qwen2, tiny_tokenizer
from trl_multinode.engine import fleet as fleet_module
from trl_multinode.engine.fleet import EngineFleet
from trl_multinode.engine.restarts import LostEngine, lost_engines
from trl_multinode.engine.settings import CPU_ENVIRONMENT, cores_per_worker, save_without_weights
from trl_multinode.engine.stream import Request
from trl_multinode.errors import EngineDiedError
from trl_multinode.host.engine_clocks import EngineClocks
from trl_multinode.host.updates import Updates
from trl_multinode.node_settings import NodeSettings
from trl_multinode.rollouts.generation import NodeGeneration
from trl_multinode.run.meeting import Meeting
from trl_multinode.run.phase_file import PhaseFile
from trl_multinode.run.phases import Phases
from trl_multinode.run.topology import EngineDevices, Topology, shape_of
from trl_multinode.run.watch import watch_thread
from trl_multinode.run.watch.watchdog import Watchdog
from trl_multinode.weights.probe import probe_tokens
from trl_multinode.weights.source import ModuleSource
from trl_multinode.weights.sync import WeightSync
from trl_multinode.weights.transport import Transport
from trl_multinode.wire.supervisor import title_of

MOMENTS = ("load", "copy", "generation", "idle")
PROMPTS = [[5, 6, 7]] * 4 + [[8, 9]] * 4
ROUNDS = 3
STALL_S = 5.0  # of an engine that is stopped; the tested limit


class OneNode(Updates):
    """A node of one rank and its engines. `story` is a run of a few rounds on them."""

    wait_for_rows_s = 0.04  # in a generation, before an engine is killed

    divergence_limit = 0.02

    def __init__(
        self,
        folder: Path,
        num_engines: int = 1,
        staleness: int = 0,
        max_completion_length: int = 12,
        staged: bool = False,
        **settings,
    ):
        settings = {
            "rollout_seed": 5,
            "engine_stall_timeout": HANG_S,
            "max_staleness": staleness,
        } | settings
        self.settings = NodeSettings(**settings)
        self.topology, self.phases = Topology(0, 1, 0, 1, 0, 1, False), Phases()
        self.watch = Watchdog(self.topology)
        self.lines: list[str] = []
        self.ends: list[str] = []
        self._rank = self.updates = self
        self.fills_slots, self.has_agents = True, False
        self._agreement = SimpleNamespace(meeting=Meeting(self.topology, HashStore()))
        self.remote = SimpleNamespace(news=list)
        self._presence = SimpleNamespace(activity=SimpleNamespace(synced=False))
        self._fleet = EngineFleet(
            self.topology,
            self.watch,
            HashStore(),
            self.settings,
            folder,
            self.lines.append,
            PhaseFile(folder / "phases", rank=0, node=0),
        )
        self.model = tiny_qwen2()
        environment = CPU_ENVIRONMENT | cores_per_worker(
            self.settings.vllm_tensor_parallel_size or 1
        )
        arguments = {"arguments": self._arguments, "environment": lambda index: environment}
        devices = EngineDevices(((),) * num_engines, shared_with_training=False)
        self.topology.assume(shape_of(self.topology, devices))
        settings = SimpleNamespace(devices=devices, **arguments)
        write_model = partial(save_without_weights, self.model, tiny_tokenizer())
        self._fleet.start(settings, write_model)
        self.engines = self._fleet.connect(64)
        self.ahead_engines = self._fleet.connect(64) if staleness else None
        self._sync = WeightSync(
            ModuleSource(self.model, torch.float32),
            self.engines,
            40_000,
            Transport(staged=staged),
        )
        self.clocks, self._renewed = EngineClocks(), []
        self.done = 0
        self.step = lambda: self.done
        accelerator = SimpleNamespace(process_index=0, wait_for_everyone=lambda: None)
        self.generation = NodeGeneration(
            host=self,
            model=self.model,
            accelerator=accelerator,
            processing_class=None,
            max_completion_length=max_completion_length,
        )

    def _arguments(self, folder: Path, index: int) -> dict:
        workers = self.settings.vllm_tensor_parallel_size or 1
        return ENGINE_ARGS | {"model": str(folder), "seed": index, "tensor_parallel_size": workers}

    def report(self, text: str) -> None:
        self.lines.append(text)

    def start_engines(self, *_):
        return self.engines

    def story(
        self, act: Callable[[str, int], None] = lambda moment, number: None, first: int = 0
    ) -> list:
        """Train some rounds. `act` is called with a moment and the number of the round, beginning with `first`."""
        found = []
        for number in range(first, first + ROUNDS):
            self.perturb(number - first)
            act("idle", number)
            self.generation.begin_round("train", number - first)
            if self.generation.rounds is not None:
                left = ROUNDS - 1 - number
                self.generation.take_groups(
                    len(PROMPTS),
                    len(PROMPTS),
                    lambda ahead, left=left: (
                        ([{} for _ in PROMPTS], PROMPTS) if ahead <= left else None
                    ),
                )
            act("sync", number)
            self.generation.sync_weights()
            act("generate", number)
            with self.generation.recovering():
                ids = self.generation.generate(PROMPTS, None, 4)[1]
                made = self.generation.rows
                # as a tool loop does
                ids += self.generation.generate([PROMPTS[0] + ids[0] + [3]], None, 1)[1]
                self.align()
            versions = [row.version.step for row in made]
            found.append((ids, versions, self.generation.version.step))
            self.done += 1
        return found

    def begin_again(self) -> None:
        """Give the model the weights of the beginning."""
        self.model.load_state_dict(tiny_qwen2().state_dict())

    @torch.no_grad()
    def perturb(self, seed: int) -> None:
        noise = torch.Generator().manual_seed(seed)
        for parameter in self.model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=noise) * 0.02)

    def kill(self, index: int = 0, how: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.engines[index].ready.pid, how)

    def kill_until_ready(self, num_restarts: int) -> None:
        """Kill the engine, and return when it was started again and has no weights."""
        self.kill()
        until(lambda: self.num_restarts == num_restarts and self._fleet.restarts.is_ready(0))

    def kill_in_generation(
        self, index: int = 0, how: signal.Signals = signal.SIGKILL, ahead: bool = False
    ) -> None:
        engines = self.ahead_engines if ahead else self.engines

        def later() -> None:
            while not engines.rows_left:
                time.sleep(0.002)
            time.sleep(self.wait_for_rows_s)
            self.kill(index, how)

        threading.Thread(target=later).start()

    def kill_in_vllm(self, title: str, with_rows: bool = False) -> None:
        """Kill the first of vLLM's processes with this word in its title, at once or as soon as it has rows."""
        process = next(
            child for child in below(self.engines[0].ready.pid) if title in title_of(child)
        )

        def later() -> None:
            until(lambda: self.engines.rows_left)
            process.kill()

        if with_rows:
            process.suspend()  # else the rows may end before the thread has seen them
            threading.Thread(target=later).start()
        else:
            process.kill()

    def kill_in_sync(self, index: int = 0) -> None:
        """Kill an engine while the third bucket of the next sync is gathered."""
        source, third = self._sync._source, self._sync.buckets[2]
        gathering = source.gathering

        def begun(bucket, holder):
            if bucket is third:
                source.gathering = gathering
                self.kill(index)
            return gathering(bucket, holder)

        source.gathering = begun

    def close(self) -> None:
        self.watch.forget_processes()
        self._fleet.close(self.engines)
        for engines in filter(None, (self.engines, self.ahead_engines)):
            engines.close()
        self._sync.close()
        self.watch.close()


@pytest.fixture
def node(tmp_path, monkeypatch):
    """Builds nodes; their engines are forks, so that a restart takes tenths of a second."""
    # of an engine that no client can ask to end
    monkeypatch.setattr(fleet_module, "STOP_TIMEOUT_S", 0.5)
    made = []
    # otherwise it ends this process
    monkeypatch.setattr(
        watch_thread, "leave", lambda watch, fatal: made[-1].ends.append(fatal.line)
    )

    def build(module: str | None = None, slow: float = 0.01, **settings) -> OneNode:
        monkeypatch.setenv(HOOK, module or f"{from_template(FAKE)} slow_tokens={slow}")
        made.append(OneNode(tmp_path, **settings))
        return made[-1]

    yield build
    for one in made:
        one.close()


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Rows of the run in which no engine dies."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(HOOK, from_template(FAKE))
        one = OneNode(tmp_path_factory.mktemp("expected"))
        try:
            return one.story()
        finally:
            one.close()


def at(moment: str, number: int, do: Callable[[], None]) -> Callable[[str, int], None]:
    return lambda found, count: do() if (found, count) == (moment, number) else None


def test_rows_1_2_8_an_engine_may_die_at_any_moment(node, expected):
    """After the sync, idle, and while weights are sent."""
    one = node(engine_restarts=3)
    kills = [at("generate", 0, one.kill), at("idle", 1, one.kill), at("sync", 2, one.kill_in_sync)]
    assert one.story(lambda *moment: [kill(*moment) for kill in kills]) == expected
    text = "\n".join(one.lines)
    assert (
        "engine 0 ended (its process" in text
        and "was killed by SIGKILL" in text
        and "2 restart(s) left" in text
    )
    assert "engine 0 was started again in" in text and one.num_restarts == 3 and not one.ends
    for update in (1, 3):
        assert f"got the weights of update {update} (step {update - 1}) again" in text


@pytest.mark.nightly
def test_row_1_the_clocks_of_an_engine_go_on_after_a_restart(node):
    one, clocks = node(), []

    def act(moment: str, number: int) -> None:
        if (moment, number) == ("idle", 1):
            one.kill()
        if moment == "generate":
            clocks.append(one.clocks.seconds)

    one.story(act)
    seconds = [engines[0, 1] for engines in clocks]
    assert len(seconds) == ROUNDS and seconds == sorted(seconds) and seconds[-1] > seconds[0]


def test_row_3_an_engine_may_die_twice_and_the_third_time_ends_the_run_with_the_count(
    node, expected
):
    one = node()
    acts = [at("generate", 0, one.kill_in_generation), at("idle", 2, one.kill)]
    assert one.story(lambda *moment: [act(*moment) for act in acts]) == expected
    assert one.num_restarts == 2 and not one.ends
    one.kill()
    until(lambda: one.ends)
    assert (
        "engine 0 of node 0 ended after 2 restart(s) (`engine_restarts=2`): its process"
        in one.ends[0]
    )
    assert "engine0.log" in one.ends[0]


@pytest.mark.nightly  # two deaths in a run decide above
@pytest.mark.parametrize("staged", [False, True])
def test_row_3_twice_in_a_row(node, expected, staged):
    """The second time as soon as the new process serves, before it has weights."""
    one = node(staged=staged)
    renew = one.engines.renew

    def renew_and_kill(indices):
        renew(indices)
        one.engines.renew = renew
        one.kill()

    one.engines.renew = renew_and_kill
    assert one.story(at("generate", 1, one.kill_in_generation)) == expected
    assert one.num_restarts == 2 and not one.ends


def test_row_4_a_stopped_engine_is_killed_and_started_again(node, expected):
    one = node(engine_stall_timeout=STALL_S)
    assert (
        one.story(at("generate", 1, lambda: one.kill_in_generation(how=signal.SIGSTOP))) == expected
    )
    assert "it stalled and was killed" in "\n".join(
        one.lines
    ) and f"for {STALL_S:.0f} s" in "\n".join(one.lines)


def test_row_3_ranks_that_lost_different_processes_of_an_engine_ask_for_the_same_restart():
    first, later = LostEngine(node=1, index=0, start=0), LostEngine(node=1, index=0, start=1)
    others = [LostEngine(0, 1, 5), LostEngine(1, 2, 0)]
    words = list(map(str, (later, first, *others)))
    assert lost_engines(words) == [others[0], later, others[1]]


@pytest.mark.parametrize("staged", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_row_2_the_other_engine_of_a_node_goes_on(node, expected, staged):
    one = node(num_engines=2, staged=staged)
    made = one.story(at("generate", 0, lambda: one.kill_in_generation(1)))
    assert made == expected and one.num_restarts == 1
    # without such slots it gets them with the next sync
    assert (
        any("engine 1 got the weights of update 1 (step 0) again" in line for line in one.lines)
        == staged
    )
    assert [client.lost for client in one.engines] == [None, None]


def test_row_2_rows_ahead_are_made_again_with_the_weights_of_that_moment(node):
    one = node(staleness=1, slow=0.1)
    made = one.story(at("idle", 2, one.kill))
    assert one.num_restarts == 1 and not one.ends
    # the rows of round 2 are not those of round 1's weights, as those of round 1 are those of round 0's
    assert [set(steps) for _, steps, _ in made] == [{0}, {0}, {2}]


def test_row_2_rows_in_flight_begin_again(node):
    """Some rows have ended before, some are under way, and some wait for room."""
    one = node(slow=0.02)
    one.generation.sync_weights()
    one.ahead_engines = ahead = one._fleet.connect(3)
    ahead.expect(one.generation.version)  # a host connects before the first sync
    stream = ahead.open_stream(12, {})
    alone = one.engines.generate([Request(PROMPTS[0], 8, seed=1)], 12, {}, 1)[0]
    stream.add(
        [Request(PROMPTS[0], seed=1 + row, min_update=1, group=(0, 0), row=row) for row in range(8)]
    )
    found = {}
    while len(found) < 3:
        found |= {request.row: rollout for request, (rollout,) in stream.poll()}
    peeking = stream.peek()
    one.kill()
    while not stream.stopped:
        found |= {request.row: rollout for request, (rollout,) in stream.poll(0.1)}
    assert peeking.complete.wait(0) and len(found) < 8 and stream.rows_left == 8 - len(found)
    one.generation._recover()
    while len(found) < 8:
        found |= {request.row: rollout for request, (rollout,) in stream.poll()}
    assert [found[row].tokens.tolist() for row in range(8)] == [
        row.tokens.tolist() for row in alone
    ]
    assert stream.rows_left == 0 and not stream.stopped
    stream.close()


def test_rows_in_flight_begin_again_although_nobody_has_seen_that_their_connection_ended(node):
    one = node(slow=0.02)
    one.generation.sync_weights()
    one.ahead_engines = ahead = one._fleet.connect(3)
    ahead.expect(one.generation.version)
    stream = ahead.open_stream(12, {})
    stream.add(
        [Request(PROMPTS[0], seed=1 + row, min_update=1, group=(0, 0), row=row) for row in range(8)]
    )
    found = {request.row for request, _ in stream.poll()}
    one.kill()
    (lost,) = ahead
    until(lambda: lost.has_ended)
    assert lost.lost is None  # the thread that polls did something else meanwhile
    with suppress(EngineDiedError):
        one.engines.generate([Request(PROMPTS[0], 1)], 12, {}, 1)
    one.generation._recover()
    while len(found) < 8:
        found |= {request.row for request, _ in stream.poll()}
    assert stream.rows_left == 0 and ahead[0] is not lost
    stream.close()


@pytest.mark.nightly
def test_row_2_a_generation_outside_of_a_round_ends_with_the_error(node):
    one = node()
    one.story()
    one.kill()
    with pytest.raises(EngineDiedError, match="engine 0 of node 0"):
        one.generation.generate(PROMPTS, None, 4)


def test_rows_1_2_8_with_a_slot_for_each_bucket_no_rank_gathers_weights_again(node, expected):
    """The engine that was started again gets the same weights as the others had, from the memory of its node."""
    one, gathered = node(staged=True, engine_restarts=4), []
    begin = one._sync._source.gathering
    one._sync._source.gathering = lambda *args: [gathered.append(args[0]), begin(*args)][1]
    kills = [
        at("idle", 0, lambda: one.kill_until_ready(1)),  # it gets the first sync
        at("idle", 1, lambda: one.kill_until_ready(2)),
        at("generate", 1, one.kill_in_generation),
        at("sync", 2, one.kill_in_sync),
    ]
    assert one.story(lambda *moment: [kill(*moment) for kill in kills]) == expected
    assert gathered == one._sync.buckets * ROUNDS and one.num_restarts == 4
    text = "\n".join(one.lines)
    assert text.count("from the slots") == 3
    for update in (1, 2, 3):
        assert f"got the weights of update {update} (step {update - 1}) again" in text


@pytest.mark.parametrize(
    ("module", "kills"),
    [(None, 4), pytest.param(TREE, 2, marks=[pytest.mark.engine, pytest.mark.nightly])],
)
def test_rows_1_2_8_log_probs_are_right_after_each_of_twenty_updates_with_random_kills(
    node, module, kills
):
    """With a slot for each bucket: killed idle, while buckets are copied, while it loads, or while it generates."""
    one = node(module, staged=True, engine_restarts=kills, engine_stall_timeout=120.0)
    random, updates = Random(34), 20
    moments = dict(zip(random.sample(range(updates), kills), MOMENTS, strict=False))
    tokens = probe_tokens(one.model.config.vocab_size)
    ids = torch.tensor([tokens])
    for number in range(updates):
        one.perturb(number)
        moment = moments.get(number)
        if moment == "idle":
            one.kill()
        elif moment == "copy":
            one.kill_in_sync()
        one.generation.begin_round("train", number)
        one.generation.sync_weights()
        if moment == "load":
            one.kill()
        elif moment == "generation":
            one.kill_in_generation()
        with one.generation.recovering():
            one.generation.generate(PROMPTS, None, 4)
            # an engine that was killed after its rows comes back in the next round
            until(lambda: one._fleet.restarts is None or one._fleet.restarts.is_ready(0))
            one.align()
        one.done += 1
        with torch.no_grad():
            scores = one.model(input_ids=ids).logits[0, :-1].log_softmax(-1)
        expected = scores.gather(1, ids[0, 1:, None])[:, 0]
        found = torch.from_numpy(one.engines[0].score(tokens).logprobs.copy())
        assert torch.allclose(found, expected, atol=1e-4), (number, moment)
    assert one.num_restarts == kills and not one.ends


@pytest.mark.parametrize("staged", [True, False])
def test_row_2_weights_of_an_earlier_step_are_there_with_a_slot_for_each_bucket_only(node, staged):
    """As with `vllm_sync_frequency`: the trainer has taken a step since the sync."""
    one = node(staged=staged)
    one.generation.sync_weights()
    (_, expected, *_), seeds = one.generation.generate(PROMPTS, None, 4), one.generation.seeds
    one.perturb(0)
    one.done += 1
    one.kill()
    seeds.begin_round("train", 0)
    with one.generation.recovering():
        if not staged:
            with pytest.raises(EngineDiedError, match="engine 0 of node 0"):
                one.generation.generate(PROMPTS, None, 4)
            return
        assert one.generation.generate(PROMPTS, None, 4)[1] == expected
        one.align()
    assert one.generation.version.step == 0
    one.generation.sync_weights()
    assert (
        one.generation.version.step == 1
        and one.generation.generate(PROMPTS, None, 4)[1] != expected
    )


@pytest.mark.engine
@pytest.mark.nightly  # of vLLM's processes, `e2e/test_endings.py` kills one in every gate
def test_rows_1_2_8_with_vllm(node):
    """A worker of a TP 2 engine is killed in generation, its core idle, and the engine while weights are sent."""
    one = node(
        TREE,
        engine_restarts=3,
        engine_stall_timeout=120.0,
        max_completion_length=100,
        vllm_tensor_parallel_size=2,
    )
    expected = one.story()
    one.begin_again()
    kills = [
        at("generate", 3, lambda: one.kill_in_vllm("Worker_TP1", with_rows=True)),
        at("idle", 4, lambda: one.kill_in_vllm("EngineCore")),
        at("sync", 5, one.kill_in_sync),
    ]
    made = one.story(lambda *moment: [kill(*moment) for kill in kills], first=3)
    assert [ids for ids, *_ in made] == [ids for ids, *_ in expected]
    text = "\n".join(one.lines)
    assert one.num_restarts == 3 and not one.ends
    assert "VLLM::Worker_TP1" in text and "VLLM::EngineCore" in text
