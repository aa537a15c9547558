"""Modes of the demo: script, number of ranks, settings. Imports nothing heavy, because `run.py` must start fast."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from multinode_kit.faults import FAKE as FAKE_ENGINE
from multinode_kit.faults import HOOK, Faults

# the nodes have no engines of their own, and wait for the first one of an agent
POOL: dict = {"num_engines": 0, "min_engines": 1}
# 16 prompts a step instead of 32, because the fake engine generates one row after the other
FAKE_SETTINGS: dict = {
    "per_device_train_batch_size": 32,
    "learning_rate": 5e-3,
    "num_generations_eval": 4,
}
# seconds that the reward function waits in each round, as for a judge: vLLM starts beside the run, which on two cores
# takes four minutes if the ranks never wait
REWARD_WAITS_S: dict[str, float] = {"pool": 1.5, "pool-fake": 0.0}
# share of the steps after which the first agent leaves; the run goes no further without the second one
LEAVES_AFTER = 2 / 3
JOINED = "joined"  # file in the run's folder, once the second agent serves
MODES: dict[str, dict] = {  # added to the config of `train.py`
    "sync": {},
    "ahead-only": {"max_staleness": 1},
    "balance-only": {"micro_batch_tokens": 1024},
    "ahead": {"max_staleness": 1, "micro_batch_tokens": 1024},  # both
    # the completion goes on after the answer until it ends, after 1 to 64 tokens
    "in-flight": {"max_staleness": 3, "max_completion_length": 64},
    "fake": FAKE_SETTINGS,
    "pool": POOL,
    "pool-fake": FAKE_SETTINGS | POOL,
}


@dataclass(frozen=True)
class Demo:
    """Settings and expected results of a demo run. Minutes were measured on 2 cores."""

    script: str
    num_ranks: int  # on both nodes together
    steps: int
    minutes: int  # for `steps` steps
    timeout_s: float
    learned: float  # smallest gain of the mean reward that passes
    constant: float  # reward that the best constant answer must stay below
    forked: bool = False  # launchers and ranks are forks, which saves their imports
    own_cores: bool = False  # each node has cores of its own
    model: str | None = None  # script that makes the model's folder before the launch
    model_arguments: tuple[str, ...] = ()  # of this script
    environment: Mapping[str, str] = field(default_factory=dict)  # of all processes
    has_pool: bool = False  # agents bring all engines; one joins late and one leaves


SMALL = Demo(
    "train.py", num_ranks=4, steps=80, minutes=4, timeout_s=900.0, learned=0.3, constant=0.2
)
REAL = Demo("train_real.py", num_ranks=2, steps=24, minutes=15, timeout_s=7200.0, learned=0.2, constant=0.25,
            own_cores=True, model="real_model.py")  # fmt: skip
FAKE = Demo("train.py", num_ranks=4, steps=30, minutes=0.5, timeout_s=300.0, learned=0.1, constant=0.2, forked=True,
            environment={HOOK: FAKE_ENGINE})  # fmt: skip
POOL_REAL = replace(SMALL, minutes=7, timeout_s=1800.0, has_pool=True)
# slow enough for an agent to start and join meanwhile
POOL_FAKE = replace(
    FAKE,
    minutes=1.5,
    environment=Faults().slow_tokens(0.004).environment(FAKE_ENGINE),
    has_pool=True,
)
# The gradient of an answer has the noise of all tokens after it, so this mode learns later
LONG = Demo(
    "train.py", num_ranks=4, steps=120, minutes=10, timeout_s=1800.0, learned=0.3, constant=0.2
)
AGENT = Demo("train_agent.py", num_ranks=4, steps=60, minutes=6, timeout_s=1800.0, learned=0.3, constant=0.2,
             model="agent_model.py")  # fmt: skip
# the same hunts; the agents are processes of their own, which call the engine over HTTP
HARNESS = replace(
    AGENT,
    script="train_harness.py",
    own_cores=True,
    steps=40,
    minutes=10,
    learned=0.25,
    model_arguments=("--hermes",),
)
DEMOS: dict[str, Demo] = {
    **dict.fromkeys(MODES, SMALL), "in-flight": LONG, "fake": FAKE, "agent": AGENT,
    "harness": HARNESS, "real": REAL,
    "pool": POOL_REAL, "pool-fake": POOL_FAKE,
}  # fmt: skip
