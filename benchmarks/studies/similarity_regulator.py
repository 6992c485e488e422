"""The Similarity Regulator (SR) of L-CLIP on Flickr8k: stage 2 at several of its weights, all from one stage 1.

    python -m benchmarks.studies.similarity_regulator --texts frozen open --seeds 0 1 2 --out runs/flickr8k/sr

Needs what ``configs/reward_models/flickr8k_lclip.yaml`` trains before stage 2 (docs/flickr8k.md). A student is judged
as it is after its last step, on the test photos, which no model saw: agreement with people, recall at 1 among 1,000
photos, cosine to the teacher, and the cosines of matching and of other pairs, which SR is to move apart. Intervals are
of 95 %: photos are drawn with replacement, the same ones for all students, and a difference from the weight 0 is the
mean of the seeds' differences. Finished runs are kept, an interrupted one is resumed; several processes may train
different ``--texts``, ``--weights`` and ``--seeds`` into one folder. OUT/tables.md has the tables, and figures.json of
a run's folder its figures.

    python -m benchmarks.studies.similarity_regulator --only captioners --captioner runs/flickr8k/xe/export/best \
        --judge runs/flickr8k/judge/export/best --texts frozen --weights 0 10/3 sum --out runs/flickr8k/sr

trains that captioner by SCST on the paper's mixture under each student, and compares the captions of the test photos:
CIDEr, and L-CLIPScore and RefL-CLIPScore of a judge that no reward saw. OUT/captioners.md has the tables.
"""

import argparse
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

from benchmarks.studies.main_job import run_module
from rewards.clip.backbone import FrozenEncoder, load_frozen_encoder
from rewards.clip.clipscore import PREFIX
from rewards.clip.encoder import CachedEncoder, DualEncoder
from rewards.clip.l_clipscore import LClipScore, RefLClipScore
from rewards.images import ImageSource
from rewards.trust import trust
from rl_caption.data.base import Row, reward_inputs
from rl_caption.data.files import read_captions
from rl_caption.data.karpathy import KarpathyData
from rl_caption.evaluation.confidence import ENDS, drawn_weights
from rl_caption.evaluation.metrics import evaluate_captions
from rl_caption.evaluation.results import markdown
from rl_caption.evaluation.retrieval import both_ways
from rl_caption.lab.meta_evaluation import sets
from rl_caption.lab.meta_evaluation.correlation import tau_of_table
from rl_caption.lab.meta_evaluation.sets import RatedCaptions
from rl_caption.reward_models.losses import cosine_matrix

RECIPE = "configs/reward_models/flickr8k_lclip.yaml"
SCST_RECIPE = "configs/flickr8k_scst_mix.yaml"
OBJECTIVES = {
    "REINFORCE": [],
    "DiCO": [
        "--train.objective=dico",
        "--train.objective_kwargs={temperature: 0.0333}",
        "--rollout.beam_search=true",
    ],
}
"""Objective of SCST -> overrides."""
ENCODER = "benchmarks.studies.efficientnet_lite:EfficientNetLite"
"""The frozen image encoder of that recipe, whose code is trusted."""
AS_PRINTED = [
    "--loss.l1=0.5",
    "--loss.cosine=0.5",
    "--loss.regulator=1",
    "--loss.regulator_reduction=sum",
]
WEIGHTS = {
    **{name: [f"--loss.regulator={value!r}"] for name, value in
       {"0": 0.0, "1/30": 1 / 30, "1/3": 1 / 3, "1": 1.0, "10/3": 10 / 3}.items()},
    "sum": AS_PRINTED,
}  # fmt: skip
"""Name -> overrides. 1/30 is in the branch ``main`` of the authors' code, 10/3 in that with the paper's stage 2;
``sum`` is equations (1) and (2) of the paper as printed, without weights."""
TEXTS = {"frozen": "true", "open": "false"}
"""Text tower in stage 2 -> ``train.freeze_text``."""
AGREEMENT = {
    "flickr8k_expert": ("Expert tau_c", 1),
    "flickr8k_crowdflower": ("CrowdFlower tau_b", 0),
}
"""Set of judgements -> heading, position of the published figure in ``tau_of_table``."""
SCORES: dict[str, type[LClipScore]] = {"L-CLIPS": LClipScore, "RefL-CLIPS": RefLClipScore}
WITH_PREFIX = ", prefix"
TAUS = [f"{score}, {heading}" for heading, _ in AGREEMENT.values() for score in SCORES]
COSINES = ["cosine image", "cosine text"]
OF_CAPTIONS = ["CIDEr", "judge", "Ref judge"]
SIMILARITIES = [
    "positive mean",
    "positive sd",
    "shortfall",
    "negative mean",
    "negative sd",
    "excess",
]


