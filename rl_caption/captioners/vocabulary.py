"""Word-level vocabularies: the tokens that the rewards count are the tokens that the captioner emits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from rewards.text.tokenize import tokenize

PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"


def build_vocabulary(references: Iterable[list[str]], min_count: int) -> PreTrainedTokenizerFast:
    """Word-level tokenizer of the words that occur at least ``min_count`` times in the training references.

    Words are those of ``rewards.text.tokenize.tokenize``; ids 0 to 3 are padding, BOS, EOS, UNK, then words by
    falling count, ties in alphabetical order. Rarer words become UNK, which no caption may contain.
    """
    if min_count < 1:
        raise ValueError(f"min_count is {min_count}: it must be at least 1")
    counts = Counter(word for captions in references for caption in captions for word in tokenize(caption))
    words = sorted((word for word, count in counts.items() if count >= min_count), key=lambda w: (-counts[w], w))
    if not words:
        raise ValueError(f"no word occurs {min_count} times in the training references: lower model.min_count")
    vocabulary = {token: index for index, token in enumerate([PAD, BOS, EOS, UNK, *words])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=UNK))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, bos_token=BOS, eos_token=EOS, unk_token=UNK
    )


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerFast:
    """A ``tokenizers`` tokenizer: a folder saved by Transformers or a ``tokenizer.json``.

    Raises:
        ValueError: padding, BOS or EOS tokens cannot be told.
    """
    source = Path(path)
    if source.suffix == ".json":
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(source))
        known = tokenizer.get_vocab()
        for name, token in (("pad_token", PAD), ("bos_token", BOS), ("eos_token", EOS), ("unk_token", UNK)):
            if token in known:
                setattr(tokenizer, name, token)
    else:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(source)
    missing = [name for name in ("pad_token", "bos_token", "eos_token") if getattr(tokenizer, name) is None]
    if missing:
        raise ValueError(f"tokenizer {str(path)!r} has no {', '.join(missing)}: add them to its special tokens")
    return tokenizer


def is_word_level(tokenizer: PreTrainedTokenizerFast) -> bool:
    """Whether the tokens are whole words, so that references pass through the caption tokeniser first."""
    return isinstance(tokenizer.backend_tokenizer.model, WordLevel)
