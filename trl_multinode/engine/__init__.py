"""A rank's side of its node's engines.

`fleet` starts and ends the engines (`settings`, `process`); `node_engines` has a `client` for each of them, and
`stream` sends requests to the engine with the fewest outstanding tokens (`load`).
"""