def folder_of(out: Path, text: str, weight: str, seed: int) -> Path:
    """Where a student's run lies."""
    return out / text / f"sr_{weight.replace('/', '_')}" / f"seed{seed}"


def train(arguments: argparse.Namespace, changes: Sequence[str]) -> None:
    """Train the students that are not there yet."""
    for seed in arguments.seeds:
        for text in arguments.texts:
            for weight in arguments.weights:
                folder = folder_of(arguments.out, text, weight, seed)
                if not (folder / "result.json").is_file():
                    words = [
                        *WEIGHTS[weight],
                        f"--train.freeze_text={TEXTS[text]}",
                        f"--train.seed={seed}",
                        *changes,
                    ]
                    run_module(
                        "rl_caption",
                        "reward_model",
                        "--config",
                        RECIPE,
                        f"--run.dir={folder}",
                        *words,
                    )


class Photos:
    """The test photos: grids of the frozen image encoder, captions, and the teacher's embeddings of both."""

    def __init__(self, data: str, features: str, teacher: str) -> None:
        rows = KarpathyData(data, "images", features_root=features).split("test")
        self.place = {Path(str(row["image"])).name: number for number, row in enumerate(rows)}
        self.grids = torch.stack([torch.from_numpy(row["features"].load()) for row in rows]).float()
        self.captions = [caption for row in rows for caption in row["references"]]
        self.owners = np.array(
            [number for number, row in enumerate(rows) for _ in row["references"]]
        )
        encoder = load_frozen_encoder(teacher)
        network: Any = encoder.model
        with torch.no_grad():
            images = torch.cat([network.project_image(batch) for batch in self.grids.split(100)])
        self.teacher = {
            "image": images,
            "text": encoder.encode_texts(self.captions, normalize=False),
        }

    def similarities(self, images: Tensor, texts: Tensor) -> dict[str, float]:
        """``SIMILARITIES`` of embeddings [N, D] of the photos and [M, D] of their captions, matching pairs and others.

        ``shortfall`` and ``excess`` are the two means that SR adds up: how far matching pairs are below the teacher's
        cosine, and other pairs above it.
        """
        matrix, expected = (
            cosine_matrix(*pair).double().numpy()
            for pair in ((images, texts), self.teacher.values())
        )
        matching = np.arange(len(matrix))[:, None] == self.owners
        moved = matrix - expected
        values = [
            matrix[matching].mean(),
            matrix[matching].std(),
            np.maximum(-moved[matching], 0).mean(),
        ]
        values += [
            matrix[~matching].mean(),
            matrix[~matching].std(),
            np.maximum(moved[~matching], 0).mean(),
        ]
        return dict(zip(SIMILARITIES, map(float, values), strict=True))


class Student:
    """A student as a ``DualEncoder`` that embeds the test photos from their grids, and every text once."""

    embedded: ClassVar[dict[str, dict[str, Tensor]]] = {}
    """Hash of a text tower, which all students have in common where it is frozen -> text -> embedding."""

    def __init__(self, folder: Path, photos: Photos) -> None:
        self.encoder: FrozenEncoder = load_frozen_encoder(str(folder / "export" / "last"))
        self.fingerprint, self.signature = self.encoder.fingerprint, self.encoder.signature
        self.context_length, self.count_tokens = (
            self.encoder.context_length,
            self.encoder.count_tokens,
        )
        network: Any = self.encoder.model
        digest = hashlib.sha256()
        for weight in network.text.state_dict().values():
            digest.update(weight.numpy().tobytes())
        self.texts, self.place = self.embedded.setdefault(digest.hexdigest(), {}), photos.place
        batches = photos.grids.split(100)
        self.photos = torch.cat(
            [self.encoder.encode_pixels(batch, normalize=False) for batch in batches]
        )

    def encode_images(self, images: Sequence[ImageSource]) -> Tensor:
        """As ``DualEncoder``."""
        return normalize(
            self.photos[[self.place[Path(str(image)).name] for image in images]], dim=-1
        )

    def encode_texts(self, texts: Sequence[str]) -> Tensor:
        """As ``DualEncoder``."""
        missing = [text for text in dict.fromkeys(texts) if text not in self.texts]
        self.texts.update(zip(missing, self.encoder.encode_texts(missing), strict=True))
        return torch.stack([self.texts[text] for text in texts])


