"""lmms-eval: its captioning tasks with the tokenizer and the metrics of
``rewards.compat``.

``python -m rl_caption.integrations.lmms_eval --model ... --tasks coco2017_cap_val``
takes the arguments of ``lmms-eval``, whose tasks import pycocoevalcap's names when they
are loaded.
"""

import pycocoevalcap.eval
import pycocoevalcap.tokenizer.ptbtokenizer

from rewards.compat import pycocoevalcap as compat


def replace_scorers() -> None:
    """Replace pycocoevalcap's classes by ``rewards.compat``'s, for all later imports."""
    for name in ("PTBTokenizer", "Bleu", "Meteor", "Rouge", "Cider"):
        setattr(pycocoevalcap.eval, name, getattr(compat, name))
    pycocoevalcap.tokenizer.ptbtokenizer.PTBTokenizer = compat.PTBTokenizer


if __name__ == "__main__":
    replace_scorers()
    from lmms_eval.cli.dispatch import main

    main()
