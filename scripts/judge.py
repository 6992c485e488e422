#!/usr/bin/env python
"""``python -m rl_caption judge`` as a script."""

import sys

from rl_caption.__main__ import run

if __name__ == "__main__":
    sys.exit(run("judge", sys.argv[1:]))
