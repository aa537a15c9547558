"""Trainers of `trl.experimental` on the seam of `NodeTrainer`, a module each, so that one imports only what it needs.

Their API is TRL's and as unstable as TRL says; loaded by name: `from trl_multinode import SDFTConfig, SDFTTrainer`.
"""
