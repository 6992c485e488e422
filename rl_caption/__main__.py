"""``python -m rl_caption NAME``."""

import sys

from rl_caption.cli.main import main

sys.exit(main())
