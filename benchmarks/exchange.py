"""How long do rows take from vLLM to the ranks? From the last token in the engine core to rows in a rank's hands.

    python benchmarks/exchange.py [--quick]

Seconds per million of the rank's own tokens, log-probs included; of the ranks of a node, which ask at once and whose
rows all end in the same step, the slowest. The engine core is played (`replayed_core.py`), all above it is real.

    ours     the engine process of this library; `NodeGeneration.generate` returns
    control  ours once more; its ratio to `ours` says how far two equal things are apart here
    serve    `vllm serve` on a unix socket; JSON is parsed into lists of ids and of log-probs. One node: no message of
             this pattern crosses nodes either
    trl      `VLLMGeneration(mode="server").generate` with its own client, on `vllm serve`

Nodes of `ours` share nothing, so each is measured with the machine to itself and the slowest counts. Eight at once on
few cores would measure the scheduler. The same courtesy for `trl`: of its world only ranks 0 and 1 are processes,
because the others would unpickle the same object on cores of their own; a broadcast to two is cheaper than to 56.
"""

import argparse
import http.client
import json
import os
import socket
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from statistics import median
from types import SimpleNamespace

os.environ |= {"CUDA_VISIBLE_DEVICES": "", "VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1"}
# ruff: noqa: E402 - the variables above are read when the libraries below are imported

import torch

torch.set_num_threads(1)  # before the forks: the parent's OpenMP threads would not exist in them

from replayed_core import VOCABULARY, Rank, Server, run_our_engine, run_real_engine, run_vllm_serve

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from multinode_kit.models import tiny_qwen2, tiny_tokenizer
from trl_multinode.engine.node_engines import NodeEngines, local_places
from trl_multinode.engine.settings import save_without_weights
from trl_multinode.node_settings import NodeSettings
from trl_multinode.rollouts.generation import NodeGeneration
from trl_multinode.wire.messages import WeightVersion

RESULTS = Path(__file__).parent / "results" / "exchange.json"
NODES = (1, 2, 4, 8)
RANKS = (2, 3, 4, 5, 6, 7)
RANKS_OF_TRL = (2, 7)
GROUP = 8  # completions of a prompt
ROWS, TOKENS = 32, 2048  # of a rank; tokens of a row
# other rows, on one node with most ranks: vLLM's last step costs the same for short ones
LENGTHS = (
    512,
    1024,
    4096,
)
# their cost is per token, and an eighth of them saves half an hour
ROWS_OF_OTHERS, TOKENS_OF_OTHERS = (
    8,
    1024,
)
REAL = {"ranks": 2, "rows": 32, "tokens": 512}  # tiny model, real core
REAL_VOCABULARY = 4096  # with 150,000 a CPU takes 0.3 s for a step
PAUSE_S = 0.35  # between rounds: the engine has freed the last one's objects, as it would have after a training step
REPLACED = {
    "vllm.v1.engine.core_client.EngineCoreClient.make_async_mp_client": "tokens are played, in all arms",
    "trl.generation.vllm_client.VLLMClient.init_communicator": "no weights are sent",
    "trl.generation.vllm_generation.gather_object": "adds the prompts of ranks without a process (not timed)",
}


