"""The generated world: scenes of shapes whose captions can be judged by the truth.

Everything is a pure function of a seed. docs/scenes.md describes the facts, the
language, the splits and the oracle.
"""

from rl_caption.data.scenes.module import ScenesData as ScenesData
from rl_caption.data.scenes.negatives import hard_negatives as hard_negatives
from rl_caption.data.scenes.oracle import claims as claims
from rl_caption.data.scenes.oracle import oracle as oracle
