#!/usr/bin/env python
"""``rl-caption reward_model`` as a script, for ``accelerate launch``."""

import sys

from rl_caption.__main__ import run

if __name__ == "__main__":
    sys.exit(run("reward_model", sys.argv[1:]))
