"""What a config leaves to the data, least numbers of steps, and runs that fail early or diverge."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from cldetr.config import load_config
from cldetr.config_files import find_config
from cldetr.engine.hooks import DivergenceHook
from cldetr.engine.resolve import resolve
from cldetr.engine.trainer import IncrementalTrainer
from cldetr.errors import InputError
from cldetr.settings import StageSchedule

from ..coco_files import write
from .conftest import train


def test_a_stage_has_a_least_number_of_steps_and_drops_scale_along():
    plain = StageSchedule(10.0, drops=(8.0,))
    assert (plain.steps(9), plain.milestones(9)) == (90, (72,))
    least = StageSchedule(10.0, drops=(8.0,), min_steps=900)
    assert (least.steps(9), least.milestones(9)) == (900, (720,))
    assert (least.steps(100), least.milestones(100)) == (1000, (800,))  # enough as it is
    both = StageSchedule(10.0, min_steps=900, max_steps=30)
    assert both.steps(9) == 30


def own_data(folder, images, size, objects):
    """Files of data sets with images of a size and some number of objects in each; references."""
    width, height = size
    references = []
    for name, category in (("old", 1), ("new", 2)):
        content = {
            "images": [
                {"id": i, "file_name": f"{i}.png", "width": width, "height": height}
                for i in range(1, images + 1)
            ],
            "annotations": [
                {"id": n, "image_id": 1 + n % images, "category_id": category, "iscrowd": 0}
                | {"bbox": [1, 1, 20, 20], "area": 400}
                for n in range(images * objects)
            ],
            "categories": [{"id": category, "name": f"category {category}"}],
        }
        references.append(f"{write(folder / f'{name}.json', content)}:{folder}")
    return references


@pytest.mark.parametrize(
    ("config", "images", "size", "objects", "expected"),
    [
        ("custom_small", 30, (200, 200), 32, (70, 200, [200], 4, 1)),
        ("custom_small", 150, (96, 96), 4, (20, 96, [96], 8, 1)),
        ("custom_small", 1000, (2000, 1500), 4, (20, 200, [200], 16, 1)),
        ("custom", 150, (1000, 750), 12, (30, 750, None, 8, 4)),
        ("custom", 150, (4000, 3000), 12, (30, 800, None, 8, 4)),
    ],
)
def test_queries_sizes_and_batch_follow_from_the_data(
    tmp_path, config, images, size, objects, expected
):
    data = own_data(tmp_path, images, size, objects)
    words = ["DATASETS.TRAIN", str(data), "DATASETS.TEST", str(data[:1])]
    cfg, _ = resolve(load_config(str(find_config(config)), words))
    queries, side, sides, batch, parts = expected
    assert queries == cfg.MODEL.DETR.NUM_QUERIES
    assert side == cfg.INPUT.MIN_SIZE_TEST
    if sides is None:  # several scales, the largest of them the size at test
        assert (min(cfg.INPUT.MIN_SIZE_TRAIN), max(cfg.INPUT.MIN_SIZE_TRAIN)) == (0.6 * side, side)
    else:
        assert sides == cfg.INPUT.MIN_SIZE_TRAIN
        assert not cfg.INPUT.CROP.ENABLED
    assert (batch, parts) == (cfg.SOLVER.IMS_PER_BATCH, cfg.SOLVER.ACCUMULATE)
    again, _ = resolve(load_config(str(find_config(config)), [*words, "SOLVER.IMS_PER_BATCH", "6"]))
    assert again.SOLVER.IMS_PER_BATCH == 6


def test_a_loss_that_diverges_stops_the_run(tiny_config, tmp_path):
    words = ["SOLVER.BASE_LR", "5.0", "SOLVER.CLIP_GRADIENTS.ENABLED", "False"]
    cfg = tiny_config(tmp_path, *words, "SCHEDULE.FIRST.MIN_STEPS", "60")
    with pytest.raises(InputError, match=r"diverges|not finite|no finite gradient"):
        train(cfg)


def logged(losses, of_boxes=()):
    """What the hook does with a stage that logs these losses."""
    hook = DivergenceHook()
    for step, loss in enumerate(losses):
        values = {"total_loss": (loss, step)}
        if of_boxes:
            values["loss_bbox"] = (of_boxes[step], step)
        storage = SimpleNamespace(latest=lambda values=values: values)
        place = {"phase": 1, "stage": "train", "step": step, "iter": step}
        cfg = SimpleNamespace(SOLVER=SimpleNamespace(BASE_LR=0.5))
        hook.trainer = SimpleNamespace(storage=storage, cfg=cfg, **place)
        hook.after_step()


def test_a_loss_far_above_its_lowest_diverges_and_a_noisy_one_does_not():
    rng = np.random.default_rng(0)
    logged(rng.uniform(1, 7, 200))
    logged([12.0] * 5 + [3.0] * 20 + [1000.0] * 2 + [3.0] * 20)  # an outlier
    with pytest.raises(InputError, match=r"it is 490 after 12\. .* lower SOLVER\.BASE_LR \(0\.5"):
        logged([12.0] * 5 + [490.0] * 20)


def test_batches_without_an_object_say_nothing_about_divergence():
    losses = [0.5, 9.0, 0.1, 0.2, 0.3, 8.0, 7.5, 7.0, 8.0, 7.0, 6.0]
    logged(losses, [0.0, 1.0, 0.0, 0.0, 0.0, *[1.0] * 6])
    with pytest.raises(InputError, match="diverges"):
        logged(losses, [1.0] * len(losses))


def test_a_failed_start_does_not_block_the_corrected_command(tiny_config, tmp_path):
    out = tmp_path / "run"
    with pytest.raises(InputError):
        IncrementalTrainer(tiny_config(out, "DATASETS.TEST", "['none.json:none']"))
    assert not out.exists()
    with pytest.raises(InputError, match="no weights at"):
        train(tiny_config(out, "MODEL.WEIGHTS", str(tmp_path / "typo.pth")))
    short = ["SCHEDULE.FIRST.MAX_STEPS", "1", "SCHEDULE.TRAIN.MAX_STEPS", "1"]
    results = train(tiny_config(out, *short))  # without --resume
    assert len(results["phases"]) == 2
    assert json.loads((out / "identity.json").read_text())["identity"]["MODEL.WEIGHTS"] == ""
