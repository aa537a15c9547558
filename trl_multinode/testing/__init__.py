"""The public test kit.

- [`engines`](engines.py): engines without a trainer, real or fake;
- [`fake_engine`](fake_engine.py): the fake, which `tests/engine/test_conformance.py` holds to vLLM;
- [`nodes`](nodes.py): N nodes on this machine, each a real `accelerate launch`, also in network namespaces;
- [`faults`](faults.py): lost loads, loads that lie, stale heads, slow engines;
- [`models`](models.py): tiny models and tokenizers without a hub; [`architectures`](architectures.py): of other kinds;
- [`sources`](sources.py): every way to shard a model, without a trainer around it;
- [`replay`](replay.py): completions of a script's own choice, without an engine;
- [`hub`](hub.py): a hub on this machine, which can also refuse.

Import from the modules: each brings its own dependencies.
"""
