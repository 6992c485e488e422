"""Dual encoders on long descriptions: specificity rates, agreement with the truth by length, retrieval and hubness.

python -m benchmarks.studies.specificity_study --data configs/scenes_long_xe.yaml --split test \
    --models contrastive=runs/scenes/long_contrastive SPECS=runs/scenes/long_specificity --out runs/results/specificity

A model is the folder of an exported model, or of a run (its best export). The tables are printed and written to
OUT/specificity.md and, unrounded, OUT/specificity.json; docs/judging.md explains them. Rows need ``long_reference``;
only scenes of the generated world have a truth to agree with.
"""

import argparse
import json
import logging
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from scipy.stats import skew
from torch import Tensor
from torch.nn.functional import normalize
from tqdm.auto import tqdm

from rewards.base import Reward
from rewards.clip.backbone import FrozenEncoder, load_frozen_encoder
from rewards.clip.encoder import CachedEncoder
from rewards.registry import build
from rewards.text.concreteness import CaptionLength
from rl_caption.cli.configuration import parse
from rl_caption.cli.main import log_lines
from rl_caption.config.build import build_data, quiet_libraries, usable_split
from rl_caption.config.evaluation import EvaluateConfig
from rl_caption.config.schema import DataConfig
from rl_caption.data.base import DataError, Row
from rl_caption.data.files import write_json, write_text
from rl_caption.data.plain_files import read_yaml
from rl_caption.data.scenes import hard_negatives, oracle
from rl_caption.data.scenes.world import Draws
from rl_caption.evaluation import check_writable
from rl_caption.evaluation.retrieval import retrieval_recall
from rl_caption.lab.meta_evaluation.correlation import (
    UndefinedCorrelation,
    grouped_tau_b,
    kendall_tau_b,
)
from rl_caption.lab.meta_evaluation.figures import UNDEFINED, markdown
from rl_caption.lab.meta_evaluation.specificity import (
    Chain,
    ChainScores,
    make_chains,
    released_specificity_rates,
    score_chains,
    specificity_rates,
)
from rl_caption.lab.retrieval import WAYS, texts_of
from rl_caption.runtime.errors import ConfigError, config_errors, user_errors

logger = logging.getLogger(__name__)

EDGES = (0, 10, 20, 30, 45)
"""Fewest words of each bin: 0 to 9, 10 to 19, 20 to 29, 30 to 44, 45 and more."""
RECALLS = {f"{way}_r{k}": f"{name} R@{k}, %" for way, name in WAYS.items() for k in (1, 5, 10)}
"""Key of ``retrieval_recall`` -> heading."""


def reference_metrics(names: Sequence[str]) -> dict[str, Reward]:
    """Build n-gram metrics by their names in the registry; CIDEr-D without EOS.

    Raises:
        ConfigError: an unknown name, or a metric that needs more than references.
    """
    with config_errors("--metrics"):
        built = [build(name, **({"eos": False} if name == "cider" else {})) for name in names]
    for metric in built:
        if not metric.columns <= {"references"}:
            raise ConfigError(
                f"--metrics: metric {metric.__name__!r} needs {', '.join(sorted(metric.columns))}: only metrics of "
                "references alone are asked for by name; scores of a model come with the model"
            )
    return {metric.__name__: metric for metric in built}


def percent(value: float | None) -> str:
    """Times 100, as papers print correlations and accuracies."""
    return UNDEFINED if value is None else f"{100 * value:.1f}"


def data_section(path: Path) -> DataConfig:
    """The ``data`` section of a configuration file of any program."""
    content = read_yaml(path, ConfigError)
    if "data" not in content:
        raise ConfigError(f"--data {path} has no section 'data'")
    return parse(EvaluateConfig, [f"--data={json.dumps(content['data'])}"], "evaluate").data


def load_models(labelled: Sequence[str], device: str) -> dict[str, FrozenEncoder]:
    """Load models given as ``LABEL=FOLDER``: a folder with an exported model, or with a run (its best export)."""
    models: dict[str, FrozenEncoder] = {}
    for label, _, name in (argument.partition("=") for argument in labelled):
        best = Path(name) / "export" / "best"
        folder = best if best.is_dir() else Path(name)
        if not label or not folder.is_dir() or label in models:
            raise ConfigError(
                f"--models {label}={name}: expected LABEL=FOLDER, different labels, folders of models"
            )
        with config_errors(f"--models {label}"):
            models[label] = load_frozen_encoder(str(folder), device=device)
    return models


class RatedCaption(NamedTuple):
    """A caption, the number of its row, and its oracle F1, in [0, 1]."""

    row: int
    text: str
    f1: float


