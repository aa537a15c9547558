"""Reports of a run: its set-up, a line per log, a table per node, and metrics for `Trainer.log`."""
