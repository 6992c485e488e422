"""What ``accelerate launch --config_file configs/accelerate/NAME.yaml`` puts into the environment."""

from __future__ import annotations

from benchmarks.engine_memory import ENGINES as NAMES
from benchmarks.engine_memory import environment

ENGINES = {name: environment(name) for name in NAMES}
