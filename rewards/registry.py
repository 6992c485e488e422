"""Rewards by name. A module is imported when its reward is loaded, so listing names
imports nothing.

A reward of this package is one line in ``REWARDS``. A reward from outside needs no
line: its name is ``package.module:Class``.
"""

import inspect
from typing import Any

from rewards.base import Reward, naming
from rewards.options import load_target

REWARDS: dict[str, str] = {
    "bertscore": "rewards.text.bertscore:BertScore",
    "bleu": "rewards.text.bleu:Bleu",
    "caption_qa": "rewards.language.caption_qa:CaptionQA",
    "cider": "rewards.text.cider:CiderD",
    "claims": "rewards.language.claims:Claims",
    "clipscore": "rewards.clip.clipscore:ClipScore",
    "consensus": "rewards.text.diversity:Consensus",
    "diversity": "rewards.text.diversity:Diversity",
    "emscore": "rewards.clip.emscore:EmScore",
    "icc": "rewards.text.icc:Icc",
    "l_clipscore": "rewards.clip.l_clipscore:LClipScore",
    "pac_s": "rewards.clip.pac:PacScore",
    "pac_s_video": "rewards.clip.pac:PacVideoScore",
    "perplexity": "rewards.text.perplexity:Perplexity",
    "ref_clipscore": "rewards.clip.clipscore:RefClipScore",
    "ref_emscore": "rewards.clip.emscore:RefEmScore",
    "ref_l_clipscore": "rewards.clip.l_clipscore:RefLClipScore",
    "ref_pac_s": "rewards.clip.pac:RefPacScore",
    "ref_pac_s_video": "rewards.clip.pac:RefPacVideoScore",
    "repetition": "rewards.text.degeneration:Repetition",
    "rouge_l": "rewards.text.rouge:RougeL",
    "specs": "rewards.clip.specs:Specs",
    "vlm_judge": "rewards.language.judge:VlmJudge",
}
"""Name -> ``module:Class``."""
COLUMNS = ("references", "image_id", "image", "finished")
"""Columns that every reward gets from this package's trainer, and has to take."""
_PAC = "https://drive.google.com/drive/folders/15Da_nh7CYv8xfryIdETG6dPFSqcBiqpd"
_PAC_PLUS = "https://ailb-web.ing.unimore.it/publicfiles/pac++"
ADDRESSES = {
    "clip_ViT-B-32.pth": _PAC,
    "openClip_ViT-L-14.pth": _PAC,
    "PAC++_clip_ViT-B-32.pth": f"{_PAC_PLUS}/PAC++_clip_ViT-B-32.pth",
    "PAC++_clip_ViT-L-14.pth": f"{_PAC_PLUS}/PAC++_clip_ViT-L-14.pth",
    "spec.pt": "https://huggingface.co/Xiaohud/SPECS",
    "openai_b32_longclip.pt": "https://huggingface.co/Xiaohud/SPECS",
}
"""Released checkpoint file -> where its authors put it."""
CHECKPOINTS = (".pt", ".pth", ".bin", ".safetensors", ".npz")
"""Endings of checkpoint files; a tag of open_clip has none."""


def available() -> list[str]:
    """The names of the rewards of this package, sorted."""
    return sorted(REWARDS)


def build(name: str, **kwargs: Any) -> Reward:
    """Construct the reward ``name`` (one of ``available()``, or
    ``package.module:Class``) with ``kwargs``.

    Raises:
        ValueError: the name is unknown, the target cannot be imported or is no reward,
            an argument is unknown or missing, or bounds or arguments of the call are
            wrong. What the constructor raises is passed on.
    """
    target = load(name)
    signature = inspect.signature(target)
    with naming(f"reward {name!r} takes {signature}", (TypeError,)):
        signature.bind(**kwargs)
    reward = target(**kwargs)
    if not isinstance(reward, Reward):
        raise ValueError(
            f"{name!r} made a {type(reward).__name__}, which is not a reward: it needs __name__, "
            f"columns, bounds, signature and __call__(prompts, completions, **columns)"
        )
    with naming(f"{name!r} has the bounds {reward.bounds!r}", (TypeError, ValueError)):
        low, high = reward.bounds
        if not low <= high:
            raise ValueError("expected its smallest and largest score")
    call = f"{name!r} cannot be called as (prompts, completions, **columns)"
    columns = dict.fromkeys((*COLUMNS, *reward.columns))
    with naming(call, (TypeError,)):
        inspect.signature(reward.__call__).bind(None, [], **columns)
    return reward


def short_name(name: str) -> str:
    """The name in ``REWARDS`` of a reward given as ``module:Class``; any other name is
    returned unchanged.
    """
    return next((entry for entry, target in REWARDS.items() if target == name), name)


def parameters(name: str) -> list[str]:
    """The names of the arguments of a reward. Raises as ``load``."""
    return list(inspect.signature(load(name)).parameters)


def first_paragraph(target: Any) -> str:
    """The first paragraph of a docstring in one line."""
    text = inspect.getdoc(target) or "no description"
    return " ".join(text.split("\n\n")[0].split())


def load(name: str) -> Any:
    """Import and return the class behind a name.

    Raises:
        ValueError: the name is unknown, or the target cannot be imported or called.
    """
    return load_target(name, "reward", REWARDS)
