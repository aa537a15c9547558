"""`trl-multinode plan`: what fits where, and which split is fastest, from a model's config alone."""


class PlanError(ValueError):
    """An argument of the command cannot be planned. Its text is all that the command prints."""
