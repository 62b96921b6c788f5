"""Pascal VOC and YOLO: boxes worked by hand, Detectron2 as a reference, and what bad files say."""

import os
import re
from pathlib import Path

import numpy as np
import pytest
from detectron2.data.datasets.pascal_voc import load_voc_instances
from PIL import Image

from cldetr import cli
from cldetr.data.coco import load_coco
from cldetr.data.datasets import read_dataset
from cldetr.data.scan import scan_images
from cldetr.errors import InputError

from ..coco_files import write

SHARED = Path(os.environ.get("CLDETR_SHARED_DATA", ""))


def draw(path, size=(100, 80), **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size).save(path, **options)


def xml(*objects, size="<size><width>100</width><height>80</height></size>", head=""):
    lines = [f"{head}<annotation>", size]
    for name, box, *rest in objects:
        sides = "".join(
            f"<{tag}>{value}</{tag}>\n"
            for tag, value in zip(("xmin", "ymin", "xmax", "ymax"), box, strict=True)
        )
        lines += ["<object>", f"<name>{name}</name>", *rest, f"<bndbox>\n{sides}</bndbox></object>"]
    return "\n".join([*lines, "</annotation>"])


@pytest.fixture
def voc(tmp_path):
    """Three images, of which the list has two."""
    root = tmp_path / "VOC"
    files = {
        "000005": xml(("dog", (1, 1, 100, 80)), ("cat", (11, 6, 40, 45.5))),
        "000007": xml(("cat", (2, 3, 4, 5), "<difficult>1</difficult>"), size=""),
        "000009": xml(("fox", (2, 3, 4, 5))),
    }
    for name, content in files.items():
        write(root / "Annotations" / f"{name}.xml", content)
        draw(root / "JPEGImages" / f"{name}.jpg")
    write(root / "ImageSets" / "Main" / "trainval.txt", "000007\n000005\n")
    return root


@pytest.fixture
def yolo(tmp_path):
    """Two training images, one without labels, and a validation image."""
    root = tmp_path / "fish"
    write(root / "data.yaml", "train: train/images\nval: val/images\nnc: 2\nnames: [cod, eel]\n")
    for name in ("train/images/a", "train/images/b", "val/images/c"):
        draw(root / f"{name}.jpg")
    write(root / "train/labels/a.txt", "1 0.5 0.5 0.2 0.25\n\n0 0.1 0.2 0.3 0.2 0.3 0.7\n")
    write(root / "val/labels/c.txt", "0 0.5 0.5 1 1\n")
    return root


# Pascal VOC


def test_voc_boxes_count_pixels_from_one(voc):
    data = read_dataset(f"voc:{voc}/trainval")
    assert data.image_ids.tolist() == [7, 5]  # in the order of the list
    assert [category.name for category in data.categories] == ["cat", "dog"]
    # 2 to 4 is three pixels; 1 to 100 is the whole width.
    assert data.boxes.tolist() == [[1, 2, 3, 3], [0, 0, 100, 80], [10, 5, 30, 40.5]]
    assert data.labels.tolist() == [0, 1, 0]
    assert (data.widths.tolist(), data.heights.tolist()) == ([100, 100], [80, 80])
    assert data.image_path(1) == voc / "JPEGImages" / "000005.jpg"
    assert data.name == "VOC_trainval"
    scan_images(data)


def test_voc_difficult_objects_are_crowd_regions(voc):
    data = read_dataset(f"voc:{voc}/trainval")
    assert data.crowd.tolist() == [True, False, False]
    assert data.report.crowd_only_images == 1


def test_voc_is_what_detectron2_reads(voc):
    write(voc / "Annotations/000007.xml", xml(("cat", (2, 3, 4, 5))))  # it needs a size
    data = read_dataset(f"voc:{voc}/trainval")
    theirs = load_voc_instances(str(voc), "trainval", ["cat", "dog"])
    boxes = [obj["bbox"] for entry in theirs for obj in entry["annotations"]]
    corners = data.boxes.copy()
    corners[:, 2:] += corners[:, :2]
    assert corners.tolist() == boxes
    labels = [obj["category_id"] for entry in theirs for obj in entry["annotations"]]
    assert data.labels.tolist() == labels
    assert [entry["file_name"] for entry in theirs] == [str(data.image_path(i)) for i in (0, 1)]


