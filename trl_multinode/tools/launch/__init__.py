"""One launch line, the same on every node: check, roll-call, then `accelerate launch` as a child with its exit code.

    trl-multinode launch 4node.yaml train.py --max_steps 100
    trl-multinode launch FILE [--timeout S] [flags of accelerate launch] SCRIPT [ARGS]

| module | what it does |
|---|---|
| `command.py` | the command, with the three steps |
| `node_flags.py` | `--machine_rank` and `--main_process_ip` from the variables of the node's scheduler |
| `joining.py` | what this node tells the others, and where they meet |
| `rollcall.py`, `meeting.py`, `attendance.py` | the roll-call, for a node, for node 0, and its conclusion |
| `child.py` | the launcher as a child: its signals and the exit code of the run |
"""
