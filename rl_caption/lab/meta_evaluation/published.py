"""Agreement of metrics with people that papers print, to stand beside measured figures.

Source: capevalkit 0.1.3, ``benchmarks/expected``, which names the paper of every value: PAC-S's released output for
BLEU-4, ROUGE-L, METEOR and CIDEr on Flickr8k, arXiv:2512.21582 Table 1, and the papers of the metrics themselves. Of
CLIPScore and PAC-S, CLIP ViT-B/32.
"""

import re
from collections.abc import Iterable

METRICS = {
    **{
        "BLEU-4": "bleu4",
        "ROUGE-L": "rougel",
        "METEOR": "meteor",
        "CIDEr": "cider",
        "SPICE": "spice",
    },
    **{
        "CLIPScore": "clipscore",
        "RefCLIPScore": "refclipscore",
        "PAC-S": "pacs",
        "RefPAC-S": "refpacs",
    },
    **{
        "Polos": "polos",
        "FLEUR": "fleur",
        "RefFLEUR": "reffleur",
        "EXPERT": "expert",
        "VELA": "vela",
    },
}
"""Metric -> its heading in lower case, without anything but letters and digits."""
RATED = ("flickr8k_expert", "flickr8k_crowdflower", "composite", "polaris", "nebula")
"""The columns of the table below: Kendall's tau_c, of ``flickr8k_crowdflower`` tau_b, times 100."""
_TABLE: dict[str, tuple[float | None, ...]] = {
    "BLEU-4": (30.8, 16.9, 30.6, 46.3, 44.1),
    "ROUGE-L": (32.3, 19.9, 32.4, 46.3, 43.4),
    "METEOR": (41.8, 22.3, 38.9, 51.2, 47.6),
    "CIDEr": (43.9, 24.6, 37.7, 52.1, 48.8),
    "SPICE": (44.9, 24.4, 40.3, 51.0, 47.4),
    "CLIPScore": (51.2, 34.4, 53.8, 52.3, 47.9),
    "RefCLIPScore": (53.0, 36.4, 55.4, 52.3, 46.9),
    "PAC-S": (54.3, 36.0, 55.7, 52.5, 48.3),
    "RefPAC-S": (55.9, 37.6, 57.3, 56.0, 50.6),
    "Polos": (56.4, 37.8, 57.6, 57.8, 55.0),
    "FLEUR": (53.0, 38.6, 63.5, None, None),
    "RefFLEUR": (51.9, 38.8, 64.2, None, None),
    "EXPERT": (56.7, 39.3, 65.0, 61.1, 54.9),
}
_VELA = {
    "dci_val": {"desc": 56.4, "rel": 40.0, "flu": 57.4},
    "dci_test": {"desc": 54.0, "rel": 52.3, "flu": 39.0},
}
"""VELA's own tau_c on LongCap-Arena, TestA and TestB."""
PUBLISHED: dict[str, dict[str, float]] = {
    **{
        benchmark: {
            metric: value for metric, row in _TABLE.items() if (value := row[index]) is not None
        }
        for index, benchmark in enumerate(RATED)
    },
    **{
        f"longcap_arena {split}.{aspect}": {"VELA": value}
        for split, values in _VELA.items()
        for aspect, value in values.items()
    },
}
"""Set of judgements (``RatedCaptions.benchmark``) -> metric -> the figure that papers print for the set, times 100."""


def published_figures(benchmark: str | None, headings: Iterable[str]) -> dict[str, float]:
    """The published figure (times 100) of each heading that names one of ``METRICS`` for the set ``benchmark``."""
    figures = {
        METRICS[metric]: value for metric, value in PUBLISHED.get(benchmark or "", {}).items()
    }
    plain = {heading: re.sub(r"[^a-z0-9]", "", heading.lower()) for heading in headings}
    return {heading: figures[name] for heading, name in plain.items() if name in figures}
