"""What do agents cost a training node? Its steps while they pull every update, and while none of them does.

    python benchmarks/pulls.py [--agents 2] [--blocks 5] [--steps 4]

One rank trains a transformer on core 0, and writes its weights into the slots after each step. The agents and the
threads of the port that send to them have core 1, because a node with GPUs has cores beside those of its ranks.
A step sends the model once to each agent. Blocks of steps take turns; before the next block the pulls have ended:

    alone     no agent pulls
    pulled    each agent pulls every update
    again     alone, once more: the control
"""

import argparse
import os
import sys
import tempfile
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from ported import FACTS, SECRET, running
from served import Keeper, serving

from trl_multinode.engine.group import EngineGroup
from trl_multinode.weights.gathering import ShardGather
from trl_multinode.weights.pulling import PulledUpdates
from trl_multinode.weights.serving import WeightService
from trl_multinode.weights.source import ModuleSource
from trl_multinode.weights.sync import WeightSync
from trl_multinode.weights.transport import Transport
from trl_multinode.wire.handshake import PortAddress
from trl_multinode.wire.messages import WeightVersion
from trl_multinode.wire.port import Port

ARMS = ("alone", "pulled", "again")
BUCKET_BYTES = 32 << 20
LIMIT_S = 60.0


def agent(parent: Connection) -> None:
    """Pull an update for each number that the parent sends, and answer with the bytes of the pull."""
    os.sched_setaffinity(0, {1})
    address = parent.recv()
    with tempfile.TemporaryDirectory() as name, serving(Keeper(), folder=Path(name)) as engines:
        transport = Transport(folder=Path(name))
        updates = PulledUpdates(engines, transport, [address], (SECRET, FACTS), print)
        parent.send(0)
        while parent.recv():
            while updates.pull(LIMIT_S) is None:
                pass
            parent.send(updates.timings.num_bytes)
        updates.close()


def measure(num_agents: int, num_blocks: int, num_steps: int) -> tuple[dict, int]:
    """Return the seconds of each step by arm, and the bytes of an update."""
    context = get_context("spawn")
    pipes = [context.Pipe() for _ in range(num_agents)]
    agents = [context.Process(target=agent, args=(child,), daemon=True) for _, child in pipes]
    for each in agents:
        each.start()
    torch.set_num_threads(1)
    config = LlamaConfig(
        hidden_size=640, intermediate_size=1792, num_hidden_layers=8, num_attention_heads=10, vocab_size=4096
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    source = ModuleSource(model, torch.float32, ShardGather(torch.device("cpu"), [1]))
    sync = WeightSync(source, EngineGroup(), BUCKET_BYTES, Transport(staged=True))
    # threads have the cores of the one that makes them
    os.sched_setaffinity(0, {1})
    port = Port("127.0.0.1", 0, SECRET, FACTS, WeightService(lambda: sync).services, print)
    seconds: dict[str, list[float]] = {arm: [] for arm in ARMS}
    with running(port.serve()):
        for parent, _ in pipes:
            parent.send(PortAddress(0, "127.0.0.1", port.address.port))
            parent.recv()
        os.sched_setaffinity(0, {0})
        update = num_bytes = 0
        waited_s = 0.0
        for block in range(1 + num_blocks):
            for arm in ARMS:
                for _ in range(num_steps):
                    pulling = pipes if arm == "pulled" and update else []
                    for parent, _ in pulling:
                        parent.send(True)
                    start = time.perf_counter()
                    ids = torch.randint(config.vocab_size, (1, 192))
                    model(input_ids=ids, labels=ids).loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    trained = time.perf_counter()
                    # no step of these is shorter than its pulls, or the update would overtake them
                    num_bytes = max([num_bytes, *(parent.recv() for parent, _ in pulling)])
                    waited_s = max(waited_s, time.perf_counter() - trained)
                    start += time.perf_counter() - trained
                    update += 1
                    sync.run(WeightVersion(update, update))
                    # the first block warms up
                    if block:
                        seconds[arm].append(time.perf_counter() - start)
        for parent, _ in pipes:
            parent.send(False)
    for each in agents:
        each.join(LIMIT_S)
    sync.close()
    print(f"the longest pull ended {waited_s:.3f} s after its step, which does not count")
    return seconds, num_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--agents", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()
    seconds, num_bytes = measure(args.agents, args.blocks, args.steps)
    alone = median(seconds["alone"])
    print(f"{args.agents} agents, {num_bytes / 1e6:.0f} MB each and step")
    for arm, found in seconds.items():
        print(f"{arm:8} {median(found):.3f} s a step, {median(found) / alone:.3f} x")


if __name__ == "__main__":
    main()
