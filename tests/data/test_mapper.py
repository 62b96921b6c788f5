"""Images and boxes through the augmentation, against cases worked by hand."""

import numpy as np
import pytest
import torch
from detectron2.data import DatasetMapper
from detectron2.data import transforms as T
from detectron2.structures import BoxMode
from PIL import Image

from cldetr.data.mapper import Augmentation, Mapper
from cldetr.errors import InputError

STILL = Augmentation(flip=0, short_sides=(), crop=0, test_short_side=0)


def entry(path, boxes=(), size=(40, 60), crowd=()):
    height, width = size
    return {
        "file_name": str(path),
        "image_id": 1,
        "height": height,
        "width": width,
        "annotations": [
            {
                "bbox": list(box),
                "bbox_mode": BoxMode.XYWH_ABS,
                "category_id": number,
                "iscrowd": int(number in crowd),
            }
            for number, box in enumerate(boxes)
        ],
    }


@pytest.fixture
def picture(tmp_path):
    pixels = np.zeros((40, 60, 3), dtype=np.uint8)
    pixels[10:20, 30:50, 0] = 255  # a red rectangle, x 30-50, y 10-20
    path = tmp_path / "picture.png"
    Image.fromarray(pixels).save(path)
    return path


def red_box(image):
    rows, columns = np.nonzero(image[0].numpy() > 127)
    return [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]


def test_boxes_follow_the_pixels_through_every_augmentation(picture):
    augmentation = Augmentation(
        short_sides=(30, 50), max_side=90, crop_short_sides=(36, 44), crop_size=(30, 42)
    )
    mapper = Mapper(augmentation, training=True)
    seen = 0
    for seed in range(80):
        mapped = mapper(entry(picture, [(30, 10, 20, 10)]), np.random.default_rng(seed))
        boxes = mapped["instances"].gt_boxes.tensor
        if len(boxes) == 0 or (boxes[0, 2:] - boxes[0, :2]).min() < 4:
            continue  # cropped away, or a sliver whose pixels are blurred
        seen += 1
        np.testing.assert_allclose(boxes[0].numpy(), red_box(mapped["image"]), atol=1.6)
    assert seen > 40


class Fixed(T.Augmentation):
    """Gives Detectron2's mapper transforms that are drawn already."""

    def __init__(self, transforms):
        self.transforms = transforms

    def get_transform(self, image):
        return self.transforms


@pytest.mark.parametrize("seed", range(6))
def test_images_and_boxes_are_those_of_detectron2_with_the_same_transforms(tmp_path, seed):
    rng = np.random.default_rng(seed)
    path = tmp_path / "noise.jpg"
    Image.fromarray(rng.integers(0, 256, (40, 60, 3), dtype=np.uint8)).save(path)
    augmentation = Augmentation(
        short_sides=(30, 50), max_side=70, crop_short_sides=(36, 44), crop_size=(20, 30)
    )
    # As floats: Detectron2 truncates boxes that are given as integers.
    boxes = [(2.0, 3.0, 20.0, 10.0), (40.0, 20.0, 15.0, 18.0), (0.0, 0.0, 4.0, 4.0)]
    described = entry(path, boxes, crowd={1})

    ours = Mapper(augmentation, training=True)(described, np.random.default_rng(seed))
    drawn = Fixed(augmentation.draw(40, 60, np.random.default_rng(seed)))
    theirs = DatasetMapper(is_train=True, augmentations=[drawn], image_format="RGB")(described)

    assert torch.equal(ours["image"], theirs["image"])
    assert torch.equal(ours["instances"].gt_classes, theirs["instances"].gt_classes)
    torch.testing.assert_close(
        ours["instances"].gt_boxes.tensor, theirs["instances"].gt_boxes.tensor
    )


def test_sizes_are_those_asked_for(picture):
    mapper = Mapper(Augmentation(short_sides=(20, 30), max_side=36, crop=0), training=True)
    shapes = set()
    for seed in range(20):
        image = mapper(entry(picture), np.random.default_rng(seed))["image"]
        shapes.add(tuple(image.shape[1:]))
    assert shapes == {(20, 30), (24, 36)}  # 30 × 45 is too long: 36 at most


def test_half_of_the_images_are_flipped():
    rng = np.random.default_rng(0)
    augmentation = Augmentation(short_sides=(), crop=0)
    flips = sum(len(augmentation.draw(40, 60, rng).transforms) for _ in range(2000))
    assert 900 < flips < 1100


def test_crowd_is_no_target_and_boxes_keep_their_label(picture):
    mapped = Mapper(STILL, training=True)(
        entry(picture, [(0, 0, 9, 9), (1, 1, 9, 9), (2, 2, 9, 9)], crowd={1}),
        np.random.default_rng(0),
    )
    assert mapped["instances"].gt_classes.tolist() == [0, 2]


def test_a_test_image_carries_no_targets(picture):
    mapped = Mapper(STILL, training=False)(entry(picture, [(0, 0, 9, 9)]))
    assert "instances" not in mapped
    assert "annotations" not in mapped
    assert mapped["image"].shape == (3, 40, 60)


def test_an_image_of_another_size_than_annotated_is_refused_by_name(picture):
    with pytest.raises(InputError, match=r"picture\.png is 60×40 but its annotation says 61×40"):
        Mapper(STILL, training=False)(entry(picture, size=(40, 61)))


def test_an_unreadable_image_is_refused_by_name(tmp_path):
    (tmp_path / "broken.jpg").write_bytes(b"\xff\xd8\xff\xe0 not really")
    with pytest.raises(InputError, match=r"broken\.jpg"):
        Mapper(STILL, training=False)(entry(tmp_path / "broken.jpg"))


def test_exif_orientation_is_applied(tmp_path):
    image = Image.fromarray(np.zeros((40, 60, 3), dtype=np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6
    image.save(tmp_path / "turned.jpg", exif=exif)
    mapped = Mapper(STILL, training=False)(entry(tmp_path / "turned.jpg", size=(60, 40)))
    assert mapped["image"].shape == (3, 60, 40)
