"""What every training shares: the loop, the run folder, checkpoints, logs and validation."""
