"""Checkpoints and Hub pushes: `checkpoints` and `resume` continue a stopped run; `hub` verifies pushes
(`saved_weights`), retries and reports them (`pushing`), and describes the run (`model_card`).
"""
