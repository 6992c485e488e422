"""Held-out judges: scores that are not in the reward, which show whether the reward is
being hacked.
"""

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
    """CIDEr-D if no term of ``reward`` counts n-grams, else ROUGE-L and BLEU-4, without
    metrics that are its terms.
    """
    leaves = list(leaf_rewards(reward))
    unused = {
        name
        for name, metric in N_GRAM_JUDGES.items()
        if not any(isinstance(score, metric) for score in leaves)
    }
    if len(unused) == len(N_GRAM_JUDGES):
        return {"cider": JudgeConfig()}
    targets = {"rouge_l": None, "bleu4": "bleu"}
    return {
        name: JudgeConfig(target=target)
        for name, target in targets.items()
        if name in unused
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
        judges: name -> configuration; None takes ``default_judges``. ``cider`` has the
            document frequencies of ``references`` and no EOS, as ``val/cider`` has,
            unless its arguments say otherwise.
        reward: reward of the run; a judge may not be one of its terms. None where
            captions are judged after training.
        references: references of every validation image.
        key: dotted name of ``judges`` in the configuration, for messages.
        tokenizer: ``data.tokenizer``, for judges whose arguments do not name another.

    Raises:
        ConfigError: an unknown judge or argument, or a judge that is no independent
            measure: it is a term of the reward, the same metric with other arguments
            (CIDEr-D with another EOS setting), or uses the same encoder (CLIPScore with
            another w) or language model.
    """
    if judges is None:
        judges = default_judges(reward) if reward is not None else {}
    terms = reward.rewards if reward is not None else {}
    builder = RewardBuilder(references, tokenizer)
    built = {}
    for name, judge in judges.items():
        with config_errors(f"{key}.{name}"):
            built[name] = builder.build(judge.target or name, judge.kwargs)
        for term, used in terms.items():
            for one, other in product(leaf_rewards(built[name]), leaf_rewards(used)):
                if (what := _dependence(one, other)) is not None:
                    raise ConfigError(
                        f"{key}.{name} ({one.signature}) and the reward's term "
                        f"{term!r} ({other.signature}) {what}: a judge must be "
                        "independent of the reward"
                    )
    return built


def _dependence(judge: Reward, used: Reward) -> str | None:
    """Reason why a judge rises with a term of the reward; None if it is independent.
    Other arguments do not make a metric another measure.
    """
    if used.signature == judge.signature:
        return "are the same score"
    if isinstance(judge, ClipScore) and isinstance(used, ClipScore):
        one, other = judge.backbone.encoder, used.backbone.encoder
        same = one.fingerprint == other.fingerprint
        if isinstance(one, FrozenEncoder) and isinstance(other, FrozenEncoder):
            # perhaps in another precision
            same |= (one.name, one.pretrained) == (other.name, other.pretrained)
        if same:
            return "use the same encoder"
    models = [getattr(score, "language_model", None) for score in (judge, used)]
    signatures = [getattr(model, "signature", None) for model in models]
    if None not in signatures and signatures[0] == signatures[1]:
        return "ask the same model"
    for metric in N_GRAM_JUDGES.values():
        if isinstance(judge, metric) and isinstance(used, metric):
            return "are the same metric with different options"
    return None
