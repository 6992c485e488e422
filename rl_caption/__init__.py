"""Fine-tune image captioners by self-critical sequence training."""

__version__ = "0.1.0"
