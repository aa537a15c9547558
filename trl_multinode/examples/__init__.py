"""Training scripts that the command `trl-multinode` launches.

The folder is not named `scripts`, because that name of TRL is forwarded.
"""
