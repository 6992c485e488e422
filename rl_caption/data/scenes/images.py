"""The image of a scene, drawn when it is needed and kept while there is room."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from rl_caption.data.scenes.render import render
from rl_caption.data.scenes.world import Scene

CACHE_BYTES = 64 * 2**20
"""How much memory drawn images may take in each process: 5461 images of 64 pixels."""


@dataclass(frozen=True)
class SceneImage:
    """A scene as an image of ``size`` by ``size`` pixels; small to pickle, equal when scene and size are equal."""

    scene: Scene
    size: int = 64

    def render(self) -> Image.Image:
        """Draw the image as RGB. The caller may change what it gets."""
        return Image.fromarray(_CACHE.pixels(self))


class _Cache:
    """Pixels of recently drawn images, up to a number of bytes; the least recently used go first."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self._drawn: OrderedDict[SceneImage, NDArray[np.uint8]] = OrderedDict()
        self._lock = threading.Lock()

    def pixels(self, image: SceneImage) -> NDArray[np.uint8]:
        """Return [size, size, 3] in 0 .. 255, read-only."""
        with self._lock:
            if image in self._drawn:
                self._drawn.move_to_end(image)
                return self._drawn[image]
            pixels = np.asarray(render(image.scene, image.size))
            pixels.flags.writeable = False
            self._drawn[image] = pixels
            self.bytes += pixels.nbytes
            while self.bytes > self.max_bytes and len(self._drawn) > 1:
                self.bytes -= self._drawn.popitem(last=False)[1].nbytes
            return pixels


_CACHE = _Cache(CACHE_BYTES)
