"""``python -m rl_caption.data.scenes --out DIR``: writes the generated world to disk."""

import argparse
import sys
from collections.abc import Sequence

from rl_caption.data.base import DataError
from rl_caption.data.scenes.module import ScenesData, export


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the world and print what was written. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m rl_caption.data.scenes", description=__doc__)
    parser.add_argument(
        "--out", required=True, metavar="DIR", help="folder to write dataset.json and images/ into"
    )
    for name, default, meaning in (
        ("num_train", 4000, "scenes to train on"),
        ("num_val", 400, "scenes to validate on"),
        ("num_test", 400, "scenes to test on"),
        ("num_unseen", 400, "test scenes with pairs of colour and shape that training lacks"),
        ("image_size", 64, "side of the images in pixels"),
        ("seed", 0, "which world"),
        ("captions_per_image", 5, "short captions per image"),
    ):
        parser.add_argument(
            f"--{name}",
            type=int,
            default=default,
            metavar="N",
            help=f"{meaning} (default {default})",
        )
    options = vars(parser.parse_args(arguments))
    out = options.pop("out")
    try:
        data = ScenesData(**options)
        path = export(out, data)
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    sizes = {split: len(data.split(split)) for split in data.splits}
    print(f"wrote {path}: " + ", ".join(f"{size} {split}" for split, size in sizes.items()))
    print(
        f"wrote {sum(sizes.values())} PNG images of {options['image_size']} px to {path.parent / 'images'}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
