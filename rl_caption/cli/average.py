"""Average the weights of several captioners that were fine-tuned from one start."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from rl_caption.captioners.averaging import average_weights
from rl_caption.captioners.base import CaptionerError
from rl_caption.captioners.loading import weights_hash
from rl_caption.config.build import quiet_libraries
from rl_caption.data.files import write_json
from rl_caption.runtime.options import add_trust
from rl_caption.training.checkpoint import new_folder, seal

NOTE = "average.json"
FAR = 0.2
"""Distance (see ``Averaged``) above which two captioners are unlikely to have one start."""


def main(argv: Sequence[str] | None = None) -> int:
    """``average --models RUN_A/export/best RUN_B/export/best --out FOLDER [--weights 0.7 0.3]``"""
    parser = argparse.ArgumentParser(
        prog="rl-caption average", description=__doc__, allow_abbrev=False
    )
    add = parser.add_argument
    add(
        "--models",
        nargs="+",
        required=True,
        metavar="FOLDER",
        help="exports of captioners, trained from one start",
    )
    add(
        "--weights",
        nargs="+",
        type=float,
        metavar="W",
        help="a weight for each captioner, which sum to 1 (default: all the same)",
    )
    add("--out", type=Path, required=True, help="folder of the new captioner; it must not exist")
    add_trust(parser)
    options = parser.parse_args(argv)
    out: Path = options.out
    if os.path.lexists(out):
        raise CaptionerError(f"--out {out} already exists: name a new folder, or remove it")
    quiet_libraries()
    soup = average_weights(options.models, options.weights)
    members = [
        {"model": name, "weight": weight, "distance": distance, "sha256": weights_hash(name)}
        for name, weight, distance in zip(options.models, soup.weights, soup.distances, strict=True)
    ]
    with new_folder(out) as partial:
        soup.captioner.save_pretrained(soup.captioner.policy, partial)
        write_json(partial / NOTE, members)
        seal(partial)
    for member in members:
        print(
            f"{member['weight']:.3g} of {member['model']} (distance from the first: "
            f"{member['distance']:.2%})"
        )
    if max(soup.distances) > FAR:
        print(
            f"WARNING: a distance is above {FAR:.0%}: only captioners trained from the same "
            f"weights can be averaged"
        )
    print(f"wrote {out}")
    return 0
