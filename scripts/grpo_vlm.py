#!/usr/bin/env python
"""``rl-caption grpo_vlm`` as a script, for ``accelerate launch``."""

import sys

from rl_caption.__main__ import run

if __name__ == "__main__":
    sys.exit(run("grpo_vlm", sys.argv[1:]))
