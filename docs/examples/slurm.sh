#!/bin/bash
# A run as a SLURM job, one rank for each GPU: `sbatch slurm.sh my.toml runs/my`.
#
# Three minutes before its time is up each rank gets SIGTERM and saves; the job is queued again and goes on there. A node that fails does
# the same. All nodes must see the recipe, the model, the data and the run.
#SBATCH --job-name=kvtune
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=12:00:00
#SBATCH --signal=TERM@180
#SBATCH --requeue
#SBATCH --open-mode=append

export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}
code=0
srun kvtune finetune-lora "$1" --out "$2" --resume-if-possible || code=$?
# Interrupted, after saving.
if [ "$code" = 143 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
