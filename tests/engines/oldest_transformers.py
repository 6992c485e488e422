"""``rewards`` with the oldest supported Transformers, installed without dependencies."""

# /// script
# dependencies = ["transformers==5.6.0", "torch>=2.11,<2.14", "pillow", "psutil", "open_clip_torch"]
# ///

import json
import pkgutil

import rewards
from rewards.mixed import MixedReward
from rewards.registry import build
from rewards.text.document_frequency import DocumentFrequencies
from tests.engines.report import FOLDER, cases, scored

OTHERS = {"torchmetrics"}
"""Packages that are not installed here."""


def main() -> None:
    """Import everything, then score each case by the reward of ``mix.yaml``."""
    for module in pkgutil.walk_packages(rewards.__path__, "rewards."):
        try:
            __import__(module.name)
        except ModuleNotFoundError as error:
            if error.name not in OTHERS:
                raise
    settings = json.loads((FOLDER / "mix.yaml").read_text())["reward"]
    terms = {}
    for name, term in settings["terms"].items():
        arguments = dict(term.get("kwargs", {}))
        if name == "cider":
            arguments["df"] = DocumentFrequencies.load(settings["df"])
        terms[name] = (build(name, **arguments), term["weight"])
    rows = cases()
    captions = [row["caption"] for row in rows]
    columns = {name: [row[name] for row in rows] for name in ("image", "references")}
    scores = MixedReward(terms)(None, captions, **columns)
    scored("`rewards`: all modules, three scores", captions, scores, **columns)


if __name__ == "__main__":
    main()
