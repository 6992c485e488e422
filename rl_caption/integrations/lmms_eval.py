"""lmms-eval: its caption tasks with ``rewards.compat.pycocoevalcap`` for the tokenizer, BLEU, ROUGE-L and CIDEr.

``python -m rl_caption.integrations.lmms_eval --model ... --tasks coco2017_cap_val`` takes the arguments of
``lmms-eval``. Its tasks import pycocoevalcap's names when they are loaded, and construct METEOR for every metric.
"""

from collections.abc import Mapping
from typing import Any

from rewards.compat import pycocoevalcap as compat


class Meteor:
    """pycocoevalcap's METEOR, whose Java program starts only where METEOR is asked for."""

    def compute_score(
        self, gts: Mapping[Any, list[str]], res: Mapping[Any, list[str]]
    ) -> tuple[float, list[float]]:
        """The score of the set, and N scores."""
        score: tuple[float, list[float]] = compat.Meteor().compute_score(gts, res)
        return score

    def method(self) -> str:
        """The name of the metric."""
        return "METEOR"


def replace_scorers() -> None:
    """Put this package's classes in place of pycocoevalcap's in all later imports. Raises ``ImportError``."""
    import pycocoevalcap.eval
    import pycocoevalcap.tokenizer.ptbtokenizer

    for name in ("PTBTokenizer", "Bleu", "Rouge", "Cider"):
        setattr(pycocoevalcap.eval, name, getattr(compat, name))
    pycocoevalcap.eval.Meteor = Meteor
    pycocoevalcap.tokenizer.ptbtokenizer.PTBTokenizer = compat.PTBTokenizer


def main() -> None:
    """Run ``lmms-eval`` with its command line."""
    replace_scorers()
    from lmms_eval.cli.dispatch import main as evaluate

    evaluate()


if __name__ == "__main__":
    main()
