"""Held-out judges: rewards that are not in the reward, by which one sees whether it is being hacked."""

from collections.abc import Mapping, Sequence
from itertools import product

from rewards.base import Reward, leaf_rewards
from rewards.build import RewardBuilder
from rewards.clip.backbone import FrozenEncoder
from rewards.clip.clipscore import ClipScore
from rewards.mixed import MixedReward
from rewards.text.bleu import Bleu
from rewards.text.cider import CiderD
from rewards.text.rouge import RougeL
from rewards.text.tokenize import TOKENIZER
from rl_caption.monitoring.config import JudgeConfig
from rl_caption.runtime.errors import ConfigError, config_errors

N_GRAM_JUDGES = {"cider": CiderD, "rouge_l": RougeL, "bleu4": Bleu}
"""Judges that need nothing but references: name -> class."""


def default_judges(reward: MixedReward) -> dict[str, JudgeConfig]:
    """CIDEr-D if no term of ``reward`` counts n-grams, else ROUGE-L and BLEU-4, less those that are terms of it."""
    used = {
        metric
        for metric in N_GRAM_JUDGES.values()
        if any(isinstance(score, metric) for score in leaf_rewards(reward))
    }
    if not used:
        return {"cider": JudgeConfig()}
    others = {"rouge_l": (RougeL, None), "bleu4": (Bleu, "bleu")}
    return {
        name: JudgeConfig(target) for name, (metric, target) in others.items() if metric not in used
    }


def build_judges(
    judges: Mapping[str, JudgeConfig] | None,
    reward: MixedReward | None,
    references: Sequence[list[str]],
    key: str = "monitor.judges",
    tokenizer: str = TOKENIZER,
) -> dict[str, Reward]:
    """Make the judges of a run.

    Args:
        judges: name -> configuration; None takes ``default_judges``. ``cider`` has the document frequencies of
            ``references`` and no EOS, as ``val/cider`` has, unless its arguments say otherwise.
        reward: that of the run. With None, where captions are judged after training, no judge is refused as its term.
        references: of every validation image.
        key: dotted name of ``judges`` in the configuration, for messages.
        tokenizer: ``data.tokenizer``, for judges whose arguments do not name another.

    Raises:
        ConfigError: an unknown judge or argument, or a judge that is no independent measure: it is a term of the
            reward, the same metric with other arguments (CIDEr-D with another EOS setting), or uses the same encoder
            (CLIPScore with another w) or language model.
    """
    built = {}
    if judges is None:
        judges = default_judges(reward) if reward is not None else {}
    builder = RewardBuilder(references, tokenizer)

    for name, judge in judges.items():
        with config_errors(f"{key}.{name}"):
            built[name] = builder.build(judge.target or name, judge.kwargs)
        for term, used in (reward.rewards if reward is not None else {}).items():
            for judge_score, term_score in product(leaf_rewards(built[name]), leaf_rewards(used)):
                _check_held_out(judge_score, f"{key}.{name}", term_score, term)
    return built


def _check_held_out(judge: Reward, key: str, used: Reward, term: str) -> None:
    """Refuse a judge that is a term of the reward, or rises with it: other arguments do not make it another measure."""
    rule = "a judge must be independent of the reward"
    if used.signature == judge.signature:
        raise ConfigError(f"{key} is the reward's term {term!r} ({used.signature}): {rule}")
    both = f"{key} ({judge.signature}) and the reward's term {term!r} ({used.signature})"
    if isinstance(judge, ClipScore) and isinstance(used, ClipScore):
        judge_encoder, reward_encoder = judge.backbone.encoder, used.backbone.encoder
        same = judge_encoder.fingerprint == reward_encoder.fingerprint
        if isinstance(judge_encoder, FrozenEncoder) and isinstance(
            reward_encoder, FrozenEncoder
        ):  # perhaps in another precision
            same |= (judge_encoder.name, judge_encoder.pretrained) == (
                reward_encoder.name,
                reward_encoder.pretrained,
            )
        if same:
            raise ConfigError(f"{both} use the same encoder: {rule}")
    models = [getattr(score, "language_model", None) for score in (judge, used)]
    signatures = [getattr(model, "signature", None) for model in models]
    if None not in signatures and signatures[0] == signatures[1]:
        raise ConfigError(f"{both} ask the same model: {rule}")
    if any(
        isinstance(judge, metric) and isinstance(used, metric) for metric in N_GRAM_JUDGES.values()
    ):
        raise ConfigError(f"{both} are the same metric with different options: {rule}")
