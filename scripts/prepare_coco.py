#!/usr/bin/env python
"""``python -m rl_caption prepare_coco`` as a script."""

import sys

from rl_caption.__main__ import run

if __name__ == "__main__":
    sys.exit(run("prepare_coco", sys.argv[1:]))
