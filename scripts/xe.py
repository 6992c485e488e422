#!/usr/bin/env python
"""``rl-caption xe`` as a script, for ``accelerate launch``."""

import sys

from rl_caption.__main__ import run

if __name__ == "__main__":
    sys.exit(run("xe", sys.argv[1:]))
