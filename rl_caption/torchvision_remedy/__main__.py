"""``python -m rl_caption.torchvision_remedy install|status|remove``."""

import sys

from rl_caption.torchvision_remedy import main

if __name__ == "__main__":
    sys.exit(main())
