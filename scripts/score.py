#!/usr/bin/env python
"""``rl-caption score`` as a script, for ``accelerate launch``."""

import sys

from rl_caption.__main__ import run

if __name__ == "__main__":
    sys.exit(run("score", sys.argv[1:]))
