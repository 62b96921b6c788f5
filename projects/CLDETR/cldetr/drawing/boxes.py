"""Boxes with labels on images, so that a person can read them: sizes, colours, legends, panels.

Small images are enlarged before anything is drawn on them. A label goes where it covers no other
label and hides no small object; one that finds no such spot is skipped, and the corner says how
many were.

All coordinates are pixels of the original image, boxes (left, top, right, bottom).
"""

from __future__ import annotations

import colorsys
import functools
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from cldetr.files import atomic_path

Color = tuple[int, int, int]
Corners = tuple[float, float, float, float]
Point = tuple[float, float]

# The paper's colours (Figures 3 and S1).
GREEN: Color = (20, 196, 20)  # ground truth
BLUE: Color = (20, 20, 242)  # pseudo-labels
YELLOW: Color = (247, 217, 110)  # predictions
GREY: Color = (150, 150, 150)  # what was dropped
RED: Color = (226, 60, 40)  # what is wrong

_SHORT_SIDE = 480  # images smaller than this are enlarged to it
_LONG_SIDE = 1600  # but not beyond this
_MAX_HIDDEN = 0.5  # of a box, by a label
_INK: Color = (33, 33, 33)
_PAPER: Color = (255, 255, 255)


@dataclass(frozen=True)
class Box:
    """A box to draw, with what is written beside it."""

    corners: Corners
    color: Color
    text: str = ""


@dataclass(frozen=True)
class Canvas:
    """An image that is drawn on, and how much it was enlarged."""

    image: Image.Image
    scale: float

    def corners_of(self, boxes: Sequence[Box]) -> np.ndarray:
        """Corners (N, 4) in pixels of the canvas, clipped to it."""
        limits = np.tile(self.image.size, 2) - 1.0
        corners = np.array([box.corners for box in boxes]).reshape(-1, 4) * self.scale
        corners = corners.clip(0.0, limits)
        corners[:, 2:] = np.maximum(corners[:, :2], corners[:, 2:])
        return corners


def make_canvas(pixels: np.ndarray, short_side: int = _SHORT_SIDE, fit: bool = False) -> Canvas:
    """Copies an RGB image (H, W, 3) to draw on, enlarged where it is smaller than `short_side`.

    With `fit` a larger one is reduced to it too, and its long side to at most 5/3 of that.
    """
    image = Image.fromarray(np.ascontiguousarray(pixels, dtype=np.uint8))
    short, long = sorted(image.size)
    scale = min(short_side / short, (short_side * 5 / 3 if fit else _LONG_SIDE) / long)
    if not fit:
        scale = max(scale, 1.0)
    if scale != 1.0:
        size = (max(round(image.width * scale), 1), max(round(image.height * scale), 1))
        image = image.resize(size, Image.Resampling.BICUBIC)
    return Canvas(image, scale)


def draw_boxes(canvas: Canvas, boxes: Sequence[Box]) -> None:
    """Draws boxes, then their labels on top, those of the first boxes at the best spots."""
    pen = ImageDraw.Draw(canvas.image)
    corners = canvas.corners_of(boxes)
    short = min(canvas.image.size)
    crowded = len(boxes) > 20
    line = max(round(short / (320 if crowded else 200)), 1)
    for index in reversed(range(len(boxes))):
        _outline(pen, _inset(corners, index, line), boxes[index].color, line)
    font = _font(max(min(round(short / 34), 26), 13) - (2 if crowded else 0))
    labels = place_labels(corners, [box.text for box in boxes], canvas.image.size, font)
    shown = [(box.text, spot, box.color) for box, spot in zip(boxes, labels, strict=True) if spot]
    skipped = sum(bool(box.text) for box in boxes) - len(shown)
    if skipped:
        note = f"{skipped} label{'s' * (skipped > 1)} not shown"
        width, height = _text_size(note, font)
        right, bottom = canvas.image.size
        shown.append((note, (right - width, bottom - height, right, bottom), _INK))
    for text, (x0, y0, x1, y1), color in shown:
        pen.rectangle((x0, y0, x1 - 1, y1 - 1), fill=color)
        pen.text((x0 + 3, y0 + 1), text, fill=_ink_on(color), font=font)


