"""What ``accelerate launch --config_file configs/accelerate/NAME.yaml`` puts into the environment."""

from __future__ import annotations

PLAIN: dict[str, str] = {}
FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
}
ENGINES = {"plain": PLAIN, "fsdp2": FSDP2} | {
    f"zero{stage}": {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": str(stage),
        "ACCELERATE_DEEPSPEED_ZERO3_INIT": "false",
    }
    for stage in (1, 2, 3)
}
