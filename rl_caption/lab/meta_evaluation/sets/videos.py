"""Sets of judgements of captions of videos; one function for each, named as in ``SETS``."""

import pickle
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rewards.base import naming
from rewards.images import Frames
from rewards.videos import video_frames
from rl_caption.data.base import DataError
from rl_caption.lab.meta_evaluation.sets.base import (
    CaptionPairs,
    Files,
    Pair,
    RatedCaptions,
    Row,
    caption_pairs,
    json_object,
)

EMSCORE = "the data of https://github.com/ShiYaya/emscore, whose README links to them"
VATEX_FILES = ("candidates_list.pkl", "gts_list.pkl", "human_scores.pkl", "video_ids.pkl")
RATERS = 3
RIGHT, FOILED = "final_right_video_sentences.json", "final_foil_video_sentences.json"
SEGMENTS, REFERENCES = "anet_entities_test_1.json", "anet_entities_test_2.json"
OVERLAP = 0.4
"""A reference counts if more than this fraction of its seconds are its sentence's, too. From the released code, whose
comment says one half."""
_VIDEOS = (".mp4", ".webm", ".mkv", ".avi", ".gif")
_ARRAYS = {
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    *(
        (f"numpy.{core}.multiarray", name)
        for core in ("core", "_core")
        for name in ("_reconstruct", "scalar")
    ),
    *((f"numpy.{core}.numeric", "_frombuffer") for core in ("core", "_core")),
    ("_codecs", "encode"),
}
"""All that the pickled arrays of VATEX-EVAL are made of; nothing else is called."""


_DAMAGED = (
    *(
        pickle.UnpicklingError,
        EOFError,
        OSError,
        ValueError,
        TypeError,
        AttributeError,
        LookupError,
    ),
    *(ImportError, MemoryError, OverflowError, RecursionError),
)
"""What reading a damaged pickle raises."""


