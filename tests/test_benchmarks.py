"""The recorded figures keep the bounds that the documents promise."""

import json
from pathlib import Path

import long_tail
import pytest

pytestmark = pytest.mark.nightly  # records of benchmarks, which no user runs
FOLDER = Path(__file__).parents[1] / "benchmarks"


def recorded(name: str) -> dict:
    return json.loads((FOLDER / "results" / f"{name}.json").read_text())


def test_each_record_keeps_the_bound_that_the_documents_promise():
    assert recorded("balance")["gradient_rel_diff"] < 1e-5
    for mix in recorded("agents").values():
        assert mix["step_ratio_vs_max"]["median"] <= 1.15
    for name in ("waits", "awaits"):
        assert recorded("scoring")[name]["step_ratio"]["median"] <= 1.1
    lora = recorded("lora")
    assert lora["bytes_ratio"] <= 1.05 and lora["base_digest_identical"]
    for cell in recorded("exchange")["cells"]:
        assert cell["exchange_s_per_mtoken"]["median"] <= 0.3
    for cell in recorded("sync")["cells"]:
        assert cell["world_collectives"] <= cell["buckets"] + 2 < cell["world_collectives_trl"]
        assert cell["inbound_ratio"]["high"] <= cell["inbound_limit"]
        assert cell["worst_logprob_difference"] < 1e-3 and cell["stale_logprob_difference"] > 0.1
        assert cell["extra_memory_buckets"] <= 3
    for cell in recorded("long_tail")["cells"].values():
        assert cell["aim"] == long_tail.reached(cell)
        # an arm that leaves the long rows for later would be fast for no good reason
        assert cell["arms"]["in_flight_3"]["trained_share"]["low"] > 0.85
    for world in recorded("control_plane").values():
        assert world["on_over_off"] <= 1.5 and world["connections_per_rank"] <= 3.0
