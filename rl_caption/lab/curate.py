"""The curation program: measures and scores the captions of a data set, part by part, and keeps the best.

The rows are worked on in parts. A part is a file of arrays with one entry per caption. A run that was stopped makes
only the parts that are missing, and only arrays are held for the whole data set: about 95 bytes per caption.
"""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rewards.base import Reward, RewardError, score_captions
from rewards.build import RewardBuilder
from rewards.files import UNREADABLE_ARRAY, atomic_write
from rewards.text.tokenize import tokenize
from rl_caption.data.base import DataError, with_references
from rl_caption.data.file_checks import ImageFile, check_image_files, in_parallel, progress
from rl_caption.data.files import write_text
from rl_caption.data.fingerprint import fingerprint
from rl_caption.data.hub import EncodedImage
from rl_caption.data.parts import missing_parts
from rl_caption.data.plain_files import shown
from rl_caption.evaluation.results import markdown
from rl_caption.lab.config import CurateConfig, Selection
from rl_caption.lab.curation import (
    MEASURES,
    TEXT_OVERLAP,
    Item,
    Source,
    best,
    first_of_equals,
    text_overlap,
    write_rows,
)
from rl_caption.runtime.errors import ConfigError, config_errors, naming

logger = logging.getLogger(__name__)

OTHER_SPLIT = -2
"""In ``Measurements.reason``: the caption is of another split, and is kept without being looked at."""
UNREADABLE = -3
"""In ``Measurements.reason``: the image of the caption cannot be read."""


class Measurements(NamedTuple):
    """What is known of the N captions of a data set, in the order of its rows."""

    captions: NDArray[np.int32]
    """[rows]: the number of captions of each row."""
    reason: NDArray[np.int16]
    """[N]: index in ``config.rules`` of the first rule that the caption breaks, -1 for none, or a constant above."""
    key: NDArray[np.uint64]
    """[N]: a hash that is equal for duplicates."""
    scores: Mapping[str, NDArray[np.float32]]
    """Name of a score -> [N]; NaN where a caption was not scored."""


