"""Rollouts for TRL's trainers: `generation` is the object that TRL calls, `rounds` and `groups` keep the rounds that
are begun ahead, `upcoming` has their batches early, `rows` has the row types and seeds, `staleness` and `monitor`
measure, `text_logging` keeps texts off the network.
"""
