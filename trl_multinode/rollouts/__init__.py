"""Rollouts for TRL's trainers: `generation` is the object that TRL calls, `look_ahead` generates a round early,
`continuous` and `groups` keep rounds in flight, `rows` has the row types and seeds, `staleness` and `monitor` measure,
`text_logging` keeps texts off the network.
"""
