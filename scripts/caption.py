#!/usr/bin/env python
"""``rl-caption caption`` as a script, for ``accelerate launch``."""

import sys

from rl_caption.__main__ import run

if __name__ == "__main__":
    sys.exit(run("caption", sys.argv[1:]))
