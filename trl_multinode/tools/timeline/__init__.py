"""`trl-multinode timeline`: what every rank and every engine of a run did when, from the files that the run wrote."""
