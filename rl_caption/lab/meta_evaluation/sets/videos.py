"""Sets of judged captions of videos; one function for each set, named as in ``SETS``."""

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
    rated_row,
)

RATERS = 3
OVERLAP = 0.4
"""A reference counts if more than this fraction of its seconds overlap with the
sentence. From the released code, whose comment says one half.
"""
_VIDEOS = ("", ".mp4", ".webm", ".mkv", ".avi", ".gif")
_ARRAYS = {
    "numpy.ndarray",
    "numpy.dtype",
    "numpy.core.multiarray._reconstruct",
    "numpy.core.multiarray.scalar",
    "numpy.core.numeric._frombuffer",
    "_codecs.encode",
}
"""All classes and functions in the pickled arrays of VATEX-EVAL; nothing else is
called.
"""


class _Arrays(pickle.Unpickler):
    """Unpickler of lists, texts, numbers and arrays; any other object in the file is an
    error, and is not executed.
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
    """Read ``candidates_list.pkl``, ``gts_list.pkl``, ``human_scores.pkl`` and
    ``video_ids.pkl`` of EMScore's release.

    Shi et al., CVPR 2022: 6 captions of each of 3,000 videos of VATEX, which 3 people
    rated from 1 to 5. Papers print the mean over the people of tau_b and of Spearman's
    correlation, so each person is a part of the set. Metrics see the first
    ``references`` references of a video (None: all 9), and ``num_frames`` frames
    (``data.num_frames``) of the file ``images/ID.mp4`` or the folder ``images/ID``. The
    released code rounds scores to 4 digits; this code does not.
    """
    lists = "candidates_list", "gts_list", "human_scores", "video_ids"
    captions, written, scores, ids = (_load_pickle(files, name) for name in lists)
    count = len(captions)
    files.check_count("captions", count, 18_000)
    texts = [captions_of(list(row)) for row in written]
    most = min(map(len, texts))
    num_references = most if references is None else references
    if not 1 <= num_references <= most:
        raise DataError(
            f"references is {num_references}: expected 1 to {most}, the number of those in the files"
        )
    folder = files.image_folder("videos", "images")
    names = list(map(str, ids))
    videos = {name: _frames(folder, name, num_frames) for name in names}
    convention = f"ratings of one of {RATERS} people, over whom papers print the mean; {num_references} references"
    judgement_sets = []
    for number, person in enumerate(scores.reshape(RATERS, count), start=1):
        rows = []
        for name, caption, rating, video_references in zip(
            names, captions, person, texts, strict=True
        ):
            rows.append(
                rated_row(
                    name,
                    caption,
                    rating,
                    video_references[:num_references],
                    videos[name],
                )
            )
        title = f"{files.name}, person {number}"
        judgement_sets.append(
            JudgementSet(
                title, rows, convention, published=["tau_b"], within_images=True
            )
        )
    return judgement_sets


def activitynet_foil(files: Files, num_frames: int = 10) -> list[JudgementSet]:
    """Read the four files of EMScore's release: sentences, foils, segments and references.

    Shi et al., CVPR 2022: paragraphs of 1,900 videos of ActivityNet Entities, and the
    same paragraphs with a wrong noun. A sentence is scored against ``num_frames``
    frames of its segment of the video (``images/ID.mp4``, or a folder of frames) and
    against overlapping sentences of the second file; a paragraph's score is the mean
    over its sentences. Sentences that are equal in both paragraphs do not change the
    order, so the pairs here are the sentences that differ; their sums over a paragraph
    are compared.
    """
    right, foiled = (
        files.json(f"final_{name}_video_sentences.json")["results"]
        for name in ("right", "foil")
    )
    segments, written = (files.json(f"anet_entities_test_{n}.json") for n in (1, 2))
    folder = files.image_folder("videos", "images")
    files.check_count("videos", len(right), 1900)
    rows: list[Judged] = []
    equal = 0
    for video, sentences in right.items():
        length, times = segments[video]["duration"], segments[video]["timestamps"]
        for true, false, (start, end) in zip(
            sentences, foiled[video], times[: len(sentences)], strict=True
        ):
            captions = [single_spaced(row["sentence"]) for row in (true, false)]
            if captions[0] == captions[1]:
                equal += 1
                continue
            span = min(start / length, 1.0), min(end / length, 1.0)
            references = (_overlapping(written[video], start, end),)
            image = _frames(folder, video, num_frames, span)
            rows.append(Judged(video, captions, references=references, image=image))
    files.check_count("pairs", len(rows))
    return [
        JudgementSet(
            files.name,
            rows,
            "the paragraph has a higher mean over its sentences than its foil; equal ones are wrong",
            {"the sentence is the same in both paragraphs": equal},
            conditions=["overlapping references"],
            shown_kinds=False,
            by_image=True,
        )
    ]


def _load_pickle(files: Files, name: str) -> Any:
    path = files.require(f"{name}.pkl")
    with naming(
        str(path),
        (pickle.UnpicklingError, EOFError, ImportError),
        DataError,
    ):
        return np.asarray(_Arrays(io.BytesIO(path.read_bytes())).load(), object)


def _frames(
    folder: Path | None,
    name: str,
    num_frames: int,
    span: tuple[float, float] = (0.0, 1.0),
) -> Frames | None:
    """Frames of a part of a video (a folder of frames or a file); None without a
    folder.
    """
    if folder is None:
        return None
    files = [folder / f"{name}{suffix}" for suffix in _VIDEOS]
    file = next((file for file in files if file.exists()), files[1])
    return video_frames(file, num_frames, span)


def _overlapping(row: Mapping[str, Any], start: float, end: float) -> list[str]:
    """Sentences with more than ``OVERLAP`` of their seconds in the segment, or else
    all.
    """
    sentences, near = captions_of(row["sentences"]), []
    for text, time in zip(sentences, row["timestamps"], strict=True):
        first, last = map(int, time)
        common = min(last, int(end)) - max(first, int(start)) + 1
        if common / (last - first + 1) > OVERLAP:
            near.append(text)
    return near or sentences
