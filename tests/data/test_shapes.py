import hashlib
import json
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pycocotools.coco import COCO
from scipy import ndimage

from cldetr.cli import main
from cldetr.data.shapes import (
    MARKER,
    SPLITS,
    ShapesOptions,
    category_shares,
    draw_image,
    ensure_shapes,
)
from cldetr.data.silhouettes import SILHOUETTES, draw_silhouette
from cldetr.data.textures import LOOKS
from cldetr.errors import InputError

SMALL = ShapesOptions(train_images=60, val_images=20, seed=3)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return ensure_shapes(tmp_path_factory.mktemp("shapes") / "shapes", SMALL)


def contents(root: Path) -> dict[str, bytes]:
    files = (path for path in sorted(root.rglob("*")) if path.is_file())
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


def test_same_seed_gives_the_same_bytes_and_another_seed_other_pictures(data, tmp_path):
    first = contents(data.root)
    again = contents(ensure_shapes(tmp_path / "again", SMALL).root)
    other = ensure_shapes(tmp_path / "other", ShapesOptions(**{**vars(SMALL), "seed": 4}))
    assert first == again
    assert len(first) == 60 + 20 + 3
    shared = [name for name, content in contents(other.root).items() if first[name] == content]
    assert shared == []


def test_the_default_data_set_never_changes():
    """The published numbers of the demo depend on every pixel and every box."""
    digest = hashlib.sha256()
    for split in SPLITS:
        for index in range(20):
            scene = draw_image(ShapesOptions(), split, index)
            for part in (scene.pixels, scene.labels, scene.boxes, scene.areas):
                digest.update(part.tobytes())
    assert digest.hexdigest() == "3a99f553a0aa8e9949cf1a95d514a5d94355f920c77a02b2ece0b884f8ac99b1"


def test_defaults_of_later_options_are_not_stated_so_that_older_data_sets_stay_valid(data):
    """Runs know their data by the bytes of the annotation file."""
    content = json.loads(data.annotations("train").read_text())
    assert content["info"].keys() == {"description", *vars(SMALL)} - {"look", "smallest"}
    assert not {"look", "smallest"} & {*json.loads((data.root / MARKER).read_text())["request"]}


def test_smaller_objects_are_drawn_where_asked_for():
    drawn = [draw_image(ShapesOptions(size=192, smallest=0.05), "train", n) for n in range(40)]
    sides = np.concatenate([image.boxes[:, 2:] - image.boxes[:, :2] for image in drawn]).max(axis=1)
    assert 0.04 * 192 < sides.min() < 0.1 * 192
    assert 0.3 * 192 < sides.max() < 0.55 * 192


def test_looks_show_the_same_objects_in_other_pictures():
    for index in range(5):
        scenes = {
            look: draw_image(ShapesOptions(seed=3, look=look), "train", index) for look in LOOKS
        }
        painted = scenes.pop("painted")
        assert scenes.keys() == {"sketch", "night"}
        for scene in scenes.values():
            for part in ("labels", "boxes", "areas", "hidden"):
                assert np.array_equal(getattr(scene, part), getattr(painted, part))
        # Ink and paper are grey, up to the grain of ±4; paper is most of a sketch.
        sketch = scenes["sketch"].pixels.astype(int)
        assert np.ptp(sketch, axis=-1).max() <= 8
        assert np.median(sketch) > 190
        # A fifth of the light: 255 / 5, the blue tint of 14, noise of up to 12, and the grain.
        assert scenes["night"].pixels.max() <= 51 + 14 + 12 + 4


def test_a_sketch_has_ink_around_each_object_and_none_inside_or_outside():
    options = ShapesOptions(seed=3, look="sketch", most_objects=1)
    scene = draw_image(options, "train", 1)  # one square
    dark = scene.pixels.max(axis=-1) < 120
    inked = np.argwhere(dark)
    x0, y0, x1, y1 = scene.boxes[0]
    assert np.abs(inked.min(axis=0) - (y0, x0)).max() <= 1.5
    assert np.abs(inked.max(axis=0) + 1 - (y1, x1)).max() <= 1.5
    regions, count = ndimage.label(~dark)  # outside and inside
    assert count == 2
    inside = regions[round((y0 + y1) / 2), round((x0 + x1) / 2)]
    assert inside != regions[0, 0]


