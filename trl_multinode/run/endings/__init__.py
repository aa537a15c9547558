"""The end of a rank: exit codes, the line that says why, and the ending file of a node."""
