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
# torchrun kills its ranks 30 s after SIGTERM. A script that saves a checkpoint then needs longer, and `#SBATCH
# --signal=TERM@600` above, because SLURM's own SIGTERM at the time limit comes 30 s before SIGKILL.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=600

# One task per node gets one core, where tasks are bound to cores, unless --cpus-per-task says otherwise.
# The single quotes matter: every node must expand $SLURM_NODEID itself.
srun --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_ON_NODE" bash -c 'accelerate launch --config_file @CONFIG@ \
    --machine_rank $SLURM_NODEID --main_process_ip $HOST0 train.py@SCRIPT_FLAGS@'
