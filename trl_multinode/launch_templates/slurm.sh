#!/usr/bin/env bash
#SBATCH --job-name=grpo
#SBATCH --nodes=@NODES@
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=@GPUS@
#SBATCH --exclusive
#SBATCH --output=%x-%j.log
# Submit with `sbatch`. The account, the partition and the time limit of your cluster are missing.
set -euo pipefail

HOST0=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export HOST0
# After a SIGTERM the ranks save a checkpoint at the end of the step, and torchrun kills them 30 s later, or after the
# seconds below. SLURM itself kills 30 s after SIGTERM at the time limit. To save earlier, add the line
# `#SBATCH --signal=USR1@600` above, 600 s before the limit: the launcher ignores USR1, its ranks do not.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=600
export TRL_MULTINODE_PREEMPT_SIGNAL=USR1

# One task per node gets one core, where tasks are bound to cores, unless --cpus-per-task says otherwise.
# The single quotes matter: every node must expand $SLURM_NODEID itself.
srun --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_ON_NODE" bash -c 'trap "" USR1; exec accelerate launch --config_file @CONFIG@ \
    --machine_rank $SLURM_NODEID --main_process_ip $HOST0 train.py@SCRIPT_FLAGS@'
