"""The engines of a node, as one of its ranks uses them."""

from .node_host import NodeHost

__all__ = ["NodeHost"]
