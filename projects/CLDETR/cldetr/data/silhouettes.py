"""The outlines of the embedded data set's categories, and the drawing of their masks.

An outline is a list of closed polygons around the origin, x to the right and y down. The first is
filled, the following ones are cut out of it (the hole of a ring). Only the silhouette tells the
categories apart, at any rotation: a diamond is a narrow rhombus, never a turned square.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw

Outline = list[np.ndarray]  # polygons, each (V, 2) float64

SUPERSAMPLE = 4  # mask samples along each side of a pixel
_INSIDE = 15 * SUPERSAMPLE**2  # a grey value whose mean over a pixel's samples is always whole
_ARC_POINTS = 64


@dataclass(frozen=True)
class Mask:
    """One drawn silhouette in the smallest window of whole pixels that holds it."""

    coverage: np.ndarray  # (h, w) float32, the share of each pixel inside the silhouette
    box: tuple[float, float, float, float]  # tight x0 y0 x1 y1 in the window, in 1/SUPERSAMPLE px
    area: float  # pixels


def draw_silhouette(outline: Outline, extent: float, angle: float) -> Mask:
    """Draws an outline turned by `angle` (radians) so that its box's longer side is `extent` px.

    Vertices are rounded to the supersampled grid before anything is drawn, so that the last bits
    of sine and cosine, which differ between machines, do not reach the picture.
    """
    cos, sin = math.cos(angle), math.sin(angle)
    turned = [polygon @ np.array([[cos, sin], [-sin, cos]]) for polygon in outline]
    low, high = turned[0].min(axis=0), turned[0].max(axis=0)
    scale = (extent * SUPERSAMPLE - 1) / (high - low).max()
    # Half a grid step of margin in the rounding keeps every vertex at or above 0.
    corners = [np.floor((polygon - low) * scale + 0.5).astype(int) for polygon in turned]
    width, height = (-(-(corners[0].max(axis=0) + 1) // SUPERSAMPLE)).tolist()

    canvas = Image.new("L", (width * SUPERSAMPLE, height * SUPERSAMPLE), 0)
    pen = ImageDraw.Draw(canvas)
    for number, polygon in enumerate(corners):
        pen.polygon([tuple(corner) for corner in polygon.tolist()], fill=0 if number else _INSIDE)
    x0, y0, x1, y1 = (side / SUPERSAMPLE for side in canvas.getbbox() or (0, 0, 0, 0))
    coverage = np.asarray(canvas.reduce(SUPERSAMPLE), dtype=np.float32) / _INSIDE
    return Mask(coverage=coverage, box=(x0, y0, x1, y1), area=float(coverage.sum()))


def _polygon(*vertices: tuple[float, float]) -> np.ndarray:
    return np.array(vertices, dtype=np.float64)


def _polar(radius: Callable[[np.ndarray], np.ndarray], points: int = _ARC_POINTS) -> np.ndarray:
    angles = 2 * np.pi * np.arange(points) / points
    return np.stack([np.cos(angles), np.sin(angles)], axis=1) * radius(angles)[:, None]


def _arc(
    start: float, stop: float, radius: float = 1.0, x: float = 0.0, y: float = 0.0
) -> np.ndarray:
    angles = np.linspace(start, stop, _ARC_POINTS)
    return np.stack([x + radius * np.cos(angles), y + radius * np.sin(angles)], axis=1)


def _regular(corners: int) -> np.ndarray:
    return _polar(lambda angles: np.ones_like(angles), corners)


def _spikes(points: int, inner: float) -> np.ndarray:
    return _polar(lambda angles: np.where(np.arange(angles.size) % 2, inner, 1.0), 2 * points)


def _heart() -> np.ndarray:
    t = 2 * np.pi * np.arange(_ARC_POINTS) / _ARC_POINTS
    y = 13 * np.cos(t) - 5 * np.cos(2 * t) - 2 * np.cos(3 * t) - np.cos(4 * t)
    return np.stack([16 * np.sin(t) ** 3, -y], axis=1)


def _crescent() -> np.ndarray:
    # The outer circle's far side, then back along a smaller circle through the same two tips.
    tip = math.radians(48)
    outer = _arc(tip, 2 * math.pi - tip)
    inner_x, inner_radius = 0.45, math.hypot(math.cos(tip) - 0.45, math.sin(tip))
    inner_tip = math.atan2(math.sin(tip), math.cos(tip) - inner_x)
    return np.concatenate(
        [outer, _arc(2 * math.pi - inner_tip, inner_tip, inner_radius, x=inner_x)]
    )


def _drop() -> np.ndarray:
    tangent = math.asin(1 / 2)  # a circle of radius 1 seen from a tip 2 away
    return np.concatenate([_polygon((0.0, -2.0)), _arc(-tangent, math.pi + tangent)])


def _sector(mouth: float) -> np.ndarray:
    return np.concatenate([_polygon((0.0, 0.0)), _arc(mouth / 2, 2 * math.pi - mouth / 2)])


# In the order of the category ids. A data set of K categories takes the first K.
SILHOUETTES: dict[str, Outline] = {
    "circle": [_regular(_ARC_POINTS)],
    "square": [_polygon((-1, -1), (1, -1), (1, 1), (-1, 1))],
    "triangle": [_regular(3)],
    "star": [_spikes(5, 0.42)],
    "ring": [_regular(_ARC_POINTS), 0.55 * _regular(_ARC_POINTS)],
    "cross": [
        _polygon(
            *[(-1, -3), (1, -3), (1, -1), (3, -1), (3, 1), (1, 1)],
            *[(1, 3), (-1, 3), (-1, 1), (-3, 1), (-3, -1), (-1, -1)],
        )
    ],
    "heart": [_heart()],
    "crescent": [_crescent()],
    "arrow": [_polygon((-5, -1.4), (0, -1.4), (0, -4), (5, 0), (0, 4), (0, 1.4), (-5, 1.4))],
    "diamond": [_polygon((0, -2), (1, 0), (0, 2), (-1, 0))],
    "bolt": [
        _polygon(
            (0.2, -3), (1.9, -3), (0.6, -0.8), (1.7, -0.8), (-1.3, 3), (-0.4, 0.3), (-1.6, 0.3)
        )
    ],
    "semicircle": [_arc(0, math.pi)],
    "hourglass": [_polygon((-2, -3), (2, -3), (0.4, 0), (2, 3), (-2, 3), (-0.4, 0))],
    "drop": [_drop()],
    "corner": [_polygon((-2, -2), (-0.6, -2), (-0.6, 0.6), (2, 0.6), (2, 2), (-2, 2))],
    "clover": [_polar(lambda angles: 0.62 + 0.38 * np.cos(4 * angles), 2 * _ARC_POINTS)],
    "sector": [_sector(math.radians(90))],
    "frame": [
        _polygon((-1, -1), (1, -1), (1, 1), (-1, 1)),
        0.5 * _polygon((-1, -1), (1, -1), (1, 1), (-1, 1)),
    ],
    "hexagon": [_regular(6)],
    "tee": [_polygon((-3, -3), (3, -3), (3, -1), (1, -1), (1, 3), (-1, 3), (-1, -1), (-3, -1))],
}
