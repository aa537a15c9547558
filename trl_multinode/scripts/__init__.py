"""Training scripts that the command `trl-multinode` launches, as `trl/scripts` has those of `trl`."""
