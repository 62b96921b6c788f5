"""Backgrounds, fills, colours and looks of the embedded data set."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from PIL import Image

_CONTRAST = 85.0  # the minimal distance between an object's colour and those around it


def draw_background(rng: np.random.Generator, size: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """Draws a background that blends two related colours by a texture.

    Returns:
        The picture, (size, size, 3) float32 in [0, 255], and the two colours.
    """
    first = rng.uniform(20, 235, 3)
    second = np.clip(first + rng.uniform(-70, 70, 3), 0, 255)
    texture = _TEXTURES[rng.integers(len(_TEXTURES))](rng, size)
    # A second, faint texture over the first: no two backgrounds share a pattern.
    blend = (0.75 * texture + 0.25 * _clouds(rng, size)).astype(np.float32)
    step = (second - first).astype(np.float32)
    return first.astype(np.float32) + blend[..., None] * step, [first, second]


def pick_colour(rng: np.random.Generator, around: list[np.ndarray]) -> np.ndarray:
    """Picks a random colour, (3,), that contrasts with all colours around it.

    Where no candidate has enough contrast, the one with the most is taken.
    """
    candidates = rng.uniform(0, 255, (48, 3))
    difference = candidates[:, None] - np.array(around)  # (48, A, 3)
    # Brightness weighs more than hue, as to eyes and to grey images.
    brightness = difference @ np.array([0.299, 0.587, 0.114])
    distance = np.sqrt(brightness**2 + (difference**2).sum(axis=-1) / 12).min(axis=1)
    enough = np.flatnonzero(distance >= _CONTRAST)
    return candidates[enough[0] if enough.size else distance.argmax()]


def draw_fill(rng: np.random.Generator, colour: np.ndarray, height: int, width: int) -> np.ndarray:
    """Draws an object's surface, (height, width, 3): its colour, lit from one side."""
    light = 1 + 0.18 * (_ramp(rng, max(height, width))[:height, :width, None] - 0.5)
    return np.clip(colour * light, 0, 255).astype(np.float32)


# Textures are (size, size) in [0, 1]. They use no per-pixel sine or exponential: those differ in
# their last bits between machines.


def _ramp(rng: np.random.Generator, size: int) -> np.ndarray:
    angle = rng.random() * 2 * np.pi
    along = np.linspace(-0.5, 0.5, size)
    plane = np.cos(angle) * along[None, :] + np.sin(angle) * along[:, None]
    return plane / np.sqrt(2) + 0.5


def _stripes(rng: np.random.Generator, size: int) -> np.ndarray:
    phase = _ramp(rng, size) * rng.uniform(4, 14) + rng.random()
    return np.clip(2.5 * np.abs(phase % 1 * 2 - 1) - 0.75, 0, 1)


def _checks(rng: np.random.Generator, size: int) -> np.ndarray:
    cell = size / rng.uniform(4, 10)
    cells = np.floor((np.arange(size) + rng.random() * cell) / cell)
    return (cells[None, :] + cells[:, None]) % 2


def _clouds(rng: np.random.Generator, size: int) -> np.ndarray:
    total = np.zeros((size, size))
    for octave, weight in ((4, 0.65), (15, 0.35)):
        grid = Image.fromarray(rng.random((octave, octave), dtype=np.float32))
        total += weight * np.asarray(grid.resize((size, size), Image.Resampling.BICUBIC))
    low, high = total.min(), total.max()
    return (total - low) / (high - low)


def _speckle(rng: np.random.Generator, size: int) -> np.ndarray:
    return rng.random((size, size)) ** 2


def _blobs(rng: np.random.Generator, size: int) -> np.ndarray:
    along = np.linspace(0, 1, size)
    total = np.zeros((size, size))
    for x, y, radius in zip(rng.random(7), rng.random(7), rng.uniform(0.05, 0.2, 7), strict=True):
        squared = (along[None, :] - x) ** 2 + (along[:, None] - y) ** 2
        total = np.maximum(total, 1 / (1 + (squared / radius**2) ** 2))
    return total


_TEXTURES = (_ramp, _stripes, _checks, _clouds, _speckle, _blobs)


# Looks: the same scene as another kind of picture. They take the image's generator, the picture as
# it is by default, (size, size, 3), and the topmost object of each pixel, (size, size), −1 for
# background.


def _keep(rng: np.random.Generator, picture: np.ndarray, owner: np.ndarray) -> np.ndarray:
    return picture


def _sketch(rng: np.random.Generator, picture: np.ndarray, owner: np.ndarray) -> np.ndarray:
    """Outlines in ink on white paper: neither objects nor the background have a colour."""
    padded = np.pad(owner, 1, mode="edge")
    near = (padded[:-2, 1:-1], padded[2:, 1:-1], padded[1:-1, :-2], padded[1:-1, 2:])
    ink = np.any([owner != each for each in near], axis=0)
    paper = 205 + 45 * _clouds(rng, len(owner))
    return np.where(ink, rng.uniform(10, 70), paper)[..., None] * np.ones(3)


def _night(rng: np.random.Generator, picture: np.ndarray, owner: np.ndarray) -> np.ndarray:
    """A fifth of the light, bluish, with the noise of a dark sensor."""
    noise = rng.random(picture.shape) + rng.random(picture.shape) - 1
    return picture / 5 + np.array([0, 4, 14]) + 12 * noise


LOOKS: dict[str, Callable[[np.random.Generator, np.ndarray, np.ndarray], np.ndarray]] = {
    "painted": _keep,
    "sketch": _sketch,
    "night": _night,
}
