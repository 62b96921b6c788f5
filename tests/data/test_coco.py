"""Reading annotation files: the same as pycocotools reads, cached safely, within the folder."""

import contextlib
import io
import json
import logging
import os

import numpy as np
import pytest
from pycocotools.coco import COCO

from cldetr.data import cache as cache_module
from cldetr.data.cache import cache_folder
from cldetr.data.coco import load_coco
from cldetr.errors import InputError

from ..coco_files import coco, random_coco, write

ARRAYS = (
    *("image_ids", "widths", "heights", "starts"),
    *("labels", "boxes", "areas", "crowd", "object_ids"),
)


def quiet_pycocotools(path):
    with contextlib.redirect_stdout(io.StringIO()):
        return COCO(str(path))


def assert_same(first, second):
    for key in ARRAYS:
        np.testing.assert_array_equal(getattr(first, key), getattr(second, key))
    assert list(first.file_names) == list(second.file_names)
    assert first.categories == second.categories
    assert first.report == second.report
    assert first.fingerprint == second.fingerprint


@pytest.mark.parametrize("seed", range(5))
def test_loader_agrees_with_pycocotools(tmp_path, seed):
    path = write(tmp_path / "a.json", random_coco(seed))
    data, api = load_coco(path, tmp_path), quiet_pycocotools(path)
    assert data.image_ids.tolist() == [image["id"] for image in api.dataset["images"]]
    assert [category.id for category in data.categories] == sorted(api.cats)
    for number, image in enumerate(data.image_ids.tolist()):
        expected = api.imgToAnns[image]  # in file order
        rows = slice(data.starts[number], data.starts[number + 1])
        ids = [data.categories[label].id for label in data.labels[rows]]
        assert data.object_ids[rows].tolist() == [ann["id"] for ann in expected]
        assert ids == [ann["category_id"] for ann in expected]
        assert data.boxes[rows].tolist() == [ann["bbox"] for ann in expected]
        assert data.areas[rows].tolist() == [ann["area"] for ann in expected]
        assert data.crowd[rows].tolist() == [bool(ann["iscrowd"]) for ann in expected]
        info = api.imgs[image]
        assert data.file_names[number] == info["file_name"]
        assert (data.widths[number], data.heights[number]) == (info["width"], info["height"])


def test_both_readers_give_the_same_arrays(tmp_path):
    content = random_coco(1)
    fast = load_coco(write(tmp_path / "a.json", content), tmp_path)
    for image in content["images"]:  # equal values that only the patient reader takes
        image["width"] = float(image["width"])
    for annotation in content["annotations"]:
        annotation["score"] = float("nan")
    slow = load_coco(write(tmp_path / "b.json", content), tmp_path)
    for key in ARRAYS:
        np.testing.assert_array_equal(getattr(fast, key), getattr(slow, key))
    assert fast.report == slow.report


def test_area_and_crowd_may_be_absent(tmp_path):
    content = coco()
    for annotation in content["annotations"]:
        del annotation["area"], annotation["iscrowd"]
    content["annotations"][0] |= {"area": None, "iscrowd": True}
    data = load_coco(write(tmp_path / "a.json", content), tmp_path)
    np.testing.assert_allclose(data.areas, 20 * 30.5)
    assert data.crowd.tolist() == [True, False, False]
    assert data.report.computed_areas == 3


