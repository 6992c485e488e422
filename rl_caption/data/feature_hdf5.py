"""Region features in one HDF5 file for all images."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rewards.files import UNREADABLE_ARRAY, check_expansion
from rl_caption.data.base import DataError
from rl_caption.data.feature_stores import Arrays, Header, Names, Place

HDF5_PATTERNS = ("{image_id}_features", "{image_id}_grids", "{image_id}/features", "{image_id}")
"""Keys of an image's features in an HDF5 file, where no pattern is given: the first that fits an image."""
_BOXES_OF = {"{image_id}_features": "{image_id}_boxes", "{image_id}/features": "{image_id}/boxes"}


class FeatureHdf5:
    """One HDF5 file for all images, a data set per image. Needs h5py (``pip install rl-caption[features]``).

    The file is opened by the process that first reads from it, and not carried into another.

    Args:
        path: the file.
        pattern: the key of an image's features, such as ``{image_id}_features``; None takes the first of
            ``HDF5_PATTERNS`` that fits an image.
        boxes_pattern: the key of its boxes; None is the one that goes with the key of the features.

    Raises:
        DataError: h5py is not installed, or the file is not HDF5.
    """

    parallel = False  # the HDF5 library reads one thing at a time

    def __init__(self, path: Path, pattern: str | None = None, boxes_pattern: str | None = None) -> None:
        self.path = path
        self.pattern = pattern
        self.boxes_pattern = boxes_pattern
        self._opened: tuple[int, Any] | None = None
        self._file()

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without the open file."""
        return {**self.__dict__, "_opened": None}

    def _file(self) -> Any:
        process = os.getpid()
        if self._opened is None or self._opened[0] != process:
            try:
                import h5py
            except ImportError as error:
                raise DataError(
                    f"{self.path}: HDF5 needs h5py ({error}): pip install 'rl-caption[features]', or convert the file"
                ) from error
            if self._opened is not None:
                # A fork of the process that opened it. While that handle is open here, the HDF5 library would answer
                # with the same open file, whose descriptor and position the processes share.
                self._opened[1].close()
                self._opened = None
            try:
                self._opened = process, h5py.File(self.path, "r", locking=False)
            except OSError as error:
                raise DataError(f"{self.path} is not a readable HDF5 file: {error}") from error
        return self._opened[1]

    def places(self, names: Sequence[Names]) -> list[Place]:
        """The keys of each image, whether or not the file has them.

        Raises:
            DataError: no pattern was given, and none of the usual ones fits any image.
        """
        pattern = self.pattern or self._usual_pattern(names)
        boxes = self.boxes_pattern or _BOXES_OF.get(pattern)
        return [Place(name.fill(pattern), None if boxes is None else name.fill(boxes)) for name in names]

    def _usual_pattern(self, names: Sequence[Names]) -> str:
        file = self._file()
        for name in names:
            for pattern in HDF5_PATTERNS:
                if isinstance(file.get(name.fill(pattern)), _dataset_class()):
                    return pattern
        shown = ", ".join(repr(key) for key, _ in zip(file, range(4), strict=False)) or "none"
        first = names[0].image_id if names else "none"
        raise DataError(
            f"{self.path} has features of none of {len(names)} images: its keys are such as {shown}, the images' "
            f"ids such as {first!r}; give the key as data.features_kwargs.pattern, such as {{image_id}}_features"
        )

    def _dataset(self, key: str, where: str) -> Any:
        try:
            found = self._file().get(key)
        except UNREADABLE_ARRAY as error:
            raise DataError(f"{where}: cannot be read: {error}") from error
        if not isinstance(found, _dataset_class()):
            raise DataError(f"{where}: no such key; expected a data set {key!r}")
        return found

    def header(self, place: Place, where: str) -> Header:
        """Shapes of the data sets."""
        features = self._dataset(place.features, where)
        boxes = self._boxes(place)
        known = None if boxes is None else (boxes.shape, boxes.dtype)
        return Header([(features.shape, features.dtype)], known, None)

    def _boxes(self, place: Place) -> Any:
        """Their data set, or None."""
        found = None if place.boxes is None else self._file().get(place.boxes)
        return found if isinstance(found, _dataset_class()) else None

    def arrays(self, place: Place, where: str, with_boxes: bool) -> Arrays:
        """The values of the data sets; boxes only where they are asked for."""
        try:
            features = self._dataset(place.features, where)
            if features.dtype.kind not in "fiu":
                return Arrays([np.empty(0, features.dtype)], None, None)  # refused by its type, not read
            boxes = self._boxes(place) if with_boxes else None
            for stored in (features, boxes):
                if stored is not None:
                    check_expansion(stored.size * stored.dtype.itemsize, stored.id.get_storage_size())
            return Arrays([features[()]], None if boxes is None else boxes[()], None)
        except DataError:
            raise
        except UNREADABLE_ARRAY as error:
            raise DataError(f"{where}: cannot be read: {error}") from error

    def stamp(self, place: Place) -> tuple[str, int, int] | None:
        """Path and key, bytes and time of change of the whole file."""
        status = os.stat(self.path)
        return f"{self.path}::{place.features}", status.st_size, status.st_mtime_ns


def _dataset_class() -> type:
    import h5py

    return h5py.Dataset