@dataclass
class Figures:
    """What is measured of one student: values, and the values of resamples where they are an estimate from photos."""

    values: dict[str, float] = field(default_factory=dict)
    resamples: dict[str, list[float]] = field(default_factory=dict)


def agreement(
    judgements: RatedCaptions, metric: LClipScore, position: int, resamples: int
) -> tuple[float, list[float]]:
    """tau_b (``position`` 0) or tau_c (1) of a score with people's ratings, and of every resample of photos."""
    assert judgements.images is not None
    assert judgements.references is not None
    rows = list(
        zip(
            map(str, judgements.images),
            judgements.captions,
            map(tuple, judgements.references),
            strict=True,
        )
    )
    distinct, scores = list(dict.fromkeys(rows)), list[float]()
    for start in range(0, len(distinct), 4000):
        images, captions, references = zip(*distinct[start : start + 4000], strict=True)
        scores += metric(None, captions, image=images, references=references, image_id=images)
    score_of = dict(zip(distinct, scores, strict=True))
    levels, ranks = np.unique([score_of[row] for row in rows], return_inverse=True)
    rated, ratings = np.unique(judgements.ratings, return_inverse=True)
    cells, shape = ratings * len(levels) + ranks, (len(rated), len(levels))

    def tau(weights: Any = None) -> float:
        return tau_of_table(np.bincount(cells, weights, len(rated) * len(levels)).reshape(shape))[
            position
        ]

    return tau(), [
        tau(weights) for weights in drawn_weights(judgements.image_ids, resamples, seed=0)
    ]


def measure(
    folder: Path,
    photos: Photos,
    judged: dict[str, RatedCaptions],
    resamples: int,
    with_prefix: bool,
) -> Figures:
    """All figures of the student of a run; ``with_prefix`` adds those of the scores with CLIPScore's prefix."""
    student, figures = Student(folder, photos), Figures()
    texts = student.encode_texts(photos.captions)
    for name, embedded in (("image", student.photos), ("text", texts)):
        figures.values[f"cosine {name}"] = float(
            cosine_similarity(embedded, photos.teacher[name]).mean()
        )
    figures.values |= photos.similarities(student.photos, texts)
    ranked = both_ways(student.photos, texts, photos.owners, [1])
    hits = np.stack(
        [ranked["i2t"][:, 1], ranked["t2i"][:, 1].reshape(len(photos.place), -1).mean(axis=1)]
    ).mean(axis=0)
    figures.values["R@1"] = float(hits.mean())
    drawn = drawn_weights(range(len(hits)), resamples, seed=0)
    figures.resamples["R@1"] = [float((hits * weights).mean()) for weights in drawn]
    for name, judgements in judged.items():
        heading, position = AGREEMENT[name]
        for score, score_class in SCORES.items():
            for suffix, prefix in (
                {"": "", WITH_PREFIX: PREFIX} if with_prefix else {"": ""}
            ).items():
                key = f"{score}, {heading}{suffix}"
                tau = agreement(
                    judgements,
                    score_class(CachedEncoder(student), prefix=prefix),
                    position,
                    resamples,
                )
                figures.values[key], figures.resamples[key] = tau
    return figures


def all_figures(
    arguments: argparse.Namespace, photos: Photos
) -> dict[tuple[str, str], list[Figures]]:
    """(text tower, weight) -> figures of its seeds; those of a run are kept in its folder."""
    judged = {name: sets.load(name, arguments.data)[0] for name in AGREEMENT}
    figures: dict[tuple[str, str], list[Figures]] = {}
    for text in arguments.texts:
        for weight in arguments.weights:
            for folder in sorted(folder_of(arguments.out, text, weight, 0).parent.glob("seed*")):
                file = folder / "figures.json"
                if (folder / "result.json").is_file() and not file.is_file():
                    figures_of_run = measure(
                        folder, photos, judged, arguments.resamples, weight == "0"
                    )
                    file.write_text(json.dumps(asdict(figures_of_run)))
                if file.is_file():
                    figures.setdefault((text, weight), []).append(
                        Figures(**json.loads(file.read_text()))
                    )
    return figures