def test_voc_folders_without_a_list_are_read_whole(voc, tmp_path, caplog):
    assert len(read_dataset(f"voc:{voc}").image_ids) == 3
    flat = tmp_path / "flat"
    write(flat / "b 1.xml", xml(("dog", (1, 1, 9, 9))))
    draw(flat / "b 1.png")
    draw(flat / "alone.png")
    data = read_dataset(f"voc:{flat}")
    assert data.file_names == ["b 1.png"]
    assert "1 images have no XML file" in caplog.text


def test_voc_lists_of_one_category_have_a_second_column(voc):
    write(voc / "ImageSets/Main/cat_train.txt", "000005  1\n000009 -1\n")
    assert read_dataset(f"voc:{voc}/cat_train").image_ids.tolist() == [5, 9]


BOX = (1, 2, 30, 40)
VOC_FAULTS = {
    # name: (content of the XML file, what the message must say)
    "cut off": (xml(("cat", BOX))[:-20], r"000005\.xml:1\d: .*Fix: fix them at that line"),
    "empty": ("", r"000005\.xml:1: no element found"),
    "not XML": ("{}", r"000005\.xml:1: not well-formed"),
    "another root": ("<image/>", r"000005\.xml:1: <image> is not <annotation>"),
    "a document type": (xml(head="<!DOCTYPE a []>"), r"000005\.xml:1: it declares a document type"),
    "no name": (xml(("cat", BOX)).replace("name>", "label>"), r"000005\.xml:3: name is missing"),
    "an empty name": (xml((" ", BOX)), r"000005\.xml:4: name is empty\. Fix"),
    "no box": (xml(("cat", BOX)).replace("bndbox", "box"), r"000005\.xml:3: bndbox is missing"),
    "no side": (xml(("cat", BOX)).replace("xmax", "right"), r"000005\.xml:5: xmax is missing"),
    "a side twice": (
        xml(("cat", BOX)).replace("<ymin>", "<xmin>1</xmin><ymin>"),
        r"000005\.xml:5: xmin is repeated",
    ),
    "a side of letters": (xml(("cat", ("x", 2, 30, 40))), r"000005\.xml:5: xmin 'x', ymin '2'"),
    "a side not a number": (xml(("cat", (1, "nan", 3, 4))), r"000005\.xml:5: .*ymin 'nan'"),
    "sides in another order": (xml(("cat", (30, 2, 1, 40))), r"000005\.xml:5: \[29\.0, 1\.0, -28"),
    "a size of letters": (
        xml(("cat", BOX), size="<size><width>wide</width><height>80</height></size>"),
        r"000005\.xml:2: width is 'wide'",
    ),
    "an absurd size": (
        xml(("cat", BOX), size="<size><width>9999999</width><height>80</height></size>"),
        r"000005\.xml: 9999999×80",
    ),
    "a size twice": (
        xml(("cat", BOX)).replace("<width>", "<width>5</width><width>"),
        r"000005\.xml:2: width is '100' the second time",
    ),
    "difficult": (
        xml(("cat", BOX, "<difficult>yes</difficult>")),
        r"000005\.xml:5\. Fix: write 0 or 1",
    ),
    "two spellings": (xml(("Cat", BOX), ("cat", BOX)), r"'Cat' and 'cat'\. Fix: spell"),
}


@pytest.mark.parametrize("name", VOC_FAULTS)
def test_a_bad_voc_file_is_named_with_line_and_fix(voc, name):
    content, message = VOC_FAULTS[name]
    write(voc / "Annotations/000005.xml", content)
    with pytest.raises(InputError, match=message) as caught:
        read_dataset(f"voc:{voc}/trainval")
    assert f"voc:{voc}/trainval has" in str(caught.value)
    assert "Fix: " in str(caught.value)


def test_bad_voc_boxes_may_be_dropped(voc):
    write(voc / "Annotations/000005.xml", xml(("cat", (30, 2, 1, 40)), ("dog", (1, 1, 200, 9))))
    report = read_dataset(f"voc:{voc}/trainval", bad_boxes="drop").report
    assert (report.dropped_bad, report.clipped, report.objects) == (1, 1, 2)


