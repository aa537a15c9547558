"""Configuration of a pseudo-cluster: SLURM's two files, names of hosts, a key and fake GPUs. All in one folder."""

import os
import secrets
import stat
from pathlib import Path

# A job of `urgent` pre-empts those of `main`, which have 120 s until SLURM puts them back into the queue, and those of
# `at_once`, which SLURM puts back at once; their processes have KillWait from SIGTERM to SIGKILL. `cred_expire` is the
# wait before a requeued job starts again, too, 120 s by default. A job's signals reach the whole tree of its processes
# (`linuxproc`), as under `cgroup`. Tasks are bound to cores, so a task has one core by default, as on many clusters.
SLURM_CONF = """\
ClusterName=pseudo
SlurmctldHost={host0}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmctldPort=16817
SlurmdPort=16818
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
StateSaveLocation={folder}/state
GresTypes=gpu
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,bf_interval=1,sched_interval=1
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
JobRequeue=1
KillWait=30
OverTimeLimit=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName={nodes} CPUs={cpus} RealMemory=4000 Gres=gpu:{gpus} State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=120
PartitionName=at_once Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10
"""


def write_files(folder: Path, addresses: list[str], gpus: int) -> None:
    """
    Write everything that the daemons of a pseudo-cluster read.

    Args:
        folder (`Path`):
            Existing folder with a short path, which the daemons' files and sockets share.
        addresses (`list[str]`):
            Address of each node. Node `k` is called `n<k>`.
        gpus (`int`):
            Number of fake GPUs of a node: null devices, which SLURM only counts.
    """
    lines = [
        "127.0.0.1 localhost",
        *(f"{address} n{node}" for node, address in enumerate(addresses)),
    ]
    (folder / "hosts").write_text("\n".join(lines) + "\n")
    nodes = f"n[0-{len(addresses) - 1}]"
    cpus = os.cpu_count()
    text = SLURM_CONF.format(folder=folder, host0="n0", nodes=nodes, cpus=cpus, gpus=gpus)
    (folder / "slurm.conf").write_text(text)
    (folder / "gres.conf").write_text(
        f"NodeName={nodes} Name=gpu File={folder}/gpu[0-{gpus - 1}]\n"
    )
    (folder / "state").mkdir()
    for gpu in range(gpus):
        os.mknod(folder / f"gpu{gpu}", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))
