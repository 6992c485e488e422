"""Building of rewards from names and arguments: document frequencies of a data set, its
tokenizer, shared encoders.

Training, monitoring, evaluation, judges and filters of captions build their rewards
here.
"""

import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from rewards.base import Reward
from rewards.clip.clipscore import ClipScore
from rewards.clip.encoder import CachedEncoder, EncoderOptions
from rewards.registry import REWARDS, build, load, parameters, short_name
from rewards.text.document_frequency import DocumentFrequencies
from rewards.text.tokenize import TOKENIZER


class RewardBuilder:
    """Builds the rewards of one data set.

    CIDEr-D gets the data set's document frequencies and ``eos``; every reward of this
    package that splits captions gets its tokenizer; rewards whose arguments ask for the
    same network and cache share one encoder. A reward's own arguments win over these
    defaults.

    Args:
        references: captions of each image of the data set; an image is one document.
            They are counted when a reward first asks. Without references, CIDEr-D
            counts the references of each call, as the COCO toolkit does.
        tokenizer: tokenizer of the captions, one of
            ``rewards.text.tokenize.TOKENIZERS``.
        eos: whether EOS is a token of captions, references and documents.
        df: document frequencies, or a file of them; None counts them from ``references``.
        counting: names of the rewards that get ``eos`` and document frequencies.
    """

    def __init__(
        self,
        references: Sequence[Sequence[str]] = (),
        tokenizer: str = TOKENIZER,
        eos: bool = False,
        df: DocumentFrequencies | str | Path | None = None,
        counting: Collection[str] = ("cider",),
    ) -> None:
        self.counting = counting
        self.references = references
        self.tokenizer = tokenizer
        self.eos = eos
        self.df = df
        self.counted: dict[tuple[bool, str], DocumentFrequencies] = {}
        """(EOS is a token, tokenizer) -> document frequencies of ``references``, added
        by ``count``.
        """
        self.encoders: dict[str, CachedEncoder] = {}
        """``encoder_key`` of a reward's arguments -> the encoder that rewards with this
        key share.
        """

    def build(self, name: str, kwargs: Mapping[str, Any]) -> Reward:
        """Build the reward ``name`` (of ``registry.REWARDS``, or ``module:Class``) with
        its arguments ``kwargs``.

        Raises as ``registry.build``.
        """
        name = short_name(name)
        arguments = dict(kwargs)
        if name in REWARDS and "tokenizer" in parameters(name):
            arguments.setdefault("tokenizer", self.tokenizer)
        if name in self.counting:
            arguments.setdefault("eos", self.eos)
            if self.df is not None:
                arguments.setdefault("df", self.df)
            elif self.references and "df" not in arguments:
                eos = bool(arguments["eos"])
                arguments["df"] = self.count(eos, arguments["tokenizer"])
        key = encoder_key(name, arguments)
        if key in self.encoders:
            arguments["backbone"] = self.encoders[key]
        reward = build(name, **arguments)
        if key and isinstance(reward, ClipScore):
            self.encoders.setdefault(key, reward.backbone)
        return reward

    def count(self, eos: bool, tokenizer: str | None = None) -> DocumentFrequencies:
        """Document frequencies of the references, counted once. ``ValueError`` if there
        are no references.
        """
        key = eos, tokenizer or self.tokenizer
        if key not in self.counted:
            self.counted[key] = DocumentFrequencies.from_texts(
                self.references, eos=eos, tokenizer=key[1]
            )
        return self.counted[key]


def encoder_key(name: str, arguments: Mapping[str, Any]) -> str:
    """Key that is equal for rewards whose arguments ask for the same encoder and image
    cache; empty for rewards without an encoder.
    """
    reward_class = load(name)
    if not (isinstance(reward_class, type) and issubclass(reward_class, ClipScore)):
        return ""
    options = inspect.signature(reward_class).parameters
    names = [field.name for field in fields(EncoderOptions) if field.name in options]
    names.remove("cache_references")
    return repr([arguments.get(name, options[name].default) for name in names])