def test_voc_entities_are_not_expanded(voc):
    bomb = '<!DOCTYPE a [<!ENTITY b "bbbbbbbbbb"><!ENTITY c "&b;&b;&b;&b;&b;&b;">]>'
    write(voc / "Annotations/000005.xml", bomb + xml(("&c;", BOX)))
    with pytest.raises(InputError, match="declares a document type"):
        read_dataset(f"voc:{voc}/trainval")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("000005\n000006\n", r"annotation files are missing \(1\): 000006\.xml"),
        ("000005\n000007\n000005\n", r"trainval\.txt:3: '000005', as in line 1"),
        ("000005\n../x\n", r"trainval\.txt:2: '\.\./x'"),
        ("\n", r"trainval\.txt lists no image"),
    ],
)
def test_a_bad_voc_list_is_named_with_its_line(voc, lines, message):
    write(voc / "ImageSets/Main/trainval.txt", lines)
    with pytest.raises(InputError, match=message):
        read_dataset(f"voc:{voc}/trainval")


def test_a_voc_image_that_is_missing_or_ambiguous_is_reported(voc):
    draw(voc / "JPEGImages/000005.png")  # beside the .jpg
    with pytest.raises(InputError, match=r"of 000005\.xml in .*JPEGImages\. Fix: put one file"):
        read_dataset(f"voc:{voc}/trainval")
    stated = "<filename>000005.png</filename><size><width>9</width></size>"
    write(voc / "Annotations/000005.xml", xml(("dog", BOX), size=stated))
    data = read_dataset(f"voc:{voc}/trainval")
    assert data.file_names == ["000007.jpg", "000005.png"]
    assert data.widths.tolist() == [100, 100]  # of the file: half a size is none


def test_a_voc_folder_that_is_not_there_is_told_from_a_split(voc):
    with pytest.raises(InputError, match=r"no folder .*val and no file .*val\.txt: choose.*trainv"):
        read_dataset(f"voc:{voc}/val")
    (voc / "JPEGImages").rename(voc / "Pictures")
    with pytest.raises(InputError, match=r"there is no folder .*JPEGImages"):
        read_dataset(f"voc:{voc}/trainval")


# YOLO


def test_yolo_labels_are_shares_of_the_image(yolo):
    data = read_dataset(f"yolo:{yolo}/data.yaml/train")
    assert data.file_names == ["a.jpg", "b.jpg"]
    assert data.image_path(1) == yolo / "train/images/b.jpg"
    assert [category.name for category in data.categories] == ["cod", "eel"]
    # 0.5 of 100 minus half of 20, 0.5 of 80 minus half of 20; the polygon from 10, 16 to 30, 56.
    assert data.boxes == pytest.approx(np.array([[40, 30, 20, 20], [10, 16, 20, 40]]))
    assert (data.labels.tolist(), data.starts.tolist()) == ([1, 0], [0, 2, 2])
    assert data.name == "fish_train"
    scan_images(data)


def test_yolo_images_are_upright(yolo):
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    draw(yolo / "train/images/a.jpg", exif=exif)
    data = read_dataset(f"yolo:{yolo}/data.yaml/train")
    assert (data.widths[0], data.heights[0]) == (80, 100)
    scan_images(data)


@pytest.mark.parametrize(
    "settings",
    [
        "train: train/images\nnames: {0: cod, 1: eel}",
        "train: ./train/images/\nnames: [cod, eel]",
        "path: ..\ntrain: fish/train/images\nnames: [cod, eel]",
        "train: ../train/images\nnames: [cod, eel]",  # as one exporter writes it
        "train: [train/images]\nnames: [cod, eel]",
        "train: list.txt\nnames: ['cod ', eel]",
    ],
)
def test_yolo_settings_may_be_written_in_several_ways(yolo, settings):
    write(yolo / "data.yaml", settings)
    write(yolo / "list.txt", "./train/images/a.jpg\ntrain/images/b.jpg\n")
    data = read_dataset(f"yolo:{yolo}/data.yaml/train")
    assert [Path(name).name for name in data.file_names] == ["a.jpg", "b.jpg"]
    assert [category.name for category in data.categories] == ["cod", "eel"]
    assert len(data.labels) == 2
    scan_images(data)


