#!/bin/bash
#SBATCH --job-name=fsdp2
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=04:00:00
#SBATCH --output=%x-%j.log
# Starts one torchrun per node. SHARED is a folder that all nodes see: the first rank finds
# stragglers in the files of the others there.
#
#     sbatch examples/cluster/slurm.sh examples/fsdp2.py --size real --steps 1000
#     stepscope trace --watch "$SHARED/observer-JOB"        # on the login node, meanwhile
set -euo pipefail

SHARED=${SHARED:-$PWD}
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
folder=$SHARED/observer-$SLURM_JOB_ID

srun torchrun \
    --nnodes "$SLURM_NNODES" \
    --nproc-per-node "$SLURM_GPUS_ON_NODE" \
    --rdzv-id "$SLURM_JOB_ID" \
    --rdzv-backend c10d \
    --rdzv-endpoint "${nodes[0]}:29500" \
    "$@" --folder "$folder"