def prompts_of(rank: int, rows: int) -> list[list[int]]:
    return [[5 + rank, 20 + row // GROUP] * 32 for row in range(rows)]


def our_rank(path: Path, rank: int) -> Callable[[], Callable]:
    """A rank of this library, without a trainer around it."""

    def make() -> Callable:
        deadline = time.monotonic() + 120
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        engines = NodeEngines(
            local_places([path], 0, path.parent), 0, rank, path.with_suffix(".load"), 300.0, ROWS
        )
        host = SimpleNamespace(
            settings=NodeSettings(),
            topology=f"rank {rank}",
            phases=lambda name: nullcontext(),
            start_engines=lambda *_: engines,
            updates=SimpleNamespace(),  # `NodeGeneration` leaves a hook there
            step=lambda: 0,
        )
        generation = NodeGeneration(
            host=host, model=None, accelerator=SimpleNamespace(process_index=rank), processing_class=None,
            generation_kwargs={"ignore_eos": True},
        )  # fmt: skip
        generation.version = WeightVersion(1, 0)

        def ask(rows: int, tokens: int) -> Callable:
            generation.max_completion_length = tokens
            return lambda: generation.generate(prompts_of(rank, rows), None, GROUP)[1:3]

        return ask

    return make


class UnixConnection(http.client.HTTPConnection):
    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self.host)


def serve_rank(path: Path, rank: int) -> Callable[[], Callable]:
    """A rank that asks `vllm serve` for token ids and log-probs."""

    def request(method: str, route: str, body: dict | None = None) -> http.client.HTTPResponse:
        connection = UnixConnection(str(path))
        connection.request(method, route, json.dumps(body), {"Content-Type": "application/json"})
        return connection.getresponse()

    def make() -> Callable:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            try:
                if request("GET", "/health").status == 200:
                    break
            except OSError:
                time.sleep(0.2)
        (model,) = json.loads(request("GET", "/v1/models").read())["data"]

        def ask(rows: int, tokens: int) -> Callable:
            body = {
                "model": model["id"], "prompt": prompts_of(rank, rows)[::GROUP], "n": GROUP, "max_tokens": tokens,
                "logprobs": 0, "ignore_eos": True, "return_token_ids": True, "return_tokens_as_token_ids": True,
            }  # fmt: skip

            def answer():
                choices = json.loads(request("POST", "/v1/completions", body).read())["choices"]
                ids = [choice["token_ids"] for choice in choices]
                return ids, [choice["logprobs"]["token_logprobs"] for choice in choices]

            return answer

        return ask

    return make


def trl_rank(address: str, store_port: int, rank: int) -> Callable[[], Callable]:
    """Rank 0 or 1 of a world that TRL serves from one server."""

    def make() -> Callable:
        os.environ |= {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store_port), "ACCELERATE_USE_CPU": "true",
        }  # fmt: skip
        from accelerate import Accelerator
        from trl.generation import vllm_client, vllm_generation

        vllm_client.VLLMClient.init_communicator = lambda *_, **__: None
        accelerator = Accelerator(cpu=True)
        assert accelerator.num_processes == 2, "TRL's two ranks are not one world"
        generation = vllm_generation.VLLMGeneration(
            None,
            accelerator,
            None,
            mode="server",
            server_base_url=address,
            generation_kwargs={"ignore_eos": True},
        )

        def ask(rows: int, tokens: int, world: int) -> Callable:
            vllm_generation.gather_object = lambda of_this_rank: of_this_rank * world
            generation.max_completion_length = tokens
            return lambda: generation.generate(prompts_of(0, rows), None, GROUP)[1:3]

        return ask

    return make


def exchange(server: Server, ranks: list[Rank], world: int, rows: int, tokens: int, *more) -> float:
    """One round: the seconds that the slowest of `ranks` waited per million of its own tokens."""
    time.sleep(PAUSE_S)
    server.round.num_rows.value, server.round.num_tokens.value = world * rows, tokens
    for rank in ranks:
        rank.send(rows, tokens, *more)
    seconds = max(rank.receive() for rank in ranks) - server.round.last_token.value
    return seconds / (rows * tokens) * 1e6


class Machine:
    """All processes of all arms, forked from this one."""

    def __init__(self, stack: ExitStack, folder: Path, num_nodes: int):
        for name, vocabulary in (("model", VOCABULARY), ("real_model", REAL_VOCABULARY)):
            model = tiny_qwen2(vocabulary)
            model.config.max_position_embeddings = 8192
            save_without_weights(model, tiny_tokenizer(), folder / name)
        self._stack, self._folder = stack, folder
        print(f"logs of the servers: {folder}", flush=True)
        self.nodes = [
            self._node(run_our_engine, our_rank, f"node{i}", max(RANKS)) for i in range(num_nodes)
        ]
        self.real = self._node(run_real_engine, our_rank, "real", REAL["ranks"], "real_model")
        self.serve = self._node(run_vllm_serve, serve_rank, "serve", max(RANKS))
        port, store = free_port(), free_port()
        server = self._started(Server(run_vllm_serve, folder / "model", port, folder / "trl.log"))
        address = f"http://127.0.0.1:{port}"
        self.trl = (
            server,
            [self._started(Rank(trl_rank(address, store, rank))) for rank in range(2)],
        )
        for _, ranks in (*self.nodes, self.real, self.serve, self.trl):
            for rank in ranks:
                rank.receive()

    def _started(self, process):
        self._stack.callback(process.stop)
        return process

    def _node(
        self, run: Callable, rank_of: Callable, name: str, num_ranks: int, model: str = "model"
    ):
        path = self._folder / name / "engine0.sock"
        path.parent.mkdir(mode=0o700)
        server = self._started(
            Server(run, self._folder / model, path, self._folder / f"{name}.log")
        )
        return server, [self._started(Rank(rank_of(path, rank))) for rank in range(num_ranks)]

    def ours(self, node: int, num_ranks: int, tokens: int = TOKENS) -> float:
        server, ranks = self.nodes[node]
        return exchange(server, ranks[:num_ranks], num_ranks, ROWS, tokens)

    def warm_up(self) -> None:
        """The first rounds of a process take twice as long: its memory is still growing."""
        for node in range(len(self.nodes)):
            for _ in range(3):
                self.ours(node, max(RANKS))
        for _ in range(2):
            self.served(max(RANKS))
            self.trls(max(RANKS))

    def served(self, num_ranks: int) -> float:
        server, ranks = self.serve
        return exchange(server, ranks[:num_ranks], num_ranks, ROWS_OF_OTHERS, TOKENS_OF_OTHERS)

    def trls(self, world: int) -> float:
        server, ranks = self.trl
        return exchange(server, ranks, world, ROWS_OF_OTHERS, TOKENS_OF_OTHERS, world)

    def real_core(self, real: bool) -> float:
        server, ranks = self.real if real else self.nodes[0]
        return exchange(server, ranks[: REAL["ranks"]], REAL["ranks"], REAL["rows"], REAL["tokens"])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def measure(
    machine: Machine, found: dict[tuple, list[float]], repeat: int, plan: argparse.Namespace
) -> None:
    """Every arm once in every cell, in an order that turns with the repeats."""
    arms = ("ours", "control") if repeat % 2 == 0 else ("control", "ours")
    for num_ranks in plan.ranks:
        times = {arm: [] for arm in arms}
        for node in range(max(plan.nodes)):
            for arm in arms:
                times[arm].append(machine.ours(node, num_ranks))
        for num_nodes in plan.nodes:
            for arm in arms:
                found[arm, num_nodes, num_ranks].append(max(times[arm][:num_nodes]))
        if repeat < plan.repeats_of_others:
            found["serve", num_ranks].append(machine.served(num_ranks))
            for num_nodes in plan.nodes if num_ranks in RANKS_OF_TRL else ():
                found["trl", num_nodes, num_ranks].append(machine.trls(num_nodes * num_ranks))
    for tokens in LENGTHS:
        found["length", tokens].append(machine.ours(0, max(RANKS), tokens))
    for arm in ("real", "played"):
        found[arm,].append(machine.real_core(arm == "real"))


