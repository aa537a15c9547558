"""Heartbeats of ranks and nodes: what a rank shows, who judges it, and what is said of a silent one."""
