"""A rank's side of its node's engines.

`fleet` starts and ends the engines (`settings`, `process`); `node_engines` has a `client` for each of them, and
`dispatch` chooses the engine of every request.
"""
