"""Engines (Accelerate, DeepSpeed, FSDP2), sharded state dicts and precision."""
