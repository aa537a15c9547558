"""The test kit: what tests, the demo and the benchmarks run instead of machines, networks and models.

- [`engines`](engines.py): engines without a trainer, real or fake;
- [`fake_engine`](fake_engine.py): the fake engine; `tests/engine/test_conformance.py` tests it together with vLLM;
- [`nodes`](nodes.py): N nodes on this machine, each a real `accelerate launch`, optionally in network namespaces;
- [`forking`](forking.py): launchers, ranks and engines as forks of a [`template`](template.py);
- [`faults`](faults.py): lost loads, skipped loads that are reported as done, stale heads, slow engines;
- [`faulty_engine`](faulty_engine.py) and [`faulty_receiver`](faulty_receiver.py): the real engine with these faults;
- [`forked_vllm`](forked_vllm.py): the real engine with forked vLLM processes;
- [`logits_processor`](logits_processor.py): a custom logits processor, which vLLM's processes load;
- [`models`](models.py): tiny models and tokenizers without a hub;
- [`architectures`](architectures.py): a small model of each tested architecture;
- [`sources`](sources.py): all supported ways to shard a model, without a trainer;
- [`replay`](replay.py): a trainer whose completions are computed from its prompts, without an engine;
- [`hub`](hub.py): a model hub on this machine, with faults on request.

Import from the modules, not from this package: each module has its own dependencies. The wheel has no kit. A
program that uses it puts `tests/` on its path; the processes that it starts then find the kit and the package too.
"""

import os
import sys
from pathlib import Path

# tests/, and the repository
_FOLDERS = [str(folder) for folder in Path(__file__).resolve().parents[1:3]]

sys.path += [folder for folder in _FOLDERS if folder not in sys.path]
_inherited = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
os.environ["PYTHONPATH"] = os.pathsep.join(
    [*_inherited, *(each for each in _FOLDERS if each not in _inherited)]
)
