"""Rehearsal of the largest round and the longest rows before step 1 (`rehearse_longest`)."""
