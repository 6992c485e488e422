"""``python -m rl_caption NAME``."""

import sys

from rl_caption.cli import main

sys.exit(main())