def rated_captions(
    rows: Sequence[Row], chains: Sequence[Chain | None], seed: int = 0
) -> list[RatedCaption]:
    """Rate true and false captions of growing length by the oracle.

    The captions of a row are those of its chain (its long description cut short after each detail, and the same with a
    detail of another scene) and one hard negative of each true one, of a kind drawn at random. A text that occurs twice
    is rated once.
    """
    found: list[RatedCaption] = []
    pairs = list(zip(rows, chains, strict=True))
    for number, (row, chain) in enumerate(
        tqdm(pairs, desc="rating captions", unit="scene", delay=2, disable=None)
    ):
        if chain is None:
            continue
        draws = Draws("grown", seed, row["image_id"])
        texts = [*chain.captions, *chain.negatives]
        for text in chain.captions:
            negatives = [negative for _, negative in hard_negatives(row["scene"], text, seed)]
            texts += [draws.choice(negatives)] if negatives else []
        found += [
            RatedCaption(number, text, oracle(text, row["scene"]).f1)
            for text in dict.fromkeys(texts)
        ]
    return found


class LengthBin(NamedTuple):
    """How well a metric agrees with oracle F1 among captions of similar length; None where that is undefined."""

    low: int
    """Fewest words."""
    high: int | None
    """Most words; None for the last bin, which has no upper end."""
    captions: int
    tau_b: float | None
    """Kendall's tau_b over all captions of the bin, in [-1, 1]."""
    within_scene_tau_b: float | None
    """tau_b among the captions of one scene, averaged over ``scenes`` scenes, in [-1, 1]."""
    scenes: int


def tau_by_length(
    scores: Sequence[float], captions: Sequence[RatedCaption], edges: Sequence[int] = EDGES
) -> list[LengthBin]:
    """Compare [N] scores with oracle F1 in bins of words, and at last over all lengths.

    ``edges`` are the fewest words of each bin. A longer part of a description tells more, so a metric that pays for
    length alone agrees well over all lengths, and less within a bin. Compare its tau with that of the number of words.
    """
    numbers = [bisect_right(edges, len(caption.text.split())) - 1 for caption in captions]

    def agreement(low: int, high: int | None, members: Sequence[int]) -> LengthBin:
        own, f1 = [scores[index] for index in members], [captions[index].f1 for index in members]
        tau, within, scenes = None, None, 0
        try:
            if len(own) > 1:
                tau = kendall_tau_b(own, f1)
                grouped = grouped_tau_b(own, f1, [captions[index].row for index in members])
                within, scenes = grouped.mean, grouped.groups
        except UndefinedCorrelation:
            pass  # what is not defined stays None
        return LengthBin(low, high, len(own), tau, within, scenes)

    ends = [*(edge - 1 for edge in edges[1:]), None]
    bins = [
        agreement(low, high, [index for index, number in enumerate(numbers) if number == own])
        for own, (low, high) in enumerate(zip(edges, ends, strict=True))
    ]
    return [*bins, agreement(0, None, range(len(captions)))]


class Hubness(NamedTuple):
    """How unevenly M candidates occur among the k nearest of N queries."""

    skewness: float
    """Of the numbers of occurrences N_k (Radovanovic et al., JMLR 2010); 0 is even, above 1 is hubs."""
    never: float
    """Share of candidates that occur nowhere, in [0, 1]."""
    largest: float
    """Share of queries whose k nearest include the most frequent candidate, in [0, 1]."""


@torch.no_grad()
def hubness(queries: Tensor, candidates: Tensor, k: int = 10, chunk_size: int = 512) -> Hubness:
    """Count how often each of M ``candidates`` [M, D] is among the k < M nearest, by cosine, of ``queries`` [N, D]."""
    candidates = normalize(candidates.float(), dim=1)
    counts = torch.zeros(len(candidates), dtype=torch.long, device=candidates.device)
    for chunk in normalize(queries.float(), dim=1).split(chunk_size):
        nearest = (chunk @ candidates.T).topk(k, dim=1).indices
        counts += torch.bincount(nearest.flatten(), minlength=len(candidates))
    occurrences = counts.cpu().numpy()
    skewness = float(skew(occurrences)) if len(set(occurrences.tolist())) > 1 else 0.0
    return Hubness(
        skewness, float((occurrences == 0).mean()), float(occurrences.max()) / len(queries)
    )


