"""Sets of judgements of captions of videos; one function for each, named as in ``SETS``."""

import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rewards.base import naming
from rewards.images import Frames
from rewards.videos import video_frames
from rl_caption.data.base import DataError
from rl_caption.data.plain_files import single_spaced
from rl_caption.lab.meta_evaluation.sets.base import (
    Files,
    Judged,
    JudgementSet,
    captions_of,
    rated,
)

VATEX_FILES = (
    "candidates_list.pkl",
    "gts_list.pkl",
    "human_scores.pkl",
    "video_ids.pkl",
)
RATERS = 3
RIGHT, FOILED = "final_right_video_sentences.json", "final_foil_video_sentences.json"
SEGMENTS, REFERENCES = "anet_entities_test_1.json", "anet_entities_test_2.json"
OVERLAP = 0.4
"""A reference counts if more than this fraction of its seconds are its sentence's, too. From the
released code, whose comment says one half.
"""
_VIDEOS = (".mp4", ".webm", ".mkv", ".avi", ".gif")
_ARRAYS = {
    "numpy.ndarray",
    "numpy.dtype",
    "numpy.core.multiarray._reconstruct",
    "numpy.core.multiarray.scalar",
    "numpy.core.numeric._frombuffer",
    "_codecs.encode",
}
"""All that the pickled arrays of VATEX-EVAL are made of; nothing else is called."""


class _Arrays(pickle.Unpickler):
    """Reads lists, texts, numbers and arrays of them; anything else in the file is an error, and is
    not executed.
    """

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}".replace("numpy._core", "numpy.core") not in _ARRAYS:
            raise pickle.UnpicklingError(
                f"it holds {module}.{name}: expected an array or a list"
            )
        return super().find_class(module, name)


def vatex_eval(
    files: Files, references: int | None = None, num_frames: int = 10
) -> list[JudgementSet]:
    """Read the four files of EMScore's release in ``VATEX_FILES``.

    Shi et al., CVPR 2022: 6 captions of each of 3,000 videos of VATEX, which 3 people rated from 1
    to 5. Papers print the mean over the people of tau_b and of Spearman's correlation, so each
    person is a part of the set. ``references`` is how many of a video's references metrics see, the
    first ones; None is all of them (9). ``num_frames`` is how many frames of a video they see
    (``data.num_frames``); it is a file ``images/ID.mp4`` or a folder ``images/ID`` of frames. The
    released code rounds scores to 4 digits first; this does not.
    """
    captions, written, scores, ids = (
        np.asarray(_load_pickle(files.require(file)), object) for file in VATEX_FILES
    )
    count = len(captions)
    files.check_count("captions", count, 18_000)
    texts = [captions_of(list(row)) for row in written]
    most = min(map(len, texts))
    references = most if references is None else references
    if not 1 <= references <= most:
        raise DataError(
            f"references is {references}: expected 1 to {most}, the number of those in the files"
        )
    folder = files.image_folder("videos", "images")
    names = [str(name) for name in ids]
    videos = {name: _frames(folder, name, num_frames) for name in names}
    convention = (
        f"ratings of one of {RATERS} people, over whom papers print the mean; {references} "
        "references"
    )
    parts = []
    for number, person in enumerate(scores.reshape(RATERS, count), start=1):
        rows = [
            rated(name, caption, rating, own[:references], videos[name])
            for name, caption, rating, own in zip(
                names, captions, person, texts, strict=True
            )
        ]
        name = f"{files.name}, person {number}"
        parts.append(
            JudgementSet(
                name, rows, convention, published=["tau_b"], within_images=True
            )
        )
    return parts


def activitynet_foil(files: Files, num_frames: int = 10) -> list[JudgementSet]:
    """Read the four files of EMScore's release: sentences, foils, segments and references.

    Shi et al., CVPR 2022: paragraphs of 1,900 videos of ActivityNet Entities, and the same with a
    wrong noun. Sentences are scored against their segment of the video (``num_frames`` of it;
    ``images/ID.mp4``, or a folder of frames) and against the sentences of the second file that
    overlap with it; a paragraph's score is their mean. Sentences that are equal in both do not
    matter to that, so the pairs here are those that differ; the sums over the pairs of a paragraph
    are compared.
    """
    names = (RIGHT, FOILED, SEGMENTS, REFERENCES)
    right, foiled, first, second = (files.json(name) for name in names)
    folder = files.image_folder("videos", "images")
    rows: list[Judged] = []
    equal = "the sentence is the same in both paragraphs"
    excluded = {equal: 0}
    files.check_count("videos", len(right["results"]), 1900)
    for video in map(str, right["results"]):
        true, false = (
            [single_spaced(row["sentence"]) for row in content["results"][video]]
            for content in (right, foiled)
        )
        times, length = _times(first[video]), float(first[video]["duration"])
        for *captions, (start, end) in zip(
            true, false, times[: len(true)], strict=True
        ):
            if captions[0] == captions[1]:
                excluded[equal] += 1
                continue
            span = min(start / length, 1.0), min(end / length, 1.0)
            references = (_overlapping(second[video], (start, end)),)
            image = _frames(folder, video, num_frames, span)
            rows.append(Judged(video, captions, references=references, image=image))

    files.check_count("pairs", len(rows))
    convention = "the paragraph has a higher mean over its sentences than its foil; equal ones are wrong"
    return [
        JudgementSet(
            files.name,
            rows,
            convention,
            excluded,
            conditions=["overlapping references"],
            shown_kinds=False,
            by_image=True,
        )
    ]


def _load_pickle(path: Path) -> Any:
    with naming(str(path), (pickle.UnpicklingError, EOFError, ImportError), DataError):
        return _Arrays(io.BytesIO(path.read_bytes())).load()


def _frames(
    folder: Path | None,
    name: str,
    num_frames: int,
    span: tuple[float, float] = (0.0, 1.0),
) -> Frames | None:
    """Frames of a part of a video, which is a folder of frames or a file."""
    if folder is None:
        return None
    files = [folder / name, *(folder / f"{name}{suffix}" for suffix in _VIDEOS)]
    file = next((file for file in files if file.exists()), files[1])
    return video_frames(file, num_frames, span)


def _times(row: Mapping[str, Any]) -> list[tuple[float, float]]:
    """Start and end of each sentence of a video, in seconds."""
    spans = [(float(start), float(end)) for start, end in row["timestamps"]]
    if not all(0 <= start <= end for start, end in spans):
        raise ValueError("timestamps: expected pairs of seconds, in order")
    return spans


def _overlapping(row: Mapping[str, Any], time: tuple[float, float]) -> list[str]:
    """The sentences with more than ``OVERLAP`` of their whole seconds in ``time``, or all."""
    sentences, near = captions_of(row["sentences"]), []
    first, last = map(int, time)
    for text, interval in zip(sentences, _times(row), strict=True):
        start, end = map(int, interval)
        common = max(min(end, last) - max(start, first) + 1, 0)
        if common / (end - start + 1) > OVERLAP:
            near.append(text)
    return near or sentences
