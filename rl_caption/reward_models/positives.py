"""Generated images and captions of training rows: found to be there before a step wants them (docs/pac.md)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from rl_caption.data.base import SHOWN, DataError, Row
from rl_caption.data.file_checks import check_image_files
from rl_caption.reward_models.batch import Captions
from rl_caption.reward_models.students import Tower


def check_positives(
    rows: Sequence[Row],
    wanted: Collection[Tower],
    captions: Captions,
    check_pixels: bool = True,
    cache: str | Path | None = None,
) -> None:
    """Check that every training row has the positives that its steps may draw.

    Args:
        rows: of the training split.
        wanted: ``image`` for ``positive_images``, of which each reference that is learnt needs its own; ``text`` for
            ``positive_captions``, of which a row needs one.
        captions: the references that steps learn.
        check_pixels: decode every image file; False only looks whether it exists.
        cache: as for ``check_data``.

    Raises:
        DataError: positives are missing, or files of images cannot be read; with the count and the first offenders.
    """
    wrong, paths = [], dict[str, str]()
    for row in rows if wanted else ():
        if "text" in wanted and not row.get("positive_captions"):
            wrong.append(f"train {row['image_id']!r} has no positive_captions")
        if "image" in wanted:
            images, texts = row.get("positive_images", []), len(row["references"])
            if not (1 if captions == "first" else texts) <= len(images) <= texts:
                wrong.append(f"train {row['image_id']!r} has {len(images)} positive_images for {texts} reference(s)")
            paths |= {str(image): row["image_id"] for image in images if isinstance(image, str | Path)}
    if wrong:
        raise DataError(
            f"{'; '.join(wrong[:SHOWN])} ({len(wrong)} in all): expected positive_captions generated for the image, "
            "and positive_images generated for its references, one each in their order (the first alone with "
            "train.captions: first). A weight of 0 (loss.positive_captions, loss.positive_images) needs none"
        )
    verdicts = check_image_files(list(paths), check_pixels=check_pixels, cache=cache)
    bad = [f"train {paths[path]!r}, {path!r}: {verdict.error}" for path, verdict in verdicts.items() if verdict.error]
    if bad:
        raise DataError(f"{len(bad)} of {len(paths)} positive_images cannot be used: {'; '.join(bad[:SHOWN])}")