def curate(config: CurateConfig) -> str:
    """Write ``kept.jsonl`` and ``report.md`` to ``config.out``, and return the table of the report.

    With ``config.worker`` only the parts of that worker are made, and a sentence is returned that counts them.

    Raises:
        ConfigError: a rule, a score or a step of the selection cannot be used, or ``out`` has parts of other settings.
        DataError: a file, a row or an image cannot be read.
        RewardError: a score failed.
    """
    _check_rules(config)
    source = Source(
        Path(config.data),
        config.image_root,
        config.image_column,
        config.caption_column,
        config.text_column,
    )
    rewards = _rewards(config)
    out, rows = Path(config.out), source.count()
    if not rows:
        raise DataError(f"{config.data} has no rows")
    if not any(row.get("split", config.split) == config.split for _, row in source.rows()):
        splits = dict.fromkeys(shown(row["split"]) for _, row in source.rows())
        raise DataError(
            f"no row of {config.data} has split {config.split!r}: its splits are {', '.join(splits)}"
        )
    files = [out / "parts" / f"{number:06d}.npz" for number in range(-(-rows // config.part_rows))]
    missing, summary = missing_parts(out, files, config.worker, _settings(config, source, rewards))
    _make_parts(config, source, rewards, files, missing)
    if config.worker is not None:
        return summary
    measurements = _read_parts(files, list(rewards), rows, config.part_rows)
    steps = _select(config, measurements)
    return _write(config, source, measurements, steps, rewards)


def _check_rules(config: CurateConfig) -> None:
    measures = [*MEASURES, *([TEXT_OVERLAP] if config.text_column else [])]
    wrong = []
    for name, limits in config.rules.items():
        if name == TEXT_OVERLAP and not config.text_column:
            wrong.append(
                f"rules.{name} needs text_column, the name of a column with text in the image"
            )
        elif name not in measures:
            wrong.append(f"rules.{name} is not a measure: expected one of {', '.join(measures)}")
        if len(limits) != 2 or all(limit is None for limit in limits):
            wrong.append(
                f"rules.{name} is {limits}: expected [least, most], one of which may be null"
            )
    for index, step in enumerate(config.select):
        limits = [step.top, step.bottom, step.min, step.max]
        if step.score not in config.scores:
            wrong.append(
                f"select[{index}].score is {step.score!r}: expected one of {', '.join(config.scores) or 'none'}"
            )
        if all(limit is None for limit in limits) or (
            step.top is not None and step.bottom is not None
        ):
            wrong.append(
                f"select[{index}] sets {_name(step)}: expected one of top and bottom, or min or max"
            )
    if wrong:
        raise ConfigError("; ".join(wrong))


def _name(step: Selection) -> str:
    limits = {
        name: value for name, value in asdict(step).items() if name != "score" and value is not None
    }
    return f"{step.score}: " + ", ".join(f"{name} {value:.10g}" for name, value in limits.items())


def _rewards(config: CurateConfig) -> dict[str, Reward]:
    rewards, builder = {}, RewardBuilder()
    for name, score in config.scores.items():
        with config_errors(f"scores.{name}"):
            rewards[name] = builder.build(score.target or name, score.kwargs)
        foreign = sorted(rewards[name].columns - {"image", "image_id"})
        if foreign:
            raise ConfigError(
                f"scores.{name} needs {', '.join(foreign)}: expected a reward without references"
            )
    return rewards


def _settings(
    config: CurateConfig, source: Source, rewards: Mapping[str, Reward]
) -> dict[str, Any]:
    """What the parts depend on."""
    names = (
        "image_root",
        "image_column",
        "caption_column",
        "split",
        "text_column",
        "duplicates",
        "part_rows",
    )
    settings: dict[str, Any] = {name: getattr(config, name) for name in (*names, "on_bad")}
    settings["rules"] = [
        list(rule) for rule in config.rules.items()
    ]  # a list: parts have the rules' numbers
    settings["scores"] = {name: reward.signature for name, reward in rewards.items()}
    if any("image" in reward.columns for reward in rewards.values()):  # others read no image
        every = fingerprint({"rows": (row for _, row in source.rows())})
        settings["data"] = {
            name: value for name, value in every.items() if not name.endswith(("ids", "texts"))
        }
    settings["files"] = {}
    for file in source.files:
        with file.open("rb") as content:
            settings["files"][str(file)] = hashlib.file_digest(content, "sha256").hexdigest()[:16]
    return settings


def _make_parts(
    config: CurateConfig,
    source: Source,
    rewards: Mapping[str, Reward],
    files: Sequence[Path],
    missing: Sequence[int],
) -> None:
    part_numbers = set(missing)
    rows = source.rows(lambda index: index // config.part_rows in part_numbers)
    for number in progress(missing, "scoring", "part"):
        items = [row for _, row in islice(rows, config.part_rows)]
        arrays = _part(config, items, rewards)
        with atomic_write(files[number]) as file:
            np.savez(file, allow_pickle=False, **arrays)


def _part(
    config: CurateConfig, rows: Sequence[Item], rewards: Mapping[str, Reward]
) -> dict[str, NDArray]:
    """The arrays of ``Measurements`` for the rows of one part; those of scores are named ``score_NAME``."""
    unreadable = (
        _unreadable(config, rows)
        if any("image" in reward.columns for reward in rewards.values())
        else set()
    )
    captions = [(row, caption) for row in rows for caption in row["references"]]
    reasons = np.array(
        [_reason(config, row, caption, unreadable) for row, caption in captions], dtype=np.int16
    )
    arrays: dict[str, NDArray] = {
        "captions": np.array([len(row["references"]) for row in rows], dtype=np.int32),
        "reason": reasons,
        "key": np.array([_key(config, row, caption) for row, caption in captions], dtype=np.uint64),
    }
    good = np.flatnonzero(reasons == -1)
    for name, reward in rewards.items():
        scores = np.full(len(captions), np.nan, dtype=np.float32)
        if len(good):
            chosen = [captions[index] for index in good]
            columns = {key: [row[key] for row, _ in chosen] for key in ("image", "image_id")}
            scores[good] = score_captions(
                reward, f"scores.{name}", None, [caption for _, caption in chosen], columns
            )
        arrays[f"score_{name}"] = scores
    return arrays


def _unreadable(config: CurateConfig, rows: Sequence[Item]) -> set[str]:
    """The images that cannot be read. Raises ``DataError`` if there are any, unless ``on_bad`` skips them."""
    images = [row["image"] for row in rows if row.get("split", config.split) == config.split]
    encoded = [image for image in images if isinstance(image, EncodedImage)]
    paths = (str(image) for image in images if not isinstance(image, EncodedImage))
    verdicts = check_image_files(map(ImageFile, paths), config.num_workers)
    errors = {file.path: verdict.error for file, verdict in verdicts.items()}
    decoded = in_parallel(_decoding_error, encoded, config.num_workers, "checking images")
    errors |= {str(image): error for image, error in zip(encoded, decoded, strict=True)}
    bad = {image: error for image, error in errors.items() if error is not None}
    if bad and config.on_bad == "fail":
        first = next(iter(bad.values()))
        raise DataError(
            f"{len(bad)} of {len(errors)} images cannot be used: {first} (on_bad: skip drops their captions)"
        )
    return set(bad)


def _decoding_error(image: EncodedImage) -> str | None:
    try:
        image.render()
    except RewardError as error:
        return str(error)
    return None


def _reason(config: CurateConfig, row: Item, caption: str, unreadable: set[str]) -> int:
    if row.get("split", config.split) != config.split:
        return OTHER_SPLIT
    if str(row["image"]) in unreadable:
        return UNREADABLE
    text = row.get(str(config.text_column), "")
    for number, (name, (least, most)) in enumerate(config.rules.items()):
        value = text_overlap(caption, text) if name == TEXT_OVERLAP else MEASURES[name](caption)
        if (least is not None and value < least) or (most is not None and value > most):
            return number
    return -1


def _key(config: CurateConfig, row: Item, caption: str) -> int:
    if config.duplicates is None:
        return 0
    text = " ".join(tokenize(caption))
    if config.duplicates == "pair":
        text += f"\n{row['image'].identity() if isinstance(row['image'], EncodedImage) else row['image']}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


def _read_parts(
    files: Sequence[Path], scores: Sequence[str], rows: int, part_rows: int
) -> Measurements:
    """Read the parts of a data set of ``rows`` rows. Raises ``DataError``, which names the file, for a damaged one."""
    kinds = {
        "captions": np.int32,
        "reason": np.int16,
        "key": np.uint64,
        **{f"score_{n}": np.float32 for n in scores},
    }
    columns: dict[str, list[NDArray]] = {name: [] for name in kinds}
    for number, path in enumerate(progress(files, "reading parts", "part")):
        damaged = f"{path} cannot be read: delete it and run again to recreate it"
        with (
            naming(damaged, (*UNREADABLE_ARRAY, TypeError, AttributeError), error=DataError),
            np.load(path) as file_arrays,
        ):
            arrays = {name: file_arrays[name] for name in kinds}
            length = dict.fromkeys(kinds, int(arrays["captions"].sum()))
            length["captions"] = min(part_rows, rows - number * part_rows)
            for name, dtype in kinds.items():
                if arrays[name].dtype != dtype or arrays[name].shape != (length[name],):
                    actual = f"{arrays[name].dtype} {list(arrays[name].shape)}"
                    raise ValueError(
                        f"{name} is {actual}: expected {np.dtype(dtype)} [{length[name]}]"
                    )
                columns[name].append(arrays[name])
    whole = {name: np.concatenate(blocks) for name, blocks in columns.items()}
    scores_by_name = {score: whole.pop(f"score_{score}") for score in scores}
    return Measurements(**whole, scores=scores_by_name)


def _select(
    config: CurateConfig, measurements: Measurements
) -> list[tuple[str, NDArray[np.bool_]]]:
    """The steps of the selection in their order: what each drops captions for, and which are left [N]."""
    looked_at = measurements.reason != OTHER_SPLIT
    left = looked_at.copy()
    steps = [("captions", left.copy())]
    if (measurements.reason == UNREADABLE).any():
        left &= measurements.reason != UNREADABLE
        steps.append(("image cannot be read", left.copy()))
    for number, (name, limits) in enumerate(config.rules.items()):
        left &= measurements.reason != number
        steps.append((f"{name} in {limits}".replace("None", "-"), left.copy()))
    if config.duplicates is not None:
        index = np.flatnonzero(left)
        left[index[~first_of_equals(measurements.key[index])]] = False
        steps.append((f"duplicate {config.duplicates}", left.copy()))
    for step in config.select:
        index = np.flatnonzero(left)
        scores = measurements.scores[step.score][index]
        keep = np.ones(len(index), dtype=bool)
        if step.min is not None:
            keep &= scores >= step.min
        if step.max is not None:
            keep &= scores <= step.max
        if step.top is not None or step.bottom is not None:
            among = np.flatnonzero(keep)
            signed = scores[among] if step.top is not None else -scores[among]
            keep[among] &= best(signed, step.top or step.bottom or 0)
        left[index[~keep]] = False
        steps.append((_name(step), left.copy()))
    return steps


def _write(
    config: CurateConfig,
    source: Source,
    measurements: Measurements,
    steps: Sequence[tuple[str, NDArray[np.bool_]]],
    rewards: Mapping[str, Reward],
) -> str:
    out, kept = Path(config.out), steps[-1][1] | (measurements.reason == OTHER_SPLIT)
    generator = np.random.default_rng(config.seed)
    dropped = [(name, before & ~after) for (_, before), (name, after) in pairwise(steps)]
    examples = {
        name: _drawn(generator, mask, config.examples)
        for name, mask in [("kept", steps[-1][1]), *dropped]
    }
    example_indices = {int(index) for indices in examples.values() for index in indices}
    texts: dict[int, str] = {}
    ends, written = np.cumsum(measurements.captions), 0
    with atomic_write(out / "kept.jsonl") as file:
        for index, row in progress(source.rows(), "writing", "row", len(ends)):
            first, captions = int(ends[index] - measurements.captions[index]), row["references"]
            texts |= {
                first + n: caption
                for n, caption in enumerate(captions)
                if first + n in example_indices
            }
            chosen = [n for n in range(len(captions)) if kept[first + n]]
            if chosen:
                write_rows(file, [with_references(row, chosen)], out / "images")
                written += 1
    table = _table(steps, measurements)
    lines = [f"# Curated: {config.data}", "", table, "", f"- `kept.jsonl`: {written:,} rows"]
    lines += [f"- {name}: {reward.signature}" for name, reward in rewards.items()]
    for name, indices in examples.items():
        lines += (
            ["", f"## {name if name == 'kept' else f'dropped: {name}'}", ""] if len(indices) else []
        )
        for index in indices:
            scores = ", ".join(
                f"{score} {values[index]:.4f}" for score, values in measurements.scores.items()
            )
            caption = " ".join(texts[int(index)].split())
            lines.append(
                f"- {caption}" + (f" ({scores})" if scores and "nan" not in scores else "")
            )
    write_text(out / "report.md", "\n".join(lines) + "\n")
    return "\n".join(
        [table, "", f"wrote {out / 'kept.jsonl'} ({written:,} rows) and {out / 'report.md'}"]
    )


def _drawn(
    generator: np.random.Generator, mask: NDArray[np.bool_], count: int
) -> NDArray[np.int64]:
    index = np.flatnonzero(mask)
    return np.sort(generator.choice(index, min(count, len(index)), replace=False))


def _table(steps: Sequence[tuple[str, NDArray[np.bool_]]], measurements: Measurements) -> str:
    """A Markdown table: the number of captions after each step, and their mean scores."""
    heads = ["step", "dropped", "left", *(f"mean {name}" for name in measurements.scores)]
    lines = []
    before = int(steps[0][1].sum())
    for name, left in steps:
        count = int(left.sum())
        means = []
        for scores in measurements.scores.values():
            scored = scores[left & ~np.isnan(scores)]
            means.append(f"{scored.mean(dtype=np.float64):.4f}" if len(scored) else "–")
        lines.append([name, f"{before - count:,}", f"{count:,}", *means])
        before = count
    return markdown(heads, lines)