def test_boxes_are_clipped_or_dropped_and_counted(tmp_path, caplog):
    content = coco(images=5, objects=[(1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (3, 1), (3, 1)])
    boxes = [
        ([-5, -5, 20, 20], [0, 0, 15, 15]),  # over the upper left corner
        ([90, 70, 20, 20], [90, 70, 10, 10]),  # over the lower right corner
        ([10, 10, 0, 5], None),  # no area
        ([200, 10, 5, 5], None),  # outside
        ([80, 60, 20, 20], [80, 60, 20, 20]),  # up to the border
        ([79.999999, 0, 20.0000012, 5], [79.999999, 0, 20.0000012, 5]),  # over by rounding
        ([-10, 5, 10, 5], None),  # touches the border from outside
    ]
    for annotation, (box, _) in zip(content["annotations"], boxes, strict=True):
        annotation["bbox"] = box
    with caplog.at_level(logging.INFO):
        data = load_coco(write(tmp_path / "a.json", content), tmp_path)
    assert data.boxes.tolist() == [kept for _, kept in boxes if kept]
    report = data.report
    assert (report.clipped, report.dropped_empty, report.dropped_bad) == (2, 3, 0)
    assert [row[0] for row in report.dropped] == [3, 4, 7]
    assert (report.images, report.objects, report.empty_images) == (5, 4, 2)
    assert "3 empty or outside boxes dropped" in caplog.text
    assert "2 boxes clipped" in caplog.text


def test_untrimmed_boxes_are_as_in_the_file_and_cached_apart(tmp_path):
    content = coco()
    content["annotations"][0]["bbox"] = [-5, -5, 20, 20]
    content["annotations"][1]["bbox"] = [10, 10, 0, 5]
    path = write(tmp_path / "a.json", content)
    for _ in range(2):  # from the file, then from the cache
        trimmed = load_coco(path, tmp_path, cache_dir=tmp_path / "cache")
        raw = load_coco(path, tmp_path, cache_dir=tmp_path / "cache", trim=False)
        assert raw.boxes[:2].tolist() == [[-5, -5, 20, 20], [10, 10, 0, 5]]
        assert (raw.report.clipped, raw.report.dropped_empty) == (0, 0)
        assert (trimmed.report.clipped, trimmed.report.dropped_empty) == (1, 1)


def test_categories_without_objects_and_crowd_only_images_are_reported(tmp_path, caplog):
    content = coco(objects=[(1, 1), (2, 1)])
    content["annotations"][1]["iscrowd"] = 1
    content["images"][2]["file_name"] = content["images"][0]["file_name"]
    data = load_coco(write(tmp_path / "a.json", content), tmp_path)
    assert data.report.unused_categories == ("dog", "bird")
    assert data.report.crowd_only_images == 1
    assert data.report.repeated_files == 1
    assert "no object of 2 categories" in caplog.text
    assert len(data.image_ids) == 3  # crowd-only and empty images are kept


def test_cache_gives_the_same_data_without_reading_the_json(tmp_path, monkeypatch):
    path = write(tmp_path / "a.json", random_coco(3))
    fresh = load_coco(path, tmp_path, cache_dir=tmp_path / "cache")

    def refuse(*_):
        raise AssertionError("the annotation file was parsed again")

    monkeypatch.setattr("cldetr.data.coco.read_columns", refuse)
    cached = load_coco(path, "elsewhere", name="other", cache_dir=tmp_path / "cache")
    assert_same(fresh, cached)
    assert (cached.name, str(cached.image_root)) == ("other", "elsewhere")


def test_cache_follows_the_content_and_the_options(tmp_path):
    content = coco()
    path = write(tmp_path / "a.json", content)
    load_coco(path, tmp_path, cache_dir=tmp_path / "cache")
    content["annotations"][0]["bbox"] = [1, 2, "x", 4]
    write(path, content)
    dropped = load_coco(path, tmp_path, cache_dir=tmp_path / "cache", bad_boxes="drop")
    assert len(dropped.labels) == 2
    with pytest.raises(InputError, match="annotation 1"):
        load_coco(path, tmp_path, cache_dir=tmp_path / "cache", bad_boxes="stop")


def test_damaged_cache_is_ignored_and_replaced(tmp_path, caplog):
    path = write(tmp_path / "a.json", coco())
    fresh = load_coco(path, tmp_path, cache_dir=tmp_path / "cache")
    [cache] = (tmp_path / "cache").iterdir()
    whole = cache.read_bytes()
    step = max(len(whole) // 40, 1)
    damaged = [whole[:cut] for cut in (0, 10, len(whole) // 2, len(whole) - 1)]
    for index in range(0, len(whole), step):
        damaged.append(whole[:index] + bytes([whole[index] ^ 0x10]) + whole[index + 1 :])
    for content in damaged:
        cache.write_bytes(content)
        caplog.clear()
        assert_same(fresh, load_coco(path, tmp_path, cache_dir=tmp_path / "cache"))
        assert "damaged" in caplog.text
        assert cache.read_bytes() == whole


def test_cache_folder_that_cannot_be_written_is_no_obstacle(tmp_path, caplog):
    path = write(tmp_path / "a.json", coco())
    blocked = write(tmp_path / "file", "not a folder")
    assert len(load_coco(path, tmp_path, cache_dir=blocked).image_ids) == 3
    assert "cannot write the cache" in caplog.text


def test_image_path_stays_in_the_folder(tmp_path):
    (tmp_path / "images" / "sub").mkdir(parents=True)
    (tmp_path / "secret.jpg").touch()
    (tmp_path / "images" / "0001.jpg").symlink_to(tmp_path / "secret.jpg")
    (tmp_path / "images" / "0002.jpg").symlink_to("sub/real.jpg")
    (tmp_path / "linked").symlink_to(tmp_path / "images")  # the folder itself may be a link
    data = load_coco(write(tmp_path / "a.json", coco()), tmp_path / "linked")
    with pytest.raises(InputError, match=r"image 1 .* leads out of the image folder"):
        data.image_path(0)
    assert data.image_path(1) == tmp_path / "linked" / "0002.jpg"
    assert data.image_path(2) == tmp_path / "linked" / "0003.jpg"


def test_image_ids_become_numbers_and_strangers_are_named(tmp_path):
    data = load_coco(write(tmp_path / "a.json", random_coco(2)), tmp_path)
    order = np.random.default_rng(0).permutation(len(data.image_ids))
    assert data.indices_of(data.image_ids[order]).tolist() == order.tolist()
    with pytest.raises(InputError, match="image 999999"):
        data.indices_of([int(data.image_ids[0]), 999_999])
    assert data.indices_of([]).tolist() == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"  \n", "is empty"),
        (b"\x1f\x8b\x08\x00rest", "is compressed"),
        (b'{"images": [', "cut off"),
        (b'{"images": [{"id": 1, "file_na', "cut off"),
        (b'{"images": [}', "not valid JSON"),
        (json.dumps(coco()).encode()[:-40], "cut off"),
        (json.dumps(coco()).encode() + b"x", "not valid JSON"),
        (b"[1, 2]", "a list where a COCO file has an object"),
        (b'"text"', "a string where"),
        (b"\xff\xfe{", "not UTF-8"),
        (b'{"images": "\xe9"}', "not UTF-8"),
        (b"\xef\xbb\xbf{}", "byte order mark"),
        (b"{}", "'annotations' is missing"),
        (b'{"images": {}, "annotations": null, "categories": []}', "'images' is an object"),
        (b'{"images": ' + b"[" * 100_000, "not valid JSON|cannot be read"),
        (b'{"images": ' + b"9" * 10_000 + b"}", "cannot be read"),
    ],
)
def test_what_is_no_coco_file_is_refused_with_its_name(tmp_path, content, message):
    path = tmp_path / "broken.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        load_coco(path, tmp_path)
    assert str(path) in str(caught.value)


def test_missing_and_unreadable_files_are_told_apart(tmp_path):
    with pytest.raises(InputError, match="no annotation file"):
        load_coco(tmp_path / "none.json", tmp_path)
    with pytest.raises(InputError, match="is a folder"):
        load_coco(tmp_path, tmp_path)
    with pytest.raises(InputError, match="choose stop or drop"):
        load_coco(tmp_path, tmp_path, bad_boxes="repair")
    if os.geteuid() != 0:
        path = write(tmp_path / "a.json", coco())
        path.chmod(0)
        with pytest.raises(InputError, match="cannot be read: Permission"):
            load_coco(path, tmp_path)


def test_a_run_caches_large_files_in_the_users_cache_folder(tmp_path, monkeypatch):
    path = tmp_path / "instances.json"
    path.write_bytes(b"x" * 100)
    monkeypatch.delenv("CLDETR_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder(path) is None  # small
    assert cache_folder(tmp_path / "missing.json") is None
    monkeypatch.setattr(cache_module, "_MIN_SIZE", 100)
    assert cache_folder(path) == tmp_path / "xdg" / "cldetr"
    monkeypatch.setenv("CLDETR_CACHE", str(tmp_path / "own"))
    assert cache_folder(path) == tmp_path / "own"
    monkeypatch.setenv("CLDETR_CACHE", "")
    assert cache_folder(path) is None


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path, caplog):
    path = write(tmp_path / "a.json", random_coco(1))
    (tmp_path / "file").write_text("no folder can be here")
    data = load_coco(path, tmp_path, cache_dir=tmp_path / "file" / "cldetr")
    assert len(data.image_ids)
    assert "cannot write the cache" in caplog.text
