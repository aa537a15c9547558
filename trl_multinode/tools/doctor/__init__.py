"""`trl-multinode doctor`: report of the launch, of this node and of all nodes side by side. It starts no training.

    trl-multinode doctor FILE [flags of accelerate launch] [script and its arguments]
    trl-multinode doctor FILE --level node ...
    trl-multinode doctor FILE --level cluster --machine_rank K --main_process_ip HOST0 ...     (on every node)

Each level contains the one before it. `static` is the report of `trl-multinode check`. `node` adds what this machine
has and what the launch needs of it (`node.py` lists the examinations). `cluster` adds a meeting of all nodes at the
address of the launch, their differences, and the speed of each link in the ring of nodes (`cluster.py`, `ring.py`).

Exit status: 0 without errors, 1 with errors, 2 for an invalid command line. Warnings do not change it.
"""
