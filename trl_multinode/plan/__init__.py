"""`trl-multinode plan`: what fits where, and which split is fastest, from a model's config alone."""