def train_captioners(arguments: argparse.Namespace, changes: Sequence[str]) -> None:
    """Train and evaluate the captioners that are not there yet, in the folders of their students."""
    features = f"--data.features_root={arguments.features}"
    data, test = (
        [f"--data.path={arguments.data}", features],
        [f"--data.path={arguments.test_data}", features],
    )
    for seed in arguments.seeds:
        for text in arguments.texts:
            for weight in arguments.weights:
                student = folder_of(arguments.out, text, weight, seed)
                for objective, options in OBJECTIVES.items():
                    run = student / objective
                    if not (run / "result.json").is_file():
                        backbone = {
                            "backbone": f"{student}/export/last",
                            "cache_dir": f"{arguments.out}/cache",
                        }
                        mixture = {
                            "cider": {"weight": 0.5},
                            "ref_l_clipscore": {"weight": 0.5, "kwargs": backbone},
                        }
                        words = [
                            "--warm_start=null",
                            f"--model.init={arguments.captioner}",
                            "--reward_models=[]",
                        ]
                        words += [
                            f"--reward.terms={json.dumps(mixture)}",
                            f"--trust=[{ENCODER}]",
                            *options,
                            *data,
                        ]
                        words += [f"--train.seed={seed}", f"--run.dir={run}", *changes]
                        run_module("rl_caption", "scst", "--config", SCST_RECIPE, *words)
                    if not (run / "test" / "scores.json").is_file():
                        words = [
                            f"--model={run}/export/last",
                            "--decode.num_beams=5",
                            "--metrics=cider",
                            *test,
                        ]
                        words += [
                            "--data.format=karpathy",
                            "--data.image_root=images",
                            f"--out={run}/test",
                        ]
                        run_module("rl_caption", "evaluate", *words)


def captioner_figures(
    folder: Path, rows: Mapping[str, Row], scores: Mapping[str, LClipScore], resamples: int
) -> Figures:
    """Figures of the captions of an evaluation: ``OF_CAPTIONS``, words a caption and different words.

    Args:
        folder: of the evaluation, with ``predictions.json``.
        rows: image id -> the photo.
        scores: ``judge`` and ``Ref judge``.
        resamples: number of resamples of photos.
    """
    captions = read_captions(folder)
    prompts, columns = reward_inputs([rows[image_id] for image_id in captions])
    references = {image_id: rows[image_id]["references"] for image_id in captions}
    evaluation = evaluate_captions(captions, references, metrics=["cider"])
    of_images = {"CIDEr": [evaluation.per_image[image_id]["CIDEr"] for image_id in captions]}
    of_images |= {
        name: score(prompts, list(captions.values()), **columns) for name, score in scores.items()
    }
    figures = Figures(
        {
            "words": evaluation.metrics["length/mean"],
            "vocabulary": evaluation.metrics["vocabulary/size"],
        }
    )
    for key, values in of_images.items():
        figures.values[key] = fmean(values)
        drawn = drawn_weights(list(captions), resamples, seed=0)
        figures.resamples[key] = [float((np.array(values) * weights).mean()) for weights in drawn]
    return figures


def captioner_tables(arguments: argparse.Namespace, judge: DualEncoder) -> str:
    """Markdown: the captions of all captioners, and differences from those whose student had no SR."""
    data = KarpathyData(arguments.test_data, "images", features_root=arguments.features)
    rows = {row["image_id"]: row for row in data.split("test")}
    encoder = CachedEncoder(judge)
    scores = {"judge": LClipScore(encoder), "Ref judge": RefLClipScore(encoder)}
    values, differences = [], []
    for objective in OBJECTIVES:
        for text in arguments.texts:
            seeds_of: dict[str, list[Figures]] = {}
            for weight in ["0", *(weight for weight in arguments.weights if weight != "0")]:
                folder = folder_of(arguments.out, text, weight, 0).parent
                runs = [
                    file.parent
                    for file in sorted(folder.glob(f"seed*/{objective}/test/scores.json"))
                ]
                seeds = seeds_of[weight] = [
                    captioner_figures(run, rows, scores, arguments.resamples) for run in runs
                ]
                label = [objective, text, weight]
                if seeds:
                    cells = [
                        ", ".join(f"{100 * of.values[key]:.1f}" for of in seeds)
                        for key in OF_CAPTIONS
                    ]
                    means = [
                        f"{fmean(of.values[key] for of in seeds):.1f}"
                        for key in ("words", "vocabulary")
                    ]
                    values.append([*label, *cells, *means])
                if seeds and seeds_of["0"] and weight != "0":
                    pairs = str(min(len(seeds), len(seeds_of["0"])))
                    moved = [difference(seeds, key, seeds_of["0"], key) for key in OF_CAPTIONS]
                    differences.append([*label, pairs, *moved])
    head = ["objective", "text tower", "SR"]
    return "\n\n".join(
        [
            markdown([*head, *OF_CAPTIONS, "words", "vocabulary"], values),
            markdown([*head, "seeds", *OF_CAPTIONS], differences),
        ]
    )


