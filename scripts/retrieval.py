#!/usr/bin/env python
"""``python -m rl_caption retrieval`` as a script."""

import sys

from rl_caption.__main__ import run

if __name__ == "__main__":
    sys.exit(run("retrieval", sys.argv[1:]))
