"""Job files from the templates of `launch_templates/`, and the flags of a node from its scheduler's variables."""
