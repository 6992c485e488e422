"""The generated world: scenes of shapes whose captions can be judged by the truth.

Everything is a pure function of a seed. docs/scenes.md describes the facts, the language, the splits and the oracle.
"""

from rl_caption.data.scenes.export import export
from rl_caption.data.scenes.images import SceneImage
from rl_caption.data.scenes.language import long_reference, references
from rl_caption.data.scenes.module import ScenesData
from rl_caption.data.scenes.negatives import NEGATIVE_KINDS, hard_negatives
from rl_caption.data.scenes.oracle import Claim, OracleScore, claims, oracle
from rl_caption.data.scenes.render import render
from rl_caption.data.scenes.world import Fact, Kind, Scene, Thing, facts, make_scene

__all__ = [
    "NEGATIVE_KINDS",
    "Claim",
    "Fact",
    "Kind",
    "OracleScore",
    "Scene",
    "SceneImage",
    "ScenesData",
    "Thing",
    "claims",
    "export",
    "facts",
    "hard_negatives",
    "long_reference",
    "make_scene",
    "oracle",
    "references",
    "render",
]
