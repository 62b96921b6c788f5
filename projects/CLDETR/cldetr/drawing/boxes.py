"""Boxes with labels on images, so that a person can read them: sizes, colours, legends, panels.

Small images are enlarged before anything is drawn on them. A label goes where it covers no other
label and hides no small object; one that finds no such spot is skipped, and the corner says how
many were.

All coordinates are pixels of the original image, boxes (left, top, right, bottom).
"""

from __future__ import annotations

import colorsys
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from cldetr.files import atomic_path

Color = tuple[int, int, int]
Corners = tuple[float, float, float, float]

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

    def corners_of(self, box: Box) -> Corners:
        """Corners in pixels of the canvas, clipped to it."""
        limits = np.tile(np.array(self.image.size) - 1.0, 2)
        x0, y0, x1, y1 = (np.array(box.corners) * self.scale).clip(0.0, limits).tolist()
        return x0, y0, max(x1, x0), max(y1, y0)


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
    if not boxes:
        return
    pen = ImageDraw.Draw(canvas.image)
    corners = np.array([canvas.corners_of(box) for box in boxes])  # (N, 4)
    short = min(canvas.image.size)
    crowded = len(boxes) > 20
    line = max(round(short / (320 if crowded else 200)), 1)
    for index in reversed(range(len(boxes))):
        _outline(pen, _inset(corners, index, line), boxes[index].color, line)
    font = _font(max(min(round(short / 34), 26), 13) - (2 if crowded else 0))
    labels = _Labels(pen, canvas.image.size, corners, font)
    skipped = sum(
        bool(box.text) and not labels.put(box.text, index, box.color)
        for index, box in enumerate(boxes)
    )
    if skipped:
        labels.note(f"{skipped} labels not shown")


class _Labels:
    """Writes texts one after the other, each where it covers the least."""

    def __init__(
        self,
        pen: ImageDraw.ImageDraw,
        size: tuple[int, int],
        boxes: np.ndarray,
        font: ImageFont.FreeTypeFont,
    ) -> None:
        self.pen = pen
        self.size = np.array(size, dtype=float)
        self.boxes = boxes
        self.areas = (boxes[:, 2:] - boxes[:, :2]).prod(axis=1).clip(min=1.0)
        self.font = font
        self.taken = np.zeros((0, 4))

    def put(self, text: str, index: int, color: Color) -> bool:
        """Writes a label at the best free spot by its box; False where there is none."""
        size = self._measure(text)
        starts = self._candidates(self.boxes[index], *size).clip(0, (self.size - size).clip(min=0))
        spots = np.concatenate([starts, starts + size], axis=1)
        # How much of each box a label would hide: small objects are not to vanish under a label.
        hidden = _shared_areas(spots, self.boxes) / self.areas
        free = _shared_areas(spots, self.taken).sum(axis=1) == 0
        free &= hidden.max(axis=1) <= _MAX_HIDDEN
        if not free.any():
            return False
        cost = np.where(free, hidden.sum(axis=1) + 0.04 * np.arange(len(spots)), np.inf)
        self._write(text, spots[int(cost.argmin())], color)
        return True

    def note(self, text: str) -> None:
        """Writes in the lower right corner."""
        self._write(text, np.concatenate([self.size - self._measure(text), self.size]), _INK)

    @staticmethod
    def _candidates(box: np.ndarray, width: float, height: float) -> np.ndarray:
        """Top left points of a label around a box, the preferred first, (N, 2)."""
        x0, y0, x1, y1 = box.tolist()
        left, right, above, below = x0 - width, x1 - width, y0 - height, y1 - height
        points = [(x0, above), (x0, y1), (right, above), (right, y1)]  # above and below
        points += [(x1, y0), (left, y0)]  # at its sides
        points += [(x0, y0), (x0, below), (right, y0), (right, below)]  # inside
        points += [(x1, below), (left, below)]
        points += [(x0, y0 - 2 * height), (x0, y0 - 3 * height)]  # further away
        points += [(x0, y1 + height), (x0, y1 + 2 * height)]
        return np.array(points)

    def _measure(self, text: str) -> np.ndarray:
        return np.array([self.font.getlength(text) + 6, sum(self.font.getmetrics()) + 2])

    def _write(self, text: str, spot: np.ndarray, color: Color) -> None:
        x0, y0, x1, y1 = spot.tolist()
        self.pen.rectangle((x0, y0, x1 - 1, y1 - 1), fill=color)
        self.pen.text((x0 + 3, y0 + 1), text, fill=_ink_on(color), font=self.font)
        self.taken = np.concatenate([self.taken, spot[None]])


def draw_links(
    image: Image.Image, links: Sequence[tuple[Corners, Corners, Color]], width: int = 2
) -> Image.Image:
    """Joins the centres of pairs of boxes, in pixels of `image`, by lines with numbered ends."""
    fine = 2  # drawn larger and reduced: smooth lines
    layer = Image.new("RGBA", (image.width * fine, image.height * fine))
    pen = ImageDraw.Draw(layer)
    radius = 9 * fine
    font = _font(12 * fine)
    taken: list[tuple[float, float]] = []
    pairs = []
    for *boxes, color in links:
        centres = [((x0 + x1) / 2 * fine, (y0 + y1) / 2 * fine) for x0, y0, x1, y1 in boxes]
        ends = [_clear(centre, taken, 2 * radius) for centre in centres]
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


def join_panels(
    images: Sequence[Image.Image],
    titles: Sequence[str],
    legend: Sequence[tuple[str, Color]] = (),
    gap: int = 12,
) -> tuple[Image.Image, list[tuple[int, int]]]:
    """Sets images of one size side by side, each under its title, with a legend below.

    Returns:
        the joined image and where each image's top left corner went.
    """
    font = _font(17)
    margin = 8
    texts = [_wrap(title, font, image.width) for title, image in zip(titles, images, strict=True)]
    line = sum(font.getmetrics()) + 2
    head = margin + line * max(len(lines) for lines in texts)
    foot = margin + line if legend else margin
    width = sum(image.width for image in images) + gap * (len(images) - 1) + 2 * margin
    sheet = Image.new("RGB", (width, head + max(x.height for x in images) + foot), _PAPER)
    pen = ImageDraw.Draw(sheet)
    corners = []
    left = margin
    for image, lines in zip(images, texts, strict=True):
        for row, text in enumerate(lines):
            pen.text((left, margin // 2 + row * line), text, fill=_INK, font=font)
        sheet.paste(image, (left, head))
        corners.append((left, head))
        left += image.width + gap
    x, y = float(margin), sheet.height - line - margin // 2 + 2
    for text, color in legend:
        pen.rectangle((x, y + 2, x + 22, y + line - 8), fill=color, outline=_INK)
        pen.text((x + 28, y - 2), text, fill=_INK, font=font)
        x += 28 + font.getlength(text) + 24
    return sheet, corners


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


def _clear(
    point: tuple[float, float], taken: Sequence[tuple[float, float]], distance: float
) -> tuple[float, float]:
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


def _wrap(text: str, font: ImageFont.FreeTypeFont, width: int) -> list[str]:
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and font.getlength(longer) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines


@functools.cache
def _font(size: int) -> ImageFont.FreeTypeFont:
    """DejaVu Sans, which matplotlib brings along and which knows most alphabets."""
    path = Path(matplotlib.get_data_path()) / "fonts/ttf/DejaVuSans.ttf"
    return ImageFont.truetype(str(path), size)
