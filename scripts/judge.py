#!/usr/bin/env python
"""``python -m rl_caption judge`` as a script."""

import sys

from rl_caption.cli.main import run

if __name__ == "__main__":
    sys.exit(run("judge", sys.argv[1:]))
