#!/usr/bin/env python
"""``python -m rl_caption negatives`` as a script."""

import sys

from rl_caption.__main__ import run

if __name__ == "__main__":
    sys.exit(run("negatives", sys.argv[1:]))
