"""One tokeniser for evaluation and rewards: the toolkit's PTB tokens, in Python where that was compared with Java."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from rl_caption.evaluation.errors import EvaluationError
from rl_caption.evaluation.java import JavaError, find_java
from rl_caption.evaluation.toolkit import ptb_tokenize

logger = logging.getLogger(__name__)

Tokenizer = Literal["auto", "java", "python", "none"]
TOKENIZERS = ("auto", "java", "python", "none")


class Tokenised(NamedTuple):
    """Tokens of captions and references, joined by single spaces."""

    captions: dict[str, str]
    references: dict[str, list[str]]
    name: str
    """For the signature."""


def tokenise(
    captions: Mapping[str, str], references: Mapping[str, Sequence[str]], tokenizer: str, version: str
) -> Tokenised:
    """Tokenise captions, and the references of their images.

    Args:
        captions: image id -> caption.
        references: image id -> captions that people wrote, of all these images.
        tokenizer: ``java`` is the toolkit's own; ``python`` is ``rewards.text.tokenize``; ``auto`` is Python for the
            captions on which it was compared with Java (``is_tested``), and Java, where there is one, for the others;
            ``none`` splits at spaces.
        version: of this package, for the name of tokens that may differ from the toolkit's.

    Raises:
        EvaluationError: an unknown tokenizer, or ``java`` without Java.
        JavaError: Java is there, but the tokenizer failed.
    """
    if tokenizer not in TOKENIZERS:
        raise EvaluationError(f"tokenizer is {tokenizer!r}: expected auto, java, python or none")
    # Two calls, as the toolkit makes them: its tokenizer looks at the next line to end an abbreviation.
    flat, untested = _tokenise([text for key in captions for text in references[key]], tokenizer)
    tokens = iter(flat)
    tokenised_references = {key: [next(tokens) for _ in references[key]] for key in captions}
    candidates, more = _tokenise(list(captions.values()), tokenizer)
    name = "none[split at spaces]" if tokenizer == "none" else "PTB[corenlp3.4.1]"
    if untested + more:
        count = f"{untested + more} of {len(flat) + len(candidates)} texts not compared with Java"
        name = f"PTB-python[rl-caption{version},{count}]"
    return Tokenised(dict(zip(captions, candidates, strict=True)), tokenised_references, name)


def _tokenise(texts: Sequence[str], tokenizer: str) -> tuple[list[str], int]:
    """Tokens of every text, and how many texts have tokens that are not known to be the toolkit's."""
    if tokenizer == "none":
        return [" ".join(text.split()) for text in texts], 0
    if tokenizer == "java":
        try:
            find_java()
        except JavaError as error:
            raise EvaluationError(f"tokenizer 'java' cannot be used: {error}") from error
        logger.info("tokenising %d texts with Java", len(texts))
        return ptb_tokenize(texts), 0
    from rewards.text.tokenize import is_tested, tokenize_lines

    tokens = tokenize_lines(texts)
    others = [row for row, text in enumerate(texts) if not is_tested(text, in_lines=True)]
    if not others or tokenizer == "python":
        return tokens, len(others)
    try:
        find_java()
    except JavaError as error:
        logger.warning(
            "%s: %d of %d texts have tokens that may differ from the toolkit's, see the signature",
            error,
            len(others),
            len(texts),
        )
        return tokens, len(others)
    logger.info("tokenising %d of %d texts with Java, the others in Python", len(others), len(texts))
    # Each with its next line, which the tokenizer looks at.
    lines = [line for row in others for line in (texts[row], texts[row + 1] if row + 1 < len(texts) else "")]
    for row, words in zip(others, ptb_tokenize(lines)[::2], strict=True):
        tokens[row] = words
    return tokens, 0