def test_yolo_labels_beside_the_images(tmp_path):
    write(tmp_path / "d.yaml", "test: all\nnames: [cod]")
    draw(tmp_path / "all/deep/a.b.PNG")
    write(tmp_path / "all/deep/a.b.txt", "0 0.5 0.5 0.5 0.5")
    assert read_dataset(f"yolo:{tmp_path}/d.yaml/test").file_names == ["deep/a.b.PNG"]


def test_yolo_label_files_that_are_missing_or_alone_are_reported(yolo, caplog):
    write(yolo / "train/labels/z.txt", "0 0.5 0.5 0.5 0.5")
    read_dataset(f"yolo:{yolo}/data.yaml/train")
    assert "1 images have no label file" in caplog.text
    assert "1 label files have no image and are not used, z.txt" in caplog.text
    (yolo / "train/labels").rename(yolo / "train/label")
    with pytest.raises(InputError, match=r"no image has a label file, .*train/labels/a\.txt"):
        read_dataset(f"yolo:{yolo}/data.yaml/train")


YOLO_FAULTS = {
    # name: (line 2 of the label file, what the message must say)
    "too few values": ("0 0.5 0.5 0.5", r"a\.txt:2: '0 0\.5 0\.5 0\.5'\. Fix: fix or remove"),
    "a confidence": ("0 0.5 0.5 0.5 0.5 0.9", r"a\.txt:2: "),
    "half a point": ("0 0.1 0.1 0.2 0.2 0.3 0.3 0.4", r"a\.txt:2: "),
    "a class too many": ("2 0.5 0.5 0.5 0.5", r"a\.txt:2: .*Fix: fix them, or add names"),
    "a negative class": ("-1 0.5 0.5 0.5 0.5", r"a\.txt:2: .*add names"),
    "a class of letters": ("cod 0.5 0.5 0.5 0.5", r"a\.txt:2: .*add names"),
    "pixels": ("0 50 40 20 20", r"a\.txt:2: .*Fix: divide x and width"),
    "a point outside": ("0 0.1 0.1 0.2 0.2 0.3 1.3", r"a\.txt:2: .*Fix: divide"),
    "a value not a number": ("0 nan 0.5 0.5 0.5", r"a\.txt:2: 0 nan 0\.5.*or drop and count"),
    "letters": ("0 0.5 half 0.5 0.5", r"a\.txt:2: 0 0\.5 half.*or drop and count"),
    "a negative size": ("0 0.5 0.5 -0.2 0.5", r"a\.txt:2: .*or drop and count"),
}


@pytest.mark.parametrize("name", YOLO_FAULTS)
def test_a_bad_yolo_line_is_named_with_the_fix(yolo, name):
    line, message = YOLO_FAULTS[name]
    write(yolo / "train/labels/a.txt", f"0 0.5 0.5 0.2 0.2\n{line}\n")
    with pytest.raises(InputError, match=message) as caught:
        read_dataset(f"yolo:{yolo}/data.yaml/train")
    assert f"yolo:{yolo}/data.yaml/train has 1 problem" in str(caught.value)
    if "drop and count" in message:
        data = read_dataset(f"yolo:{yolo}/data.yaml/train", bad_boxes="drop")
        assert (data.report.dropped_bad, data.report.objects) == (1, 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("train: [", r"data\.yaml:1 is not valid YAML \(expected the node"),
        ("- a", "holds no keys"),
        ("!!python/object/apply:os.system ['true']", r"data\.yaml:1 is not valid YAML"),
        ("val: a\nnames: [a]", r"has no 'train': choose val"),
        ("train: nowhere\nnames: [a]", r"train is 'nowhere', but there is no folder or list"),
        ("train: 7\nnames: [a]", "train is 7: write the path"),
        ("train: https://a/b.zip\nnames: [a]", "the address https://a/b.zip: download it"),
        ("train: .\nnames: [a]\nkpt_shape: [3, 3]", "describes keypoints"),
        ("train: train/labels\nnames: [a]", "no image in .*train/labels"),
        ("train: train/images", "names is None: list the class names"),
        ("train: train/images\nnames: {0: a, 2: b}", r"keys \[0, 2\]: number them"),
        ("train: train/images\nnames: [a, [b]]", r"names has \['b'\]"),
        ("train: train/images\nnames: [cod, eel]\nnc: 3", "nc is 3, but names has 2"),
        ("train: train/images\nnames: [cod, cod]", r"category names are used more than once"),
        ("train: train/images\nnames: [cod, Cod]", r"'cod' and 'Cod'\. Fix: spell"),
        ("train: list.txt\nnames: [a]", r"list\.txt:2: /etc/hosts\. Fix: list images below"),
    ],
)
def test_bad_yolo_settings_are_named_with_the_fix(yolo, settings, message):
    write(yolo / "data.yaml", settings)
    write(yolo / "list.txt", "train/images/a.jpg\n/etc/hosts\n")
    with pytest.raises(InputError, match=message) as caught:
        read_dataset(f"yolo:{yolo}/data.yaml/train")
    assert "data.yaml" in str(caught.value)