def spread(values: list[float]) -> dict:
    return {
        "median": round(median(values), 4),
        "low": round(min(values), 4),
        "high": round(max(values), 4),
    }


def summarize(found: dict[tuple, list[float]], plan: argparse.Namespace) -> dict:
    cells = []
    for num_ranks in plan.ranks:
        for num_nodes in plan.nodes:
            ours, control = (
                found["ours", num_nodes, num_ranks],
                found["control", num_nodes, num_ranks],
            )
            cell = {
                "nodes": num_nodes, "ranks": num_ranks, "repeats": len(ours), "exchange_s_per_mtoken": spread(ours),
                "control_ratio": spread([a / b for a, b in zip(control, ours, strict=True)]),
            }  # fmt: skip
            if trl := found.get(("trl", num_nodes, num_ranks)):
                cell["trl_s_per_mtoken"] = spread(trl)
                cell["trl_s_per_mtoken_of_the_world"] = spread(
                    [t / (num_nodes * num_ranks) for t in trl]
                )
            if num_nodes == 1:
                cell["serve_s_per_mtoken"] = spread(found["serve", num_ranks])
            cells.append(cell)
    real, played = found["real",], found["played",]
    return {
        "rows_per_rank": ROWS, "tokens_per_row": TOKENS, "rows_per_rank_of_others": ROWS_OF_OTHERS,
        "tokens_per_row_of_others": TOKENS_OF_OTHERS,
        "replaced": REPLACED,
        "cores": len(os.sched_getaffinity(0)), "cells": cells,
        "exchange_s_per_mtoken_by_length": {tokens: spread(found["length", tokens]) for tokens in LENGTHS},
        "real_engine": REAL | {
            "repeats": len(real), "exchange_s_per_mtoken": spread(real), "played_core_s_per_mtoken": spread(played)
        },
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="few cells, two repeats: does it run, not how fast"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, default=RESULTS)
    plan = parser.parse_args()
    plan.nodes, plan.ranks = ((1, 2), (2, 7)) if plan.quick else (NODES, RANKS)
    plan.repeats = 2 if plan.quick else plan.repeats
    plan.repeats_of_others = 1 if plan.quick else 3
    found: dict[tuple, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        machine = Machine(stack, Path(folder), max(plan.nodes))
        machine.warm_up()
        for repeat in range(plan.repeats):
            measure(machine, found, repeat, plan)
            print(
                {key: round(values[-1], 3) for key, values in found.items() if key[1:2] != (4,)},
                flush=True,
            )
    plan.output.parent.mkdir(parents=True, exist_ok=True)
    plan.output.write_text(json.dumps(summarize(found, plan), indent=1) + "\n")


if __name__ == "__main__":
    main()
