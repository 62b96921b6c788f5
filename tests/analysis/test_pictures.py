"""Pictures of runs: what is drawn is what training does, and it is where it should be."""

import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from cldetr.analysis.pictures import RunArtist, draw_run_pictures
from cldetr.cli import main
from cldetr.drawing.boxes import BLUE, GREEN, YELLOW, Box
from cldetr.drawing.scene import Scene, draw_scene, examine_image
from cldetr.engine.restore import config_of_run, final_weights
from cldetr.errors import InputError
from cldetr.modeling.matcher import Matcher


@pytest.fixture
def run(tiny_run, tmp_path):
    """A copy of the run to write into."""
    return shutil.copytree(tiny_run, tmp_path / "run")


def colored(image, color, x, y, reach=14):
    """Whether a colour is near a point."""
    x, y = round(x), round(y)
    pixels = np.asarray(image)[y - reach : y + reach, x - reach : x + reach]
    return bool((pixels == color).all(axis=2).any())


def test_a_scene_has_its_colours_where_its_boxes_are():
    scene = Scene(
        np.full((96, 96, 3), 128, dtype=np.uint8),
        truth=[Box((10, 10, 40, 40), GREEN, "cat")],
        pseudo=[Box((50, 50, 90, 90), BLUE, "dog 0.80")],
        dropped=[],
        matched=[
            Box((12, 12, 42, 42), YELLOW, "cat 0.70"),
            Box((52, 52, 88, 88), YELLOW, "dog 0.60"),
        ],
        links=[0, 1],
        hidden=[Box((51, 51, 91, 91), GREEN, "dog")],
    )
    sheet = draw_scene(scene)
    assert sheet.width == 3 * 480 + 2 * 12 + 2 * 8
    panels = [8 + number * 492 for number in range(3)]
    top = sheet.height - 480 - 33  # below the pictures is the legend
    # lower left corners, in the panels of old classes, merged labels and predictions
    assert colored(sheet, BLUE, panels[0] + 5 * 50, top + 5 * 90)
    assert colored(sheet, GREEN, panels[0] + 5 * 91, top + 5 * 70)
    assert colored(sheet, GREEN, panels[1] + 5 * 10, top + 5 * 40)
    assert colored(sheet, BLUE, panels[1] + 5 * 50, top + 5 * 90)
    assert colored(sheet, YELLOW, panels[2] + 5 * 12, top + 5 * 42)
    assert colored(sheet, YELLOW, panels[2] + 5 * 88, top + 5 * 60)
    assert not colored(sheet, GREEN, panels[0] + 5 * 10, top + 5 * 40)
    # the lines between the panels, in the colours of the labels
    middle = panels[1] + 486
    for color, height in ((GREEN, 26), (BLUE, 70)):
        assert colored(sheet, color, middle, top + 5 * height, reach=6)


def test_what_is_drawn_is_what_a_training_step_does(run, monkeypatch):
    artist = RunArtist(run, config_of_run(run))
    learner = artist.learner(2)
    entry = artist.mapper(artist.given(2)[0], np.random.default_rng(0))
    scene = examine_image(learner, entry, artist.names)
    seen, call = [], Matcher.__call__

    def spy(self, output, targets, class_mask=None):
        matches = call(self, output, targets, class_mask)
        seen.append((output, targets, matches))
        return matches

    monkeypatch.setattr(Matcher, "__call__", spy)
    learner.train()
    learner.detector.eval()
    learner([entry])
    (output, (target,), matches), *_ = seen
    assert len(scene.pseudo) > 0
    assert len(scene.truth) + len(scene.pseudo) == len(target)
    drawn = [box.text.split()[0] for box in (*scene.truth, *scene.pseudo)]
    assert drawn == [artist.names[label] for label in target.labels.tolist()]
    queries = matches.queries[-1][matches.labels[-1].argsort()]
    height, width = entry["image"].shape[1:]
    centres = output.boxes[-1, 0, queries][:, :2].detach() * torch.tensor([width, height])
    corners = np.array([box.corners for box in scene.matched])
    np.testing.assert_allclose((corners[:, :2] + corners[:, 2:]) / 2, centres, rtol=1e-4, atol=1e-2)


