"""The process of `trl-multinode engines`: it owns the engines of a node without ranks, and serves one run at a time.

| module | what it does |
|---|---|
| `finding.py` | looks for a run at an address |
| `member.py` | keeps the port of the agent and its connection to node 0 |
| `ray_cluster.py`, `ray_engines.py` | `engines --ray`: what uses Ray, and the number of agents there |
| `agent.py` | the agent: join, start engines, pull weights, serve, leave, join the next run |
| `autoscale.py` | computes the number of engines that a run needs, for a scheduler |
"""
