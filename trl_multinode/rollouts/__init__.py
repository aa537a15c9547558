"""What TRL asks for and gets: `generation` is the object that it calls, `look_ahead` runs a round early, `rows` are
the shapes, `staleness` and `monitor` measure, `text_logging` keeps texts off the network.
"""