def test_examining_leaves_the_learner_as_it_was(run):
    artist = RunArtist(run, config_of_run(run))
    learner = artist.learner(2).train()
    before = {key: value.clone() for key, value in learner.state_dict().items()}
    counts, state = learner.pseudo_counts.clone(), torch.get_rng_state()
    entry = artist.mapper(artist.given(2)[1], np.random.default_rng(0))
    examine_image(learner, entry, artist.names)
    assert learner.detector.training
    assert torch.equal(learner.pseudo_counts, counts)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[key]) for key, value in learner.state_dict().items())


def test_command_draws_every_phase_with_captions(run, capsys):
    assert main(["pictures", str(run), "--sample", "1"]) == 0
    captions = json.loads((run / "pictures/captions.json").read_text())
    files = {path.name for path in (run / "pictures").glob("*.png")}
    assert files == set(captions)
    assert {name.rsplit("_", 1)[0] for name in files} == {
        *("phase1_labels", "phase1_predictions", "phase2_labels", "phase2_predictions")
    }
    for name in files:
        with Image.open(run / "pictures" / name) as picture:
            panels = 2 if name.startswith("phase1") else 3
            assert picture.width == panels * 480 + (panels - 1) * 12 + 16
    assert "4 pictures" in capsys.readouterr().out


def test_chosen_images_are_drawn_as_what_they_are(run):
    artist = RunArtist(run, config_of_run(run))
    train = artist.scenario.phase(2).image_ids[3]
    test = int(artist.view("test", 2).image_ids[0])
    written = draw_run_pictures(run, phases=[2], images=[train, test])
    assert [path.name for path in written] == [
        f"phase2_labels_{train}.png",
        f"phase2_predictions_{test}.png",
    ]
    with pytest.raises(InputError, match="neither training images"):
        draw_run_pictures(run, phases=[2], images=[987654])


def test_a_run_that_is_under_way_has_pictures_of_what_is_there(run):
    shutil.rmtree(run / "phase2")
    assert {path.name[:6] for path in draw_run_pictures(run, sample=1)} == {"phase1"}
    with pytest.raises(InputError, match="no model of phase 2"):
        draw_run_pictures(run, phases=[2])
    shutil.rmtree(run / "phase1")
    assert final_weights(run, 1) is None
    with pytest.raises(InputError, match="no model of phase 1, 2"):
        draw_run_pictures(run)


def test_samples_are_the_same_every_time_and_show_old_and_new_classes(run):
    artist = RunArtist(run, config_of_run(run))
    labelled, old = artist.view("revealed", 2), set(artist.scenario.old(2))
    chosen = artist.choose(2, labelled, None, 3)
    assert chosen == artist.choose(2, labelled, None, 3)
    assert len(chosen) == 3
    for index in chosen:
        assert artist.given(2)[index]["annotations"]
        assert old & {obj["category_id"] for obj in labelled[index]["annotations"]}


def test_another_run_is_shown_beside(run, tmp_path):
    other = shutil.copytree(run, tmp_path / "other")
    test = RunArtist(run, config_of_run(run, "cpu")).view("test", 2)
    image = int(test.image_ids[0])
    widths = []
    for beside in (None, other):
        path, *_ = (
            path
            for path in draw_run_pictures(run, phases=[2], images=[image], beside=beside)
            if "predictions" in path.name
        )
        widths.append(Image.open(path).width)
    gap = 12
    assert (widths[1] + gap - 16) / 4 == (widths[0] + gap - 16) / 3  # one panel more
    captions = json.loads((run / "pictures" / "captions.json").read_text())
    assert (
        f"and with {json.loads((run / 'results.json').read_text())['method']}"
        in captions[path.name]
    )


def test_a_run_of_another_scenario_is_not_shown_beside(run, tmp_path, monkeypatch):
    other = shutil.copytree(run, tmp_path / "other")

    def in_another_order(root, device):
        cfg = config_of_run(root, device)
        if root == other:
            cfg.defrost()
            cfg.SCENARIO.ORDER, cfg.SCENARIO.CLASS_SEED = "seed", 1
        return cfg

    monkeypatch.setattr("cldetr.analysis.pictures.config_of_run", in_another_order)
    with pytest.raises(InputError, match="compare runs of one scenario and order"):
        draw_run_pictures(run, phases=[2], beside=other)
