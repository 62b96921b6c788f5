"""Drawing: sizes, colours where the boxes are, labels that do not cover each other."""

import numpy as np
import pytest
from PIL import ImageDraw

from cldetr.drawing.boxes import (
    BLUE,
    GREEN,
    Box,
    _font,
    class_color,
    draw_boxes,
    draw_panels,
    make_canvas,
    place_labels,
)


def grey(height, width):
    return np.full((height, width, 3), 128, dtype=np.uint8)


def has_color(image, color, spot):
    """Whether a colour is at a spot (left, top, right, bottom) of an image."""
    x0, y0, x1, y1 = (round(value) for value in spot)
    pixels = np.asarray(image)[y0:y1, x0:x1].reshape(-1, 3)
    return bool((pixels == color).all(axis=1).any())


@pytest.mark.parametrize(
    ("size", "fit", "expected"),
    [
        ((96, 96), False, (480, 480)),
        ((96, 128), False, (480, 640)),
        ((600, 900), False, (600, 900)),
        ((10, 2000), False, (10, 2000)),
        ((10, 400), False, (40, 1600)),
        ((600, 900), True, (480, 720)),
        ((500, 2000), True, (200, 800)),
    ],
)
def test_small_images_are_enlarged_and_panels_fit(size, fit, expected):
    canvas = make_canvas(grey(*size), fit=fit)
    assert (canvas.image.height, canvas.image.width) == expected
    assert canvas.scale == pytest.approx(expected[1] / size[1])


def test_the_outline_is_where_the_box_is():
    canvas = make_canvas(grey(96, 96))
    draw_boxes(canvas, [Box((20, 30, 60, 70), GREEN, "cat")])
    left, top, right, bottom = (5 * value for value in (20, 30, 60, 70))
    for edge in (
        (left, top + 40, left + 4, bottom),
        (right - 3, top, right + 1, bottom),
        (left, bottom - 3, right, bottom + 1),
    ):
        assert has_color(canvas.image, GREEN, edge)
    assert not has_color(canvas.image, GREEN, (left + 20, top + 20, right - 20, bottom - 20))


def test_boxes_beyond_the_border_are_drawn_at_it():
    canvas = make_canvas(grey(96, 96))
    draw_boxes(canvas, [Box((-20, -20, 200, 200), BLUE)])
    assert has_color(canvas.image, BLUE, (0, 100, 6, 400))
    assert has_color(canvas.image, BLUE, (474, 100, 480, 400))


def test_one_box_does_not_hide_another_at_the_same_spot():
    canvas = make_canvas(grey(96, 96))
    draw_boxes(canvas, [Box((20, 20, 60, 60), GREEN), Box((20, 20, 60, 60), BLUE)])
    side = (98, 150, 125, 250)
    assert has_color(canvas.image, GREEN, side)
    assert has_color(canvas.image, BLUE, side)


def shared_areas(boxes, others):
    low = np.maximum(boxes[:, None, :2], others[None, :, :2])
    high = np.minimum(boxes[:, None, 2:], others[None, :, 2:])
    return (high - low).clip(min=0).prod(axis=2)


@pytest.fixture
def written(monkeypatch):
    """Texts of the labels that are drawn."""
    found = []
    monkeypatch.setattr(
        ImageDraw.ImageDraw, "text", lambda self, point, text, **style: found.append(text)
    )
    return found


def test_labels_never_cover_each_other_and_what_has_no_room_is_counted(written):
    rng = np.random.default_rng(0)
    low = rng.uniform(0, 80, (80, 2))
    corners = np.concatenate([low, low + rng.uniform(2, 30, (80, 2))], axis=1)
    texts = [f"class {i}" for i in range(80)]
    canvas = make_canvas(grey(96, 96))
    boxes = [Box(tuple(x), class_color(i), texts[i]) for i, x in enumerate(corners)]
    draw_boxes(canvas, boxes)
    *labels, note = written
    assert note == f"{80 - len(labels)} labels not shown"
    assert len(labels) > 30
    spots = place_labels(canvas.corners_of(boxes), texts, (480, 480), _font(12))
    spots = np.array([spot for spot in spots if spot])
    assert len(spots) == len(labels)
    shared = shared_areas(spots, spots)
    np.fill_diagonal(shared, 0)
    assert shared.max() == 0
    assert (spots >= 0).all()
    assert (spots[:, 2:] <= 480).all()


def test_no_label_hides_a_small_object(written):
    small = [(x, y, x + 2, y + 2) for x in range(0, 94, 3) for y in range(0, 94, 3)]
    large = Box((30, 30, 60, 60), GREEN, "a large one")
    draw_boxes(make_canvas(grey(96, 96)), [large, *(Box(x, BLUE) for x in small)])
    assert written == ["1 label not shown"]  # there is no room between them
    boxes = np.array([[30, 30, 60, 60], [30, 26, 34, 30]]) * 5.0
    spot, _ = place_labels(boxes, ["a large one", ""], (480, 480), _font(14))
    assert shared_areas(np.array([spot]), boxes[1:]).item() == 0


def test_panels_keep_their_pixels_and_titles_their_room():
    panels = [("a", []), ("b " * 80, [Box((10, 20, 30, 40), GREEN)])]
    sheet, centres = draw_panels(grey(480, 480), panels, {"ground truth": GREEN})
    left, top = (round(x) for x in centres[1][0] - (492 + 20, 30))
    np.testing.assert_array_equal(
        np.asarray(sheet)[top : top + 480, left : left + 480], grey(480, 480)
    )
    assert top > 40  # the long title takes lines of its own
    assert has_color(sheet, GREEN, (0, sheet.height - 30, 60, sheet.height))


def test_colors_of_neighbouring_classes_differ():
    colors = np.array([class_color(label) for label in range(80)], dtype=float)
    apart = np.linalg.norm(colors[:, None] - colors[None], axis=2)
    assert min(apart[i, i + 1] for i in range(79)) > 80