class _Arrays(pickle.Unpickler):
    """Reads lists, texts, numbers and arrays of them; anything else in the file is an error, and is not executed."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ARRAYS:
            raise pickle.UnpicklingError(f"it holds {module}.{name}: expected an array or a list")
        return super().find_class(module, name)


def vatex_eval(
    release: Files, references: int | None = None, num_frames: int = 10
) -> list[RatedCaptions]:
    """Read ``candidates_list.pkl``, ``gts_list.pkl``, ``human_scores.pkl`` and ``video_ids.pkl`` of EMScore's release.

    Shi et al., CVPR 2022: 6 captions of each of 3,000 videos of VATEX, which 3 people rated from 1 to 5. Papers print
    the mean over the people of tau_b and of Spearman's correlation, so each person is a part of the set. ``references``
    is how many of a video's references metrics see, the first ones; None is all of them (9). ``num_frames`` is how many
    frames of a video they see (``data.num_frames``); it is a file ``images/ID.mp4`` or a folder ``images/ID`` of
    frames. The released code rounds scores to 4 digits first; this does not.
    """
    arrays = [_load_pickle(release.require(EMSCORE, file)) for file in VATEX_FILES]
    judged, written, scores, ids = (np.asarray(array, dtype=object) for array in arrays)
    count = len(judged)
    release.check_count("captions", count, 18_000)
    if scores.size != RATERS * count or len(written) != count or len(ids) != count:
        raise DataError(
            f"{release.folder}: {count} captions, references of {len(written)}, {scores.size} ratings and {len(ids)} "
            f"video ids: expected as many, and {RATERS} ratings of each"
        )
    keys = ["caption", "references", "id", *(f"rating {rater + 1}" for rater in range(RATERS))]
    columns = zip(judged, map(list, written), ids, *scores.reshape(RATERS, count), strict=True)
    rows = [
        Row(dict(zip(keys, scores_of_rater, strict=True)), f"{release.folder}, caption {number}")
        for number, scores_of_rater in enumerate(columns)
    ]
    most = min(len(row.captions("references")) for row in rows)
    if references is None:
        references = most
    if not 1 <= references <= most:
        raise DataError(
            f"references is {references}: expected 1 to {most}, the number of those in the files"
        )
    videos = _videos(
        release.image_folder("videos", "images"), [str(video) for video in ids], num_frames
    )
    ratings = [[row.number(f"rating {rater + 1}") for row in rows] for rater in range(RATERS)]
    captions, names = [row.caption("caption") for row in rows], [row.text("id") for row in rows]
    references_of_rows = [row.captions("references")[:references] for row in rows]
    how = f"ratings of one of {RATERS} people, over whom papers print the mean; {references} references"
    return [
        RatedCaptions(
            f"{release.name}, person {n}",
            captions,
            scores_of_rater,
            names,
            videos,
            references_of_rows,
            "tau_b",
            how,
            within_images=True,
        )
        for n, scores_of_rater in enumerate(ratings, start=1)
    ]


def activitynet_foil(
    release: Files, num_frames: int = 10, by: Literal["paragraph", "sentence"] = "paragraph"
) -> list[CaptionPairs]:
    """Read ``final_right_video_sentences.json``, ``final_foil_video_sentences.json`` and ``anet_entities_test_*.json``.

    Shi et al., CVPR 2022: paragraphs of 1,900 videos of ActivityNet Entities, and the same with a wrong noun. Sentences
    are scored against their segment of the video (``num_frames`` of it; ``images/ID.mp4``, or a folder of frames) and
    against the sentences of the second file that overlap with it; a paragraph's score is their mean. Sentences that are
    equal in both do not matter to that, so the pairs here are those that differ. ``by`` counts paragraphs, as papers do
    (the sums over its pairs are compared), or each of these pairs by itself.
    """
    files = (RIGHT, FOILED, SEGMENTS, REFERENCES)
    right, foiled, first, second = (json_object(release.require(EMSCORE, file)) for file in files)
    pairs: list[Pair] = []
    references: list[list[str]] = []
    spans: list[tuple[float, float]] = []
    excluded: Counter[str] = Counter()
    true_results, wrong = right.row("results"), foiled.row("results")
    release.check_count("videos", len(true_results.values), 1900)
    for video in true_results.values:
        true, false = (
            [row.caption("sentence") for row in results.rows(video)]
            for results in (true_results, wrong)
        )
        times, length = _times(first.row(video))
        if not len(true) == len(false) <= len(times):
            raise DataError(
                f"{release.folder}, {video}: {len(true)} and {len(false)} sentences, {len(times)} timestamps"
            )
        for place, (one, two) in enumerate(zip(true, false, strict=True)):
            if one == two:
                excluded["the sentence is the same in both paragraphs"] += 1
                continue
            pairs.append(Pair(video, one, two))
            spans.append((min(times[place][0] / length, 1.0), min(times[place][1] / length, 1.0)))
            references.append(_overlapping(second.row(video), times[place]))
    release.check_count("pairs", len(pairs))
    folder = release.image_folder("videos", "images")
    videos = _videos(folder, [pair.image for pair in pairs], num_frames, spans)
    further = {"overlapping references": references}
    scores = "mean over its sentences" if by == "paragraph" else "score"
    convention = f"the {by} has a higher {scores} than its foil; equal ones are wrong"
    options = {"shown_kinds": False, "by_image": by == "paragraph"}
    return [
        caption_pairs(release.name, pairs, videos, further, convention, dict(excluded), **options)
    ]


def _load_pickle(path: Path) -> Any:
    with naming(f"{path} is no pickled array", _DAMAGED, DataError), open(path, "rb") as file:
        return _Arrays(file).load()


def _videos(
    folder: Path | None,
    ids: Sequence[str],
    num_frames: int,
    spans: Sequence[tuple[float, float]] | None = None,
) -> list[Frames] | None:
    """Frames of each row's video, or of a part of it; rows of one part have one object."""
    if folder is None:
        return None
    frames_of: dict[Any, Frames] = {}
    keys = list(zip(ids, spans or [(0.0, 1.0)] * len(ids), strict=True))
    for key in keys:
        if key not in frames_of:
            files = [folder / key[0], *(folder / f"{key[0]}{suffix}" for suffix in _VIDEOS)]
            file = next((file for file in files if file.exists()), files[1])
            frames_of[key] = video_frames(file, num_frames, key[1])
    return [frames_of[key] for key in keys]


def _times(row: Row) -> tuple[list[tuple[float, float]], float]:
    """Start and end of each sentence of a video, and its length, in seconds."""
    times, length = row.values.get("timestamps"), row.number("duration")
    try:
        spans = [(float(start), float(end)) for start, end in times]  # type: ignore[union-attr]
    except (TypeError, ValueError) as error:
        raise row.refusal("timestamps", "pairs of seconds") from error
    if length <= 0 or not all(0 <= start <= end for start, end in spans):
        raise row.refusal("timestamps", "pairs of seconds, in order, of a video longer than 0")
    return spans, length


def _overlapping(row: Row, time: tuple[float, float]) -> list[str]:
    """The sentences of which more than ``OVERLAP`` of the (whole) seconds are in ``time``; all, where there is none."""
    times, _ = _times(row)
    sentences = row.captions("sentences")
    if len(sentences) != len(times):
        raise row.refusal("sentences", f"{len(times)}, one for each of the timestamps")

    def seconds(span: tuple[float, float]) -> set[int]:
        return set(range(int(span[0]), int(span[1]) + 1))

    near = [
        text
        for text, interval in zip(sentences, times, strict=True)
        if len(seconds(interval) & seconds(time)) / len(seconds(interval)) > OVERLAP
    ]
    return near or sentences
