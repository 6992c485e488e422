#!/bin/bash
# Self-critical training under Slurm:  sbatch scripts/slurm_scst.sh CONFIG [--section.key value ...]
# Two minutes before the time limit, and at scancel, the run saves a checkpoint and the job ends with 0. Submit it again to
# go on; the run is complete when its folder has result.json.
#SBATCH --job-name=scst
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --time=04:00:00
#SBATCH --signal=TERM@120
#SBATCH --open-mode=append
LAUNCH=${LAUNCH:-configs/accelerate/multi_gpu.yaml}
PROCESSES=${SLURM_GPUS_ON_NODE:-2}

srun python -m rl_caption.runtime.launch --config_file "$LAUNCH" --num_processes "$PROCESSES" scripts/scst.py --config "$@"