def test_an_image_does_not_depend_on_how_many_there_are():
    few = draw_image(SMALL, "train", 17)
    many = draw_image(ShapesOptions(train_images=999, val_images=99, seed=3), "train", 17)
    assert np.array_equal(few.pixels, many.pixels)
    assert np.array_equal(few.boxes, many.boxes)


def test_train_and_val_show_different_scenes():
    train, val = (draw_image(SMALL, split, 0) for split in SPLITS)
    assert not np.array_equal(train.pixels, val.pixels)


@pytest.mark.parametrize("split", SPLITS)
def test_annotations_are_coco_and_agree_with_the_pictures(data, split):
    coco = COCO(str(data.annotations(split)))
    assert len(coco.imgs) == SMALL.images(split)
    assert [category["name"] for category in coco.loadCats(coco.getCatIds())] == [
        *("circle", "square", "triangle", "star", "ring"),
        *("cross", "heart", "crescent", "arrow", "diamond"),
    ]
    for number, (image_id, image) in enumerate(sorted(coco.imgs.items())):
        with Image.open(data.images(split) / image["file_name"]) as picture:
            assert picture.size == (image["width"], image["height"]) == (96, 96)
            pixels = np.asarray(picture)
        scene = draw_image(SMALL, split, number)
        assert np.array_equal(pixels, scene.pixels)
        shapes = coco.imgToAnns[image_id]
        assert 1 <= len(shapes) <= 6
        corners = np.array([shape["bbox"] for shape in shapes])
        corners[:, 2:] += corners[:, :2]
        assert np.array_equal(corners, scene.boxes)
        assert [shape["category_id"] - 1 for shape in shapes] == scene.labels.tolist()


def test_every_category_occurs_in_both_splits_even_when_they_are_tiny(tmp_path):
    options = ShapesOptions(train_images=20, val_images=20, categories=20, tail=2)
    paths = ensure_shapes(tmp_path / "tiny", options)
    for split in SPLITS:
        content = json.loads(paths.annotations(split).read_text())
        assert {shape["category_id"] for shape in content["annotations"]} == set(range(1, 21))


def test_categories_follow_the_long_tail():
    drawn = [draw_image(ShapesOptions(), "train", number) for number in range(400)]
    counts = np.bincount(np.concatenate([scene.labels for scene in drawn]), minlength=10)
    expected = (
        counts.sum() * np.sort(np.arange(1, 11) ** -0.7)[::-1] / (np.arange(1, 11) ** -0.7).sum()
    )
    # A multinomial count strays by more than four standard deviations once in 15,000 draws.
    assert (abs(np.sort(counts)[::-1] - expected) < 4 * np.sqrt(expected)).all()
    assert counts.max() > 3 * counts.min()


