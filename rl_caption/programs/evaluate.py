"""The evaluation program: compares captions of a split, decoded here or read from a
file, with references.

Captions in files are evaluated without importing torch: imports for models and data
sets are inside the functions that need them.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rewards.base import Reward
from rewards.clip.encoder import EncoderOptions
from rewards.devices import is_main_process
from rl_caption.config.commands import (
    EvaluateConfig,
    RetrievalConfig,
)
from rl_caption.config.schema import DataConfig
from rl_caption.data.files import (
    Captions,
    References,
    captions_file,
    read_captions,
    read_references,
    references_for,
    with_ids_of,
    write_json,
)
from rl_caption.data.plain_files import read_json, read_yaml
from rl_caption.evaluation import (
    Evaluation,
    check_writable,
    evaluate_captions,
    format_table,
    write_evaluation,
)
from rl_caption.evaluation.confidence import check_same_images, compare, with_intervals
from rl_caption.evaluation.metrics import (
    OTHER_LANGUAGES,
    EvaluationError,
    add_judges,
    check_asked,
    check_has_images,
    check_judges,
    check_one_row_each,
    check_referenced,
    words_tokenizer,
)
from rl_caption.evaluation.results import (
    COMPARISON,
    SETTINGS,
    folder_of,
    format_differences,
    sha256_of,
    unique_names,
    write_predictions,
)
from rl_caption.evaluation.samples import evaluate_samples
from rl_caption.runtime.errors import ConfigError, config_errors, naming

if TYPE_CHECKING:
    from accelerate import Accelerator

    from rewards.clip.encoder import CachedEncoder
    from rl_caption.data.base import Splits
    from rl_caption.programs.captions import Captions as Decoded

logger = logging.getLogger(__name__)
SPLIT = "test"
"""Default split to evaluate."""
IMAGES_AND_TEXTS = (
    "format",
    "target",
    "path",
    "columns",
    "kwargs",
    "tokenizer",
    "long_captions",
)
"""Keys of ``data`` in which the folders of a comparison have to agree."""


class _Images(NamedTuple):
    """The images whose captions are evaluated."""

    references: References
    rows: Sequence[Any]
    """One row for each image."""
    source: str
    """Source of the images, for messages."""
    data: Splits | None = None
    """None where the references are from a file."""

    def training(self) -> list[list[str]]:
        """References of the training images; empty where they are unknown."""
        if self.data is None or "train" not in self.data:
            return []
        return [row["references"] for row in self.data["train"]]


def evaluate(config: EvaluateConfig) -> str:
    """Evaluate captions of a model or a file, or compare two files; return the tables."""
    return compare_systems(config) if config.compare else evaluate_split(config)


def evaluate_split(config: EvaluateConfig) -> str:
    """Decode (or read) captions, evaluate them, write ``predictions.json`` and
    ``scores.json``, and return the table.

    The table is empty in every process but the main one. Raises as ``score_captions``.
    """
    # Before they are loaded: a training may replace them.
    settings = settings_of(config) if is_main_process() else {}
    judged = score_captions(config)
    if judged is None:
        return ""
    evaluation, captions, rows = judged
    evaluation = with_intervals(evaluation, config.bootstrap, seed=config.seed)
    (Path(config.out) / COMPARISON).unlink(missing_ok=True)
    paths = write_evaluation(evaluation, captions, config.out)
    name, source = str(config.model), {"predictions": sha256_of(paths[0])}
    if config.predictions is not None:
        name = Path(config.predictions).stem
        source = _source_of(config.predictions, captions)
    write_json(Path(config.out) / SETTINGS, settings | source)
    print(f"wrote {' and '.join(str(path) for path in paths)}", file=sys.stderr)
    _report(config, rows)
    return format_table({name: evaluation})


def compare_systems(config: EvaluateConfig) -> str:
    """Judge two files of captions of the same images; return tables with their differences.

    If a path is the folder of a run, its ``export/best`` captions the split first.
    Writes a folder for each system as ``evaluate_split`` does, and ``comparison.json``.

    Raises:
        EvaluationError: the files have captions of different images; with counts.
        DataError, RewardError: as for ``score_captions``.
    """
    out = Path(config.out)
    files = [Path(path) for path in config.compare]
    stems = [file if file.is_dir() else file.with_suffix("") for file in files]
    # test.xe and test.rl are two systems
    names = unique_names(files if stems[0] == stems[1] else stems)
    paths = [
        _evaluated_run(config, Path(path), folder_of(name))
        if Path(path, "export", "best").is_dir()
        else path
        for path, name in zip(config.compare, names, strict=True)
    ]
    config = config.replace(compare=paths)
    if config.references is None and config.data == DataConfig():
        config = _with_data_of_folders(config)
    _check_settings(config)
    if not is_main_process():
        return ""
    systems = [read_captions(path) for path in paths]
    check_same_images(systems[0], systems[1], paths)
    images = _images(config, systems[0].by)
    captions = [
        _of_images(system, images, path)
        for system, path in zip(systems, paths, strict=True)
    ]
    scorer = _Scorer(config, images, captions[0])
    evaluations: dict[str, Evaluation] = {}
    for stale in ("scores.json", SETTINGS, COMPARISON):
        (out / stale).unlink(missing_ok=True)
    for name, texts, path in zip(names, captions, paths, strict=True):
        scores = with_intervals(scorer.score(texts), config.bootstrap, seed=config.seed)
        evaluations[name] = scores
        # Before the folder is written anew: the captions may have been read from it.
        source = _source_of(path, texts)
        write_evaluation(scores, texts, out / folder_of(name))
        write_json(out / folder_of(name) / SETTINGS, settings_of(config) | source)
    first, second = evaluations.values()
    differences = compare(first, second, config.bootstrap, seed=config.seed)
    content = {
        "systems": names,
        "resamples": config.bootstrap,
        "seed": config.seed,
        "interval": "95 % paired bootstrap over images",
        "p": "two-sided permutation test",
        "differences": differences,
    }
    write_json(out / COMPARISON, content)
    print(f"wrote {out / COMPARISON} and a folder for each system", file=sys.stderr)
    _report(config, images.rows)
    table = format_differences(differences, names, config.bootstrap)
    return f"{format_table(evaluations)}\n\n{table}"


def _evaluated_run(config: EvaluateConfig, run: Path, name: str) -> str:
    """Evaluate ``export/best`` of a run on a split of its data; return the written
    folder.

    Warns where the run chose its best model by this split.
    """
    from rl_caption.programs.report.read import received_data

    trained = read_yaml(run / "config.yaml", ConfigError)
    data = config.data
    if data == DataConfig():
        with naming(f"{run}/config.yaml"):
            data = received_data(trained["data"])
    split = config.split or SPLIT
    chosen_on = trained.get("eval", {}).get("split", "val")
    if split == chosen_on:
        logger.warning(
            "WARNING: %s are the images by which %s chose its best model: no fair comparison",
            split,
            run,
        )
    out, model = str(Path(config.out, name)), str(run / "export" / "best")
    fields = {"data": data, "split": split, "out": out, "report": False, "model": model}
    fields |= {"compare": [], "predictions": None, "references": None}
    evaluate_split(config.replace(**fields))
    return out


def _with_data_of_folders(config: EvaluateConfig) -> EvaluateConfig:
    """``config`` with the data and the split of the compared evaluations' settings.

    Unchanged where a folder has no settings. Raises ``ConfigError`` where they differ.
    """
    from rl_caption.programs.report.read import received_data

    notes = [Path(path) / SETTINGS for path in config.compare]
    records = [read_json(note, EvaluationError) for note in notes if note.is_file()]
    named = [settings for settings in records if "data" in settings]
    if len(named) < 2:
        return config
    first, second = (
        {key: settings["data"].get(key) for key in IMAGES_AND_TEXTS}
        | {"split": settings["split"]}
        for settings in named
    )
    if first != second:
        differing = ", ".join(key for key in first if first[key] != second[key])
        raise ConfigError(
            f"{' and '.join(config.compare)} are of different data ({differing}): name references, "
            f"or data.path"
        )
    with naming(config.compare[0]):
        data = received_data(named[0]["data"])
        return config.replace(data=data, split=config.split or first["split"])


def score_captions(
    config: EvaluateConfig, judges: Mapping[str, Reward] | None = None
) -> tuple[Evaluation, dict[str, str], Sequence[Any]] | None:
    """Decode (or read) captions as ``config`` says; return their metrics, the captions
    and the rows of their images, or None in every process but the main one.

    Args:
        config: configuration of the evaluation.
        judges: name -> reward, in place of ``config.judges``, for callers that evaluate
            several captioners.

    Raises:
        ConfigError: a judge cannot be built.
        EvaluationError, DataError: unusable captions, references or images.
        RewardError: a judge failed.
    """
    _check_settings(config)
    if config.predictions is not None:
        read = read_captions(config.predictions)
        images = _images(config, read.by)
        chosen = _of_images(read, images, config.predictions)
        evaluation = _Scorer(config, images, chosen, judges).score(chosen)
        return evaluation, chosen, images.rows
    if config.model is None:
        raise ConfigError(
            "set either model (a saved captioner), predictions (a file in COCO result format) or "
            "compare (two such files)"
        )
    from accelerate import Accelerator

    from rl_caption.runtime.engines import accelerator_kwargs
    from rl_caption.runtime.launch import check_processes

    images = _images(config)
    if not all("features" in row for row in images.rows):
        check_has_images("captioning", images.rows, images.source)
    accelerator = Accelerator(**accelerator_kwargs())
    check_processes(accelerator.num_processes)
    scorer = None
    if accelerator.is_main_process:
        scorer = _Scorer(config, images, images.references, judges)
    captions, how = _decode(config, images, accelerator)
    if scorer is None:
        return None
    with suppress(OSError):  # kept even if the scoring fails
        write_predictions(captions, config.out)
    return scorer.score(captions, how), captions, images.rows


def _check_settings(config: EvaluateConfig) -> None:
    if config.references is None and config.data == DataConfig():
        raise ConfigError(
            "references and data.path are not set: name a file of references, or the data of the "
            "images"
        )
    check_writable(config.out)


def settings_of(config: EvaluateConfig) -> dict[str, Any]:
    """Settings of an evaluation, as in ``settings.json``: data, split, tokenizer,
    decoding, and a hash of the weights.
    """
    plain = config.model_dump(mode="json")
    settings = {"tokenizer": plain["tokenizer"]}
    if config.references is None:
        data = {key: value for key, value in plain["data"].items() if key != "source"}
        settings |= {"data": data, "split": config.split or SPLIT}
    if config.compare or config.predictions is not None:
        return settings
    from rl_caption.captioners.loading import weights_hash

    settings["weights"] = weights_hash(str(config.model))
    return settings | {"prompt": plain["prompt"], "decode": plain["decode"]}


def _source_of(path: str, captions: Any) -> dict[str, Any]:
    """``predictions``, the hash of the file of captions; and ``weights``, ``prompt``
    and ``decode`` from the settings of the evaluation that wrote it.
    """
    note = Path(captions_file(path)).with_name(SETTINGS)
    noted = read_json(note, EvaluationError) if note.is_file() else {}
    source: dict[str, Any] = {"predictions": captions.sha256}
    if noted.get("predictions") == captions.sha256:
        for key in {"weights", "prompt", "decode"} & noted.keys():
            source[key] = noted[key]
    return source


def _images(config: EvaluateConfig, by: Any = "image_id") -> _Images:
    """The images of the split, from the data or a file of references; all images of a
    file without splits.
    """
    file = config.references
    if file is not None:
        annotated = read_references(
            file, config.split or SPLIT, by=by, has_splits=config.split is not None
        )
        rows: list[dict[str, Any]] = [
            {"image_id": image_id, "references": texts}
            for image_id, texts in annotated.items()
        ]
        for row in rows if annotated.images else ():
            row["image"] = annotated.images[row["image_id"]]
        return _Images(annotated, rows, f"a file of references ({file})")
    from rl_caption.config.build import build_data

    data = build_data(config.data)
    split = config.split or SPLIT
    data_rows = list(data[split])
    check_one_row_each(data_rows, f"split {split!r}")
    annotated = References((row["image_id"], row["references"]) for row in data_rows)
    return _Images(annotated, data_rows, f"split {split!r}", data)


def _of_images(captions: Captions, images: _Images, path: str) -> Captions:
    """Captions of the evaluated images. Warns of captions of other splits, and of
    images without a caption.

    Raises:
        EvaluationError, DataError: an image in no split or without references, or no
            caption of these images.
    """
    annotated, files = images.references, images.references.images
    outside = [image_id for image_id in captions if image_id not in annotated]
    others: Collection[str] = annotated.elsewhere if outside else ()
    if outside and images.data is not None:
        splits = images.data.values()
        files = {row["image_id"]: row.get("image") for rows in splits for row in rows}
        others = files.keys() - annotated.keys()
    if outside:
        captions = with_ids_of(captions, {*annotated, *others}, files, path)
        outside = [image_id for image_id in captions if image_id not in annotated]
    chosen = Captions(
        (image_id, text)
        for image_id, text in captions.items()
        if image_id not in others
    )
    chosen.by, chosen.sha256 = captions.by, captions.sha256
    if outside and not chosen:
        raise EvaluationError(
            f"{path} has no caption of {images.source}: all {len(captions)} belong to other "
            f"splits; set --split"
        )
    references_for(chosen, annotated, f"{path} and {images.source}")
    if len(chosen) < len(captions):
        logger.warning(
            "WARNING: %d captions in %s belong to other splits: only %s counts (--split)",
            len(captions) - len(chosen),
            path,
            images.source,
        )
    missing = [key for key, texts in annotated.items() if texts and key not in chosen]
    if missing:
        logger.warning(
            "WARNING: %s has no caption of %d images (first: %s), which are left out of all scores",
            path,
            len(missing),
            missing[0],
        )
    return chosen


class _Scorer:
    """Scores captions of ``images`` by metrics and judges, all built before anything long starts.

    The constructor checks that the rows of the images ``captioned`` (ids) have the
    columns that the judges need. ``judges`` (name -> reward) replace ``config.judges``.
    """

    def __init__(
        self,
        config: EvaluateConfig,
        images: _Images,
        captioned: Collection[str],
        judges: Mapping[str, Reward] | None = None,
    ) -> None:
        self.config, self.images = config, images
        asked = config.metrics
        words = asked.split(",") if isinstance(asked, str) else asked
        self.metrics = [word.strip() for word in words if word.strip()]
        check_asked(self.metrics, config.tokenizer)
        check_referenced(captioned, images.references)
        tokenizer = words_tokenizer(config.tokenizer, config.data.tokenizer)
        rows = [row for row in images.rows if row["image_id"] in captioned]
        if judges is None and config.judges:
            from rl_caption.monitoring.judges import build_judges

            references = [texts for texts in images.references.values() if texts]
            judges = build_judges(config.judges, None, references, "judges", tokenizer)
        self.judges = judges or {}
        check_judges(self.judges, rows, images.source)

    def score(self, captions: Mapping[str, str], decoding: str = "") -> Evaluation:
        """Compute the metrics of captions."""
        config, rows = self.config, self.images.rows
        scenes = {row["image_id"]: row["scene"] for row in rows if "scene" in row}
        training = {text for texts in self.images.training() for text in texts}
        tokenizer: Any = config.tokenizer
        if tokenizer == "auto" and config.data.tokenizer in OTHER_LANGUAGES:
            tokenizer = config.data.tokenizer
        evaluation = evaluate_captions(
            captions,
            self.images.references,
            metrics=self.metrics,
            tokenizer=tokenizer,
            training_captions=training or None,
            scenes=scenes if len(scenes) == len(rows) else None,
        )
        evaluation = replace(evaluation, decoding=decoding)
        captioned = [row for row in rows if row["image_id"] in captions]
        return add_judges(evaluation, captioned, captions, self.judges)


def load_dual_encoder(config: RetrievalConfig, key: str) -> CachedEncoder:
    """Load the encoder of a configuration whose ``backbone`` is set. Raises
    ``ConfigError``, which names ``key``.
    """
    from rewards.clip.backbone import load_encoder  # imports torch

    with config_errors(key):
        return load_encoder(
            EncoderOptions(str(config.backbone), config.pretrained, **config.kwargs)
        )


def _report(config: EvaluateConfig, rows: Sequence[Any]) -> None:
    if config.report:
        from rl_caption.programs.report.page import write_report

        write_report(Path(config.out), rows)


def _score_candidates(
    config: EvaluateConfig, captions: Decoded, images: _Images
) -> None:
    """Write and print ``evaluate_samples`` of all candidates, if there are at least two
    images and every image has several.
    """
    samples = {
        key: [one.caption for one in of_image]
        for key, of_image in captions.candidates.items()
    }
    if len(samples) < 2 or min(map(len, samples.values())) < 2:
        return
    words = words_tokenizer(config.tokenizer, config.data.tokenizer)
    evaluation = evaluate_samples(samples, images.references, words)
    best_of = [one._asdict() for one in evaluation.best_of]
    scores = {"metrics": evaluation.metrics, "best_of": best_of}
    write_json(Path(config.out) / "candidates_scores.json", scores)
    said = [f"{key} {value:.3f}" for key, value in evaluation.metrics.items()]
    for key, value in best_of[-1].items():
        said.append(f"CIDEr-D (x100) {key} {100 * value:.2f}")
    print(f"{len(best_of)} captions of an image: {', '.join(said)}", file=sys.stderr)


def _decode(
    config: EvaluateConfig, images: _Images, accelerator: Accelerator
) -> tuple[dict[str, str], str]:
    """Captions of the images, and a description of the decoding. Writes
    ``candidates.jsonl`` with ``config.candidates``.
    """
    from rl_caption.captioners.loading import load_captioner
    from rl_caption.config.build import quiet_libraries
    from rl_caption.data.checks import check_row_images
    from rl_caption.programs.captions import (
        build_reranker,
        caption_rows,
        rerank_captions,
    )
    from rl_caption.runtime.engines import print_main

    reward, how = None, config.decode.describe()
    if config.decode.num_samples:
        how += f", seed {config.seed}"
    if config.rerank is not None and accelerator.is_main_process:
        words = words_tokenizer(config.tokenizer, config.data.tokenizer)
        reward = build_reranker(
            config.rerank, config.rerank_kwargs, images.training(), words
        )
        check_judges({"rerank": reward}, images.rows, images.source, key="")
        how += f", chosen by {reward.signature}"
    quiet_libraries()
    captioner = load_captioner(str(config.model), prompt=config.prompt)
    split = config.split or SPLIT
    rows = images.rows
    if captioner.input_kind == "pixels":
        skip = config.data.on_bad == "skip"
        rows = check_row_images(rows, "the captioner", skip, on_bad=config.data.on_bad)
    print_main(
        accelerator,
        f"captioning {len(rows)} images of {split!r} ({how}) with {config.model}",
    )
    decoded = caption_rows(captioner, rows, config.decode, accelerator, config.seed)
    file = Path(config.out) / "candidates.jsonl"
    if accelerator.is_main_process:
        for stale in (file, file.with_name("candidates_scores.json")):
            stale.unlink(missing_ok=True)
    if reward is not None:
        decoded = rerank_captions(decoded, rows, reward)
    if config.candidates and accelerator.is_main_process:
        decoded.write(file)
        _score_candidates(config, decoded, images)
    return decoded.texts(), how