def difference(first: Sequence[Figures], key: str, second: Sequence[Figures], other: str) -> str:
    """Mean over seeds of ``key`` of ``first`` minus ``other`` of ``second``, times 100, with its interval."""

    def moved(of: Callable[[Figures, str], Any]) -> Any:
        pairs = zip(first, second, strict=False)  # seeds that both have
        return 100 * np.mean(
            [np.subtract(of(left, key), of(right, other)) for left, right in pairs], axis=0
        )

    low, high = np.quantile(moved(lambda figures, name: figures.resamples[name]), ENDS)
    return f"{moved(lambda figures, name: figures.values[name]):+.2f} [{low:+.2f}, {high:+.2f}]"


def tables(figures: dict[tuple[str, str], list[Figures]], teacher: dict[str, float]) -> str:
    """Markdown: values of all seeds, differences from no SR, cosines, and differences by the prefix."""
    values, differences, prefixes = [], [], []
    similarities = [
        [
            "teacher",
            "",
            *(f"{1:.3f}" for _ in COSINES),
            *(f"{teacher[key]:.3f}" for key in SIMILARITIES),
        ]
    ]
    for (text, weight), seeds in figures.items():
        label, none = [text, weight], figures.get((text, "0"), [])
        values.append(
            [
                *label,
                *(
                    ", ".join(f"{100 * of.values[key]:.1f}" for of in seeds)
                    for key in [*TAUS, "R@1"]
                ),
            ]
        )
        if none and weight != "0":
            differences.append(
                [*label, *(difference(seeds, key, none, key) for key in [*TAUS, "R@1"])]
            )
        means = {key: fmean(of.values[key] for of in seeds) for key in [*COSINES, *SIMILARITIES]}
        similarities.append([*label, *(f"{means[key]:.3f}" for key in [*COSINES, *SIMILARITIES])])
        if weight == "0":
            prefixes.append(
                [*label, *(difference(seeds, f"{key}{WITH_PREFIX}", seeds, key) for key in TAUS)]
            )
    head = ["text tower", "SR"]
    return "\n\n".join(
        [
            markdown([*head, *TAUS, "R@1"], values),
            markdown([*head, *TAUS, "R@1"], differences),
            markdown([*head, *COSINES, *SIMILARITIES], similarities),
            markdown([*head, *TAUS], prefixes),
        ]
    )


def main() -> None:
    """Train, measure and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--texts", nargs="+", choices=TEXTS, default=[*TEXTS], help="text tower in stage 2"
    )
    parser.add_argument("--weights", nargs="+", choices=WEIGHTS, default=[*WEIGHTS], help="of SR")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--data", default="data/flickr8k")
    parser.add_argument("--features", default="data/flickr8k/lite0.h5")
    parser.add_argument("--teacher", default="runs/flickr8k/teacher/export/best")
    parser.add_argument("--resamples", type=int, default=200, help="of photos, for intervals")
    parser.add_argument(
        "--only", choices=["train", "measure", "captioners"], help="one step of the work"
    )
    parser.add_argument(
        "--captioner", help="with --only captioners: the captioner that SCST starts from"
    )
    parser.add_argument(
        "--test_data", help="with --only captioners: data whose test photos are captioned; --data"
    )
    parser.add_argument(
        "--judge", help="with --only captioners: a dual encoder that no student learnt from"
    )
    parser.add_argument("--out", required=True, type=Path, help="folder of all runs and tables")
    arguments, changes = parser.parse_known_args()
    if (arguments.only == "captioners") != bool(arguments.captioner and arguments.judge):
        parser.error("--only captioners, --captioner and --judge go together")
    arguments.test_data = arguments.test_data or arguments.data
    trust([ENCODER])
    if arguments.only == "captioners":
        train_captioners(arguments, changes)
        text = captioner_tables(arguments, load_frozen_encoder(arguments.judge))
        (arguments.out / "captioners.md").write_text(text)
        print(text)
        return
    if arguments.only != "measure":
        train(arguments, changes)
    if arguments.only != "train":
        photos = Photos(arguments.data, arguments.features, arguments.teacher)
        teacher = photos.similarities(photos.teacher["image"], photos.teacher["text"])
        text = tables(all_figures(arguments, photos), teacher)
        (arguments.out / "tables.md").write_text(text)
        print(text)


if __name__ == "__main__":
    main()