@pytest.mark.parametrize("categories", [2, 10, 20])
def test_frequent_and_rare_categories_are_spread_over_the_ids(categories):
    shares = category_shares(categories, 1.0)
    assert shares.sum() == pytest.approx(1)
    assert np.allclose(np.sort(shares)[::-1] * np.arange(1, categories + 1), shares.max())
    # The last fifth, a usual second phase, is neither all head nor all tail.
    last = shares[-max(categories // 5, 1) :].mean()
    assert 0.4 / categories < last < 2.5 / categories


def test_objects_lie_inside_the_image_and_stay_mostly_visible():
    options = ShapesOptions(size=80)
    drawn = [draw_image(options, "val", number) for number in range(150)]
    boxes = np.concatenate([scene.boxes for scene in drawn])
    hidden = np.concatenate([scene.hidden for scene in drawn])
    sides = (boxes[:, 2:] - boxes[:, :2]).max(axis=1)
    assert boxes.min() >= 0
    assert boxes.max() <= 80
    assert (sides >= 80 / 6 - 0.5).all()
    assert (sides <= 40.5).all()
    assert hidden.max() <= 0.3
    assert (hidden > 0.05).mean() > 0.1  # there is overlap to learn from


def test_colour_does_not_tell_the_category():
    drawn = [draw_image(ShapesOptions(most_objects=1, tail=0), "train", n) for n in range(400)]
    centres = [np.rint(scene.boxes[0].reshape(2, 2).mean(axis=0)).astype(int) for scene in drawn]
    colours = np.array(
        [scene.pixels[y, x] for scene, (x, y) in zip(drawn, centres, strict=True)], dtype=float
    )
    labels = np.array([scene.labels[0] for scene in drawn])
    # The ring and the crescent show background in the middle; the others their fill.
    solid = ~np.isin(labels, [4, 7])
    means = np.array([colours[labels == label].mean(axis=0) for label in np.unique(labels[solid])])
    # About 40 objects each: the standard error of a mean is near 12 of 255.
    assert np.ptp(means, axis=0).max() < 80


def test_objects_stand_out_from_the_background():
    drawn = [draw_image(ShapesOptions(most_objects=1, categories=2), "val", n) for n in range(100)]
    weak = 0
    for scene in drawn:
        x0, y0, x1, y1 = np.rint(scene.boxes[0]).astype(int)
        grey = scene.pixels @ np.array([0.299, 0.587, 0.114])
        middle = grey[
            (y0 + y1) // 2 - 2 : (y0 + y1) // 2 + 2, (x0 + x1) // 2 - 2 : (x0 + x1) // 2 + 2
        ]
        around = np.ones(grey.shape, bool)
        around[max(y0 - 1, 0) : y1 + 1, max(x0 - 1, 0) : x1 + 1] = False
        weak += abs(middle.mean() - grey[around].mean()) < 30
    assert weak <= 5


def test_boxes_are_where_the_picture_shows_the_object():
    drawn = [draw_image(ShapesOptions(most_objects=1, categories=2), "val", n) for n in range(60)]
    errors = []
    for scene in drawn:
        pixels = scene.pixels.astype(float)
        x, y = np.rint(scene.boxes[0].reshape(2, 2).mean(axis=0)).astype(int)
        alike = np.linalg.norm(pixels - pixels[y - 1 : y + 2, x - 1 : x + 2].mean((0, 1)), axis=-1)
        patches, _ = ndimage.label(alike < 50)
        rows, columns = ndimage.find_objects(patches)[patches[y, x] - 1]
        seen = [columns.start, rows.start, columns.stop, rows.stop]
        errors.append(abs(seen - scene.boxes[0]).max())
    assert np.quantile(errors, 0.9) <= 1.0  # one pixel: the antialiased rim


@pytest.mark.parametrize("name", SILHOUETTES)
def test_mask_is_tight_in_its_box_at_any_rotation(name):
    for extent, angle in ((16, 0.3), (23.7, 2.0), (48, 4.4)):
        mask = draw_silhouette(SILHOUETTES[name], extent, angle)
        x0, y0, x1, y1 = mask.box
        assert max(x1 - x0, y1 - y0) == pytest.approx(extent, abs=0.5)
        rows, columns = mask.coverage.any(axis=1), mask.coverage.any(axis=0)
        assert rows.all()  # the window holds no empty row or column …
        assert columns.all()
        assert (x0, y0) == (0, 0)  # … so it begins where the box does …
        assert (np.ceil(x1), np.ceil(y1)) == mask.coverage.shape[::-1]  # … and ends in its pixel
        assert mask.area == pytest.approx(mask.coverage.sum())


@pytest.mark.parametrize(
    ("name", "share"),
    [("circle", np.pi / 4), ("square", 1), ("ring", np.pi / 4 * (1 - 0.55**2)), ("cross", 5 / 9)],
)
def test_mask_covers_the_area_that_geometry_says(name, share):
    mask = draw_silhouette(SILHOUETTES[name], 40, 0.0)
    assert mask.area == pytest.approx(share * 40**2, rel=0.04)


def test_no_two_silhouettes_are_alike_at_any_rotation():
    def picture(name, angle):
        coverage = draw_silhouette(SILHOUETTES[name], 32, angle).coverage
        padded = np.zeros((34, 34))
        y, x = (34 - coverage.shape[0]) // 2, (34 - coverage.shape[1]) // 2
        padded[y : y + coverage.shape[0], x : x + coverage.shape[1]] = coverage
        return padded

    turns = np.arange(24) / 24 * 2 * np.pi
    turned = {name: np.array([picture(name, turn) for turn in turns]) for name in SILHOUETTES}
    for first in SILHOUETTES:
        for second in list(SILHOUETTES)[: list(SILHOUETTES).index(first)]:
            one, others = turned[first][0], turned[second]
            both = np.minimum(one, others).sum(axis=(1, 2))
            either = np.maximum(one, others).sum(axis=(1, 2))
            assert (both / either).max() < 0.93, (first, second)


def test_a_whole_data_set_is_not_generated_again(data):
    before = (data.root / MARKER).stat().st_mtime_ns
    ensure_shapes(data.root, SMALL)
    assert (data.root / MARKER).stat().st_mtime_ns == before


@pytest.mark.parametrize("damage", ["image", "annotations", "marker", "options"])
def test_a_data_set_that_is_not_whole_is_made_anew(tmp_path, damage):
    options = ShapesOptions(train_images=10, val_images=10)
    paths = ensure_shapes(tmp_path / "shapes", options)
    whole = contents(paths.root)
    if damage == "image":
        next(paths.images("val").iterdir()).unlink()
    elif damage == "annotations":
        paths.annotations("train").write_text("{}")
    elif damage == "marker":
        (paths.root / MARKER).write_text('{"request"')
    else:
        ensure_shapes(paths.root, ShapesOptions(train_images=11, val_images=10))
    assert contents(paths.root) != whole
    ensure_shapes(paths.root, options)
    assert contents(paths.root) == whole
    assert os.listdir(tmp_path) == ["shapes"]


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(InputError, match="not a generated shapes data set"):
        ensure_shapes(tmp_path, SMALL)
    assert contents(tmp_path) == {"thesis.tex": b"years of work"}


def test_an_interrupted_generation_leaves_nothing_behind(tmp_path, monkeypatch):
    import cldetr.data.shapes as module

    def interrupted(options, split, number):
        if number == 5:
            raise KeyboardInterrupt
        return draw_image(options, split, number)

    monkeypatch.setattr(module, "draw_image", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ensure_shapes(tmp_path / "shapes", SMALL)
    assert os.listdir(tmp_path) == []


def test_all_options_out_of_range_are_named_at_once(tmp_path):
    wrong = ShapesOptions(train_images=5, val_images=2, size=7, categories=99, tail=-1, seed=-1)
    with pytest.raises(InputError) as caught:
        ensure_shapes(tmp_path / "shapes", wrong)
    for word in ("categories is 99", "size is 7", "tail is -1", "seed is -1", "train has 5", "val"):
        assert word in str(caught.value)


def test_command_generates_and_draws_a_sheet(tmp_path, capsys):
    arguments = ["--images", "12", "--val", "24", "--categories", "12", "--size", "80"]
    sheet = tmp_path / "sheet.png"
    out = tmp_path / "shapes"
    assert main(["shapes", "--out", str(out), *arguments, "--draw", str(sheet)]) == 0
    content = json.loads((out / "annotations" / "instances_train.json").read_text())
    printed = capsys.readouterr().out
    for category in content["categories"]:
        count = sum(s["category_id"] == category["id"] for s in content["annotations"])
        row = next(line for line in printed.splitlines() if line.startswith(category["name"]))
        assert row.split()[1] == str(count)
    with Image.open(sheet) as picture:
        assert picture.size == (6 * 224, 4 * 224)


def test_command_refuses_a_sheet_that_is_no_png(tmp_path, capsys):
    out = tmp_path / "shapes"
    assert main(["shapes", "--out", str(out), "--draw", str(tmp_path / "sheet.jpg")]) == 2
    assert "PNG" in capsys.readouterr().err
    assert not out.exists()
