"""The loop around every training, its engines, run folder, checkpoints and validation."""
