"""Job files from the templates of `templates/`, and the flags of a node from its scheduler's variables."""
