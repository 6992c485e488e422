"""Trains the models behind embedding rewards: contrastive training, and distillation of L-CLIP."""