class SpecificityStudy:
    """Scores metrics and models on the long descriptions of one split.

    ``metrics`` has the signature of each metric, its specificity rates (by the equations, and for cosines also by the
    ``released`` estimator) and its agreement by length. ``models`` has the recall of each model, in [0, 1], with long
    descriptions (``long``) and references (``short``) as texts, its hubness in both directions, and the number of texts
    that it cuts.

    Args:
        rows: rows with ``long_reference``; agreement with the truth also needs ``scene``.
        seed: of the negatives that are drawn.
        processes: how many cut descriptions into units.

    Raises:
        DataError: a row has no long description, or no description has two units.
    """

    def __init__(self, rows: Sequence[Row], seed: int = 0, processes: int = 1) -> None:
        for row in rows:
            if not row.get("long_reference"):
                raise DataError(
                    f"image {row['image_id']!r} has no long_reference: the study needs one for each image"
                )
        # With data.long_captions the references are the descriptions, and what they were is short_references.
        self.rows: list[Row] = [
            {**row, "references": row.get("short_references", row["references"])} for row in rows
        ]
        self.descriptions = [row["long_reference"] for row in self.rows]
        ids = [row["image_id"] for row in rows]
        chains = make_chains(self.descriptions, seed, image_ids=ids, processes=processes)
        self.kept = [number for number, chain in enumerate(chains) if chain is not None]
        if not self.kept:
            raise DataError(
                f"none of {len(self.rows)} long descriptions has two detail units and a negative"
            )
        self.chains: list[Chain] = [chain for chain in chains if chain is not None]
        known = all(row.get("scene") is not None for row in self.rows)
        self.captions = rated_captions(self.rows, chains, seed) if known else []
        self.metrics: dict[str, dict[str, Any]] = {}
        self.models: dict[str, dict[str, Any]] = {}

    def add_metric(self, name: str, metric: Reward, cosines: bool = False) -> None:
        """Score all captions by a metric. ``cosines``: its scores are (cosine + 1) / 2.

        Raises:
            RewardError: the metric cannot score a caption.
        """
        logger.info("scoring %d descriptions by %s", len(self.chains), name)
        scores = score_chains(metric, self.chains, self._columns(self.kept))
        released = None
        if cosines:
            raw = [
                ChainScores(*([2 * score - 1 for score in part] for part in chain))
                for chain in scores
            ]
            try:
                released = released_specificity_rates(raw)
            except ValueError as error:
                logger.info("%s: the released estimator is not defined: %s", name, error)
        lengths = []
        if self.captions:
            columns = self._columns([caption.row for caption in self.captions])
            own = metric(None, [caption.text for caption in self.captions], **columns)
            lengths = tau_by_length(own, self.captions)
        rates = specificity_rates(scores)
        found = {"rates": rates, "released": released, "lengths": lengths}
        self.metrics[name] = {"signature": metric.signature, **found}

    def add_model(self, label: str, backbone: FrozenEncoder) -> None:
        """Score by SPECS over a dual encoder, and measure its retrieval and hubness.

        Raises:
            RewardError: an image cannot be read.
            DataError: an image has no reference.
        """
        encoder = CachedEncoder(backbone)
        specs = build("specs", backbone=encoder, scale="shifted", truncate=True)
        self.add_metric(f"specs of {label}", specs, cosines=True)
        images = torch.from_numpy(encoder.embed_images([row["image"] for row in self.rows]))
        long = backbone.encode_texts(self.descriptions)
        shorts, owners = texts_of(self.rows)["references"]
        distinct = long[
            [self.descriptions.index(text) for text in dict.fromkeys(self.descriptions)]
        ]
        nearest = min(10, len(distinct) - 1)
        texts = {text for chain in self.chains for part in chain for text in part} | set(
            self.descriptions
        )
        self.models[label] = {
            "signature": backbone.signature,
            "long": retrieval_recall(images, long, range(len(images))),
            "short": retrieval_recall(images, backbone.encode_texts(shorts), owners),
            "text_hubs": hubness(images, distinct, nearest),
            "image_hubs": hubness(long, images, nearest),
            "truncated": backbone.too_long(list(texts)),
        }

    def _columns(self, numbers: Sequence[int]) -> dict[str, list[Any]]:
        rows = [self.rows[number] for number in numbers]
        return {name: [row[name] for row in rows] for name in ("image", "image_id", "references")}

    def markdown(self) -> str:
        """Return the tables as text."""
        steps = next(iter(self.metrics.values()))["rates"].steps if self.metrics else 0
        parts = [
            f"Specificity over {steps} details of {len(self.chains)} long descriptions",
            self._rates(),
        ]
        if self.captions:
            title = f"Agreement with oracle F1 over {len(self.captions)} captions: Kendall's tau_b, by number of words"
            parts += [title, self._lengths(lambda own: (own.captions, own.tau_b))]
            parts += ["The same within scenes: mean tau_b among the captions of one scene"]
            parts += [self._lengths(lambda own: (own.scenes, own.within_scene_tau_b))]
        if self.models:
            parts += [f"Retrieval among {len(self.rows)} images", self._retrieval()]
            parts += ["Hubs: candidates among the 10 nearest (of all queries)", self._hubs()]
        parts += [
            "\n".join(f"- {name}: `{found['signature']}`" for name, found in self.metrics.items())
        ]
        return "\n\n".join(parts) + "\n"

    def _rates(self) -> str:
        """Specificity rates by the equations and as released."""
        head = [
            "metric",
            "SR_pos, %",
            "SR_neg, %",
            "released SR_pos, %",
            "released SR_neg, %",
            "of descriptions",
        ]
        lines = []
        for name, found in self.metrics.items():
            released = found["released"]
            own = [percent(rate) for rate in found["rates"][:2]]
            own += (
                [*map(percent, released[:2]), str(released.captions)]
                if released
                else [UNDEFINED] * 3
            )
            lines.append([name, *own])
        return markdown(head, lines)

    def _lengths(self, chosen: Callable[[LengthBin], tuple[int, float | None]]) -> str:
        """A column for each bin of words; ``chosen`` gives its count and its tau_b."""
        bins = next(iter(self.metrics.values()))["lengths"]
        words = [
            f"{own.low}+" if own.high is None else f"{own.low} to {own.high}" for own in bins[:-1]
        ]
        counts = [chosen(own)[0] for own in bins]
        head = [f"{name} ({count})" for name, count in zip([*words, "all"], counts, strict=True)]
        values = {
            name: [chosen(own)[1] for own in found["lengths"]]
            for name, found in self.metrics.items()
        }
        return markdown(
            ["metric, tau_b x100", *head],
            [[name, *map(percent, own)] for name, own in values.items()],
        )

    def _retrieval(self) -> str:
        lines = [
            [label, kind, *(percent(found[key][recall]) for recall in RECALLS)]
            for label, found in self.models.items()
            for kind, key in (("long descriptions", "long"), ("references", "short"))
        ]
        return markdown(["model", "texts", *RECALLS.values()], lines)

    def _hubs(self) -> str:
        head = [
            "model",
            "candidates",
            "skewness, 0 is even",
            "never near, %",
            "queries near the largest hub, %",
        ]
        lines = [
            [
                label,
                kind,
                f"{hubs.skewness:.2f}",
                percent(hubs.never),
                percent(hubs.largest),
                str(found["truncated"]),
            ]
            for label, found in self.models.items()
            for kind, hubs in (
                ("long descriptions", found["text_hubs"]),
                ("images", found["image_hubs"]),
            )
        ]
        return markdown([*head, "texts cut"], lines)

    def content(self) -> dict[str, Any]:
        """Return everything as JSON: shares in [0, 1], tau in [-1, 1], nothing times 100."""
        content = {"images": len(self.rows), "captions": len(self.captions)}
        return plain(content | {"metrics": self.metrics, "models": self.models})


