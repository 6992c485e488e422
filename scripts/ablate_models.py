#!/usr/bin/env python
"""``python -m rl_caption ablate_models`` as a script."""

import sys

from rl_caption.__main__ import run

if __name__ == "__main__":
    sys.exit(run("ablate_models", sys.argv[1:]))