def place_labels(
    boxes: np.ndarray,
    texts: Sequence[str],
    size: tuple[int, int],
    font: ImageFont.FreeTypeFont,
) -> list[Corners | None]:
    """Where the label of each box covers the least; None where there is no text or no free spot.

    Args:
        boxes: (N, 4) corners in pixels of the picture; the labels of the first choose first.
        texts: of the labels.
        size: width and height of the picture.
        font: of the labels.
    """
    areas = (boxes[:, 2:] - boxes[:, :2]).prod(axis=1).clip(min=1.0)
    taken = np.zeros((0, 4))
    placed: list[Corners | None] = []
    for box, text in zip(boxes, texts, strict=True):
        spots = _spots_around(box, _text_size(text, font), np.array(size))
        # How much of each box a label would hide: small objects are not to vanish under a label.
        hidden = _shared_areas(spots, boxes) / areas
        free = _shared_areas(spots, taken).sum(axis=1) == 0
        free &= hidden.max(axis=1) <= _MAX_HIDDEN
        if not text or not free.any():
            placed.append(None)
            continue
        cost = np.where(free, hidden.sum(axis=1) + 0.04 * np.arange(len(spots)), np.inf)
        x0, y0, x1, y1 = spots[cost.argmin()].tolist()
        placed.append((x0, y0, x1, y1))
        taken = np.concatenate([taken, spots[cost.argmin(), None]])
    return placed


def _text_size(text: str, font: ImageFont.FreeTypeFont) -> tuple[float, float]:
    return font.getlength(text) + 6, sum(font.getmetrics()) + 2


def _spots_around(box: np.ndarray, size: tuple[float, float], limits: np.ndarray) -> np.ndarray:
    """Where a label of a size may go around a box, the preferred first, (M, 4)."""
    (x0, y0, x1, y1), (width, height) = box.tolist(), size
    left, right, above, below = x0 - width, x1 - width, y0 - height, y1 - height
    points = [(x0, above), (x0, y1), (right, above), (right, y1)]  # above and below
    points += [(x1, y0), (left, y0)]  # at its sides
    points += [(x0, y0), (x0, below), (right, y0), (right, below)]  # inside
    points += [(x1, below), (left, below)]
    points += [(x0, above - height), (x0, above - 2 * height)]  # further away
    points += [(x0, y1 + height), (x0, y1 + 2 * height)]
    starts = np.array(points).clip(0, (limits - size).clip(min=0))
    return np.concatenate([starts, starts + size], axis=1)


def draw_links(
    image: Image.Image, links: Sequence[tuple[Point, Point, Color]], width: int = 2
) -> Image.Image:
    """Joins pairs of points by lines with numbered ends."""
    fine = 2  # drawn larger and reduced: smooth lines
    layer = Image.new("RGBA", (image.width * fine, image.height * fine))
    pen = ImageDraw.Draw(layer)
    radius = 9 * fine
    font = _font(12 * fine)
    taken: list[Point] = []
    pairs = []
    for *points, color in links:
        ends = [_clear((x * fine, y * fine), taken, 2 * radius) for x, y in points]
        taken += ends
        pairs.append((ends, color))
    for ends, color in pairs:
        pen.line(ends, fill=(*_PAPER, 170), width=(width + 2) * fine)
        pen.line(ends, fill=(*color, 255), width=width * fine)
    for number, (ends, color) in enumerate(pairs, start=1):
        for x, y in ends:
            circle = (x - radius, y - radius, x + radius, y + radius)
            pen.ellipse(circle, fill=(*color, 255), outline=(*_PAPER, 255), width=fine)
            pen.text((x, y), str(number), fill=_ink_on(color), font=font, anchor="mm")
    layer = layer.resize(image.size, Image.Resampling.BOX)
    return Image.alpha_composite(image.convert("RGBA"), layer).convert("RGB")


