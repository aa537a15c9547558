"""What `--mode` of the demo sets on top of the script's own config. Imports nothing: `run.py` must be quick."""

MODES: dict[str, dict] = {
    "sync": {},
    "overlap-only": {"max_staleness": 1},
    "balance-only": {"micro_batch_tokens": 1024},
    "overlap": {"max_staleness": 1, "micro_batch_tokens": 1024},  # both
}