def test_a_yolo_image_that_cannot_be_read_is_named(yolo):
    write(yolo / "train/images/b.jpg", "no image")
    with pytest.raises(InputError, match=r"images/b\.jpg: not a readable image\. Fix"):
        read_dataset(f"yolo:{yolo}/data.yaml/train")


def test_two_yolo_images_with_one_label_file_are_refused(yolo):
    draw(yolo / "train/images/a.png")
    with pytest.raises(InputError, match=r"images share a label file \(1\): .*a\.png and .*a\.jpg"):
        read_dataset(f"yolo:{yolo}/data.yaml/train")


def test_yolo_without_a_key_is_told_how_to_name_it(yolo):
    with pytest.raises(InputError, match=r"write yolo:.*data\.yaml/train"):
        read_dataset(f"yolo:{yolo}/data.yaml")
    with pytest.raises(InputError, match=r"data\.yml cannot be read: No such file"):
        read_dataset(f"yolo:{yolo}/data.yml/train")


# Both


@pytest.mark.parametrize("reference", ["voc:{voc}/trainval", "yolo:{yolo}/data.yaml/train"])
def test_converted_data_are_the_same_data(voc, yolo, tmp_path, reference, capsys):
    reference = reference.format(voc=voc, yolo=yolo)
    out = tmp_path / "out" / "a.json"
    assert cli.main(["convert-data", reference, "--out", str(out)]) == 0
    file, root = re.search(r"use it as (\S+\.json):(\S+)", capsys.readouterr().out).groups()
    direct, converted = read_dataset(reference), load_coco(file, root)
    for key in ("image_ids", "widths", "heights", "starts", "labels", "boxes", "areas", "crowd"):
        np.testing.assert_array_equal(getattr(converted, key), getattr(direct, key))
    assert converted.categories == direct.categories
    assert [converted.image_path(i) for i in (0, 1)] == [direct.image_path(i) for i in (0, 1)]
    assert cli.main(["convert-data", reference, "--out", str(tmp_path / "a.txt")]) == 2


def test_a_data_set_in_another_folder_has_the_same_fingerprint(voc, yolo):
    for root, split in ((voc, "trainval"), (yolo, "data.yaml/train")):
        kind = "voc" if root == voc else "yolo"
        before = read_dataset(f"{kind}:{root}/{split}").fingerprint
        moved = root.with_name("moved_" + root.name)
        root.rename(moved)
        assert read_dataset(f"{kind}:{moved}/{split}").fingerprint == before


@pytest.mark.parametrize(
    ("reference", "images", "objects", "classes"),
    [
        ("voc:{}/cards_320/trainval", 296, 527, 6),
        ("yolo:{}/aquarium_320/data.yaml/train", 448, 3324, 7),
    ],
)
@pytest.mark.data
@pytest.mark.skipif(not (SHARED / "cards_320").is_dir(), reason="needs cards_320, aquarium_320")
def test_published_data_are_read_whole(reference, images, objects, classes):
    data = read_dataset(reference.format(SHARED))
    assert (len(data.image_ids), len(data.labels), len(data.categories)) == (
        images,
        objects,
        classes,
    )
    scan_images(data)
