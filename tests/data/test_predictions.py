"""Stored predictions: whole or made again, refused where they are of something else, and carried
through the augmentation as worked by hand."""

import logging
import pickle

import numpy as np
import pytest
from detectron2.data import transforms as T
from PIL import Image

from cldetr.data.mapper import Augmentation, Mapper
from cldetr.data.predictions import (
    ImagePredictions,
    PredictionStore,
    find_predictions,
    write_predictions,
)
from cldetr.errors import InputError

ABOUT = {"teacher": "abc", "data": "def", "classes": ["cat", "dog"]}


def some(count, seed=0, background=False):
    rng = np.random.default_rng(seed)
    return ImagePredictions(
        rng.random((count, 2), dtype=np.float32),
        rng.random((count, 4), dtype=np.float32),
        rng.random(count, dtype=np.float32) if background else None,
    )


def same(one, other):
    pairs = [(one.scores, other.scores), (one.boxes, other.boxes)]
    if one.background is not None or other.background is not None:
        pairs.append((one.background, other.background))
    return all(np.array_equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("background", [False, True])
def test_what_is_stored_is_found_image_by_image(tmp_path, background):
    parts = [some(3, 1, background), some(0, 2, background), some(2, 3, background)]
    write_predictions(tmp_path / "p", parts, ABOUT)
    store = find_predictions(tmp_path / "p", ABOUT)
    assert len(store) == 3
    assert all(same(store[index], part) for index, part in enumerate(parts))
    again = pickle.loads(pickle.dumps(store))  # as a spawned worker gets it
    assert same(again[2], parts[2])
    assert len(pickle.dumps(store)) < 500


@pytest.mark.parametrize("key", list(ABOUT))
def test_predictions_of_something_else_are_refused(tmp_path, key):
    write_predictions(tmp_path, [some(1)], ABOUT)
    with pytest.raises(InputError, match=f"not those of this stage.*\n.*{key}: stored"):
        find_predictions(tmp_path, {**ABOUT, key: "other"})


def test_predictions_without_a_manifest_never_happened(tmp_path):
    write_predictions(tmp_path, [some(1)], ABOUT)
    (tmp_path / "manifest.json").unlink()
    assert find_predictions(tmp_path, ABOUT) is None


@pytest.mark.parametrize("harm", ["flip", "cut", "delete", "manifest"])
def test_damage_is_noticed_and_told(tmp_path, harm, caplog):
    write_predictions(tmp_path, [some(5)], ABOUT)
    path = tmp_path / ("manifest.json" if harm == "manifest" else "scores.npy")
    content = bytearray(path.read_bytes())
    if harm == "delete":
        path.unlink()
    elif harm == "flip":
        content[-1] ^= 1
        path.write_bytes(content)
    else:
        path.write_bytes(content[:-20])
    with caplog.at_level(logging.WARNING):
        assert find_predictions(tmp_path, ABOUT) is None
    assert "again" in caplog.text


def test_a_stored_file_with_code_in_it_is_not_executed(tmp_path):
    write_predictions(tmp_path, [some(1)], ABOUT)
    np.save(tmp_path / "scores.npy", np.array([print], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match=r"pickle|object"):
        PredictionStore(tmp_path)


class Fixed(Augmentation):
    """An augmentation without chance."""

    def draw(self, height, width, rng):
        return T.TransformList(STEPS)


STEPS = [
    T.HFlipTransform(60),  # x becomes 60 − x
    T.ResizeTransform(40, 60, 80, 120),  # twice the size
    T.CropTransform(20, 0, 80, 50, 120, 80),  # x 20-100, y 0-50
]


def test_predictions_follow_flip_resize_and_crop_worked_by_hand(tmp_path):
    path = tmp_path / "picture.png"
    Image.fromarray(np.zeros((40, 60, 3), dtype=np.uint8)).save(path)
    boxes = [
        [20, 10, 30, 20],  # flipped 30-40, doubled 60-80 × 20-40, cropped 40-60 × 20-40
        [40, 10, 58, 30],  # 2-20 → 4-40 × 20-60 → cut to 0-20 × 20-50
        [52, 5, 60, 9],  # 0-8 → 0-16: left of the window, gone
        [20, 26, 30, 36],  # y 52-72: below the window, gone
        [20, -4, 30, 20],  # over the upper border, which the crop leaves: y −8 to 40
    ]
    stored = ImagePredictions(
        np.arange(10, dtype=np.float32).reshape(5, 2) / 10,
        np.array(boxes, dtype=np.float32),
        np.arange(5, dtype=np.float32) / 5,
    )
    entry = {"file_name": str(path), "height": 40, "width": 60, "predictions": stored}
    carried = Mapper(Fixed(), training=True)(entry, np.random.default_rng(0))["predictions"]
    assert carried.image_size == (50, 80)
    assert carried.pred_boxes.tensor.tolist() == [
        [40, 20, 60, 40],
        [0, 20, 20, 50],
        [40, -8, 60, 40],
    ]
    np.testing.assert_array_equal(carried.scores.numpy(), stored.scores[[0, 1, 4]])
    np.testing.assert_array_equal(carried.background.numpy(), stored.background[[0, 1, 4]])


def test_predictions_and_annotations_go_the_same_way(tmp_path):
    path = tmp_path / "picture.png"
    Image.fromarray(np.zeros((48, 64, 3), dtype=np.uint8)).save(path)
    mapper = Mapper(
        Augmentation(short_sides=(30, 50), crop_short_sides=(40,), crop_size=(20, 36)),
        training=True,
    )
    box = [13.0, 11.0, 40.0, 31.0]
    stored = ImagePredictions(np.ones((1, 1), np.float32), np.array([box], np.float32))
    annotation = {"bbox": box, "bbox_mode": 0, "category_id": 0}
    entry = {
        **{"file_name": str(path), "height": 48, "width": 64, "predictions": stored},
        "annotations": [annotation],
    }
    for seed in range(30):
        mapped = mapper(entry, np.random.default_rng(seed))
        np.testing.assert_allclose(
            mapped["predictions"].pred_boxes.tensor.numpy(),
            mapped["instances"].gt_boxes.tensor.numpy(),
            atol=1e-4,
        )
