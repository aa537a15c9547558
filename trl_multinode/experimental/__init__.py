"""Trainers of `trl.experimental` built on `NodeTrainer`, one module each, so that an import loads only what it needs.

Their API is TRL's, and as unstable as TRL declares it. `trl_multinode` loads them by name:
`from trl_multinode import SDFTConfig, SDFTTrainer`.
"""