def draw_panels(
    pixels: np.ndarray,
    panels: Sequence[tuple[str, Sequence[Box]]],
    legend: Mapping[str, Color],
    short_side: int = _SHORT_SIDE,
) -> tuple[Image.Image, list[np.ndarray]]:
    """Draws an image several times side by side, each with a title and boxes of its own.

    Returns:
        the sheet, with the legend below, and for each panel the centres of its boxes on the sheet.
    """
    font, margin, gap = _font(17), 8, 12
    line = sum(font.getmetrics()) + 2
    canvases = [make_canvas(pixels, short_side, fit=True) for _ in panels]
    width, height = canvases[0].image.size
    titles = [
        textwrap.wrap(title, int(width * len(title) / font.getlength(title))) for title, _ in panels
    ]
    top = margin + line * max(len(lines) for lines in titles)
    lefts = [margin + number * (width + gap) for number in range(len(panels))]
    size = (lefts[-1] + width + margin, top + height + margin + line)
    sheet = Image.new("RGB", size, _PAPER)
    pen = ImageDraw.Draw(sheet)
    centres = []
    for canvas, (_, boxes), lines, left in zip(canvases, panels, titles, lefts, strict=True):
        draw_boxes(canvas, boxes)
        sheet.paste(canvas.image, (left, top))
        for row, text in enumerate(lines):
            pen.text((left, margin // 2 + row * line), text, fill=_INK, font=font)
        corners = canvas.corners_of(boxes) + np.array([left, top, left, top])
        centres.append((corners[:, :2] + corners[:, 2:]) / 2)
    x, y = float(margin), sheet.height - line - margin // 2 + 2
    for text, color in legend.items():
        pen.rectangle((x, y + 2, x + 22, y + line - 8), fill=color, outline=_INK)
        pen.text((x + 28, y - 2), text, fill=_INK, font=font)
        x += 28 + font.getlength(text) + 24
    return sheet, centres


def save_png(image: Image.Image, path: Path) -> None:
    """Writes a picture, whole or not at all; little compression takes a third of the time."""
    with atomic_path(path) as partial:
        image.save(partial, format="PNG", compress_level=1)


def class_color(label: int) -> Color:
    """A colour for a class; neighbours differ clearly, and every one can be seen on a photo."""
    hue = (0.02 + label * 0.618034) % 1.0
    red, green, blue = colorsys.hls_to_rgb(hue, (0.55, 0.42, 0.66)[label % 3], 0.85)
    return round(red * 255), round(green * 255), round(blue * 255)


def _ink_on(color: Color) -> Color:
    """Black or white, whichever reads better on a colour."""
    red, green, blue = color
    return _INK if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else _PAPER


def _clear(point: Point, taken: Sequence[Point], distance: float) -> Point:
    """The nearest point below that keeps its distance from others."""
    x, y = point
    for other_x, other_y in sorted(taken, key=lambda other: other[1]):
        if abs(x - other_x) < distance and abs(y - other_y) < distance:
            y = other_y + distance
    return x, y


def _inset(boxes: np.ndarray, index: int, line: int) -> Corners:
    """A box, drawn inside of those before it whose outlines it would cover."""
    x0, y0, x1, y1 = boxes[index].tolist()
    same = int((abs(boxes[:index] - boxes[index]) <= 2 * line).all(axis=1).sum())
    shift = min(same * (line + 3), (x1 - x0) / 3, (y1 - y0) / 3)
    return x0 + shift, y0 + shift, x1 - shift, y1 - shift


def _outline(pen: ImageDraw.ImageDraw, corners: Corners, color: Color, width: int) -> None:
    """A rectangle whose dark rim keeps it visible on a ground of its own colour."""
    x0, y0, x1, y1 = corners
    rim = (x0 - 1, y0 - 1, x1 + 1, y1 + 1)
    pen.rectangle(rim, outline=tuple(value // 3 for value in color), width=width + 2)
    pen.rectangle(corners, outline=color, width=width)


def _shared_areas(boxes: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Areas that boxes (N, 4) share with others (M, 4), (N, M)."""
    low = np.maximum(boxes[:, None, :2], others[None, :, :2])
    high = np.minimum(boxes[:, None, 2:], others[None, :, 2:])
    return (high - low).clip(min=0).prod(axis=2)


@functools.cache
def _font(size: int) -> ImageFont.FreeTypeFont:
    """DejaVu Sans, which matplotlib brings along and which knows most alphabets."""
    path = Path(matplotlib.get_data_path()) / "fonts/ttf/DejaVuSans.ttf"
    return ImageFont.truetype(str(path), size)