def plain(value: Any) -> Any:
    """Named tuples as dictionaries, at any depth."""
    if hasattr(value, "_asdict"):
        return plain(value._asdict())
    if isinstance(value, Mapping):
        return {key: plain(inner) for key, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, list) else value


def run(arguments: argparse.Namespace) -> None:
    """Compute, print and write all tables."""
    check_writable(arguments.out)
    models = load_models(arguments.models, arguments.device)
    metrics, data = reference_metrics(arguments.metrics), build_data(data_section(arguments.data))
    rows = list(data.split(usable_split(data, arguments.split))[: arguments.max_images])
    study = SpecificityStudy(rows, arguments.seed, arguments.processes)
    for name, metric in {"words": CaptionLength(), **metrics}.items():
        study.add_metric(name, metric)
    for label, backbone in models.items():
        study.add_model(label, backbone)
    settings = {
        key: str(value) if isinstance(value, Path) else value
        for key, value in vars(arguments).items()
    }
    text = study.markdown()
    write_text(arguments.out / "specificity.md", text)
    write_json(arguments.out / "specificity.json", {"arguments": settings, **study.content()})
    print(text)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", required=True, type=Path, help="YAML with a section 'data'")
    parser.add_argument("--split", default="test")
    parser.add_argument(
        "--models", nargs="+", required=True, metavar="LABEL=FOLDER", help="exported models or runs"
    )
    parser.add_argument(
        "--metrics", nargs="*", default=["cider", "rouge_l"], help="that need references only"
    )
    parser.add_argument("--max-images", type=int, help="the first so many images of the split")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn: samples, negatives")
    parser.add_argument("--out", required=True, type=Path, help="folder of the tables")
    parser.add_argument("--processes", type=int, default=1, help="that cut descriptions into units")
    arguments = parser.parse_args()
    if arguments.max_images is not None and arguments.max_images < 3:
        parser.error(f"--max-images {arguments.max_images}: expected at least 3")
    if arguments.processes < 1:
        parser.error(f"--processes {arguments.processes}: expected at least 1")
    quiet_libraries()
    with log_lines(), user_errors():  # as programs of the package run
        run(arguments)


if __name__ == "__main__":
    main()
