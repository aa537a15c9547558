"""How a rank ends: exit codes, the line that says why, and the ending file of a node."""
