"""Groups of queries from file to file: which queries a run takes over, and what it refuses."""

import pytest
import torch
from detectron2.modeling import build_model

from cldetr.engine.checkpoint import load_state, save_state
from cldetr.engine.initial_weights import initialise, load_trained_detector
from cldetr.engine.resolve import resolve
from cldetr.engine.restore import build_detector, describe
from cldetr.engine.stages import training_learner
from cldetr.errors import InputError
from cldetr.methods.method import Method
from cldetr.methods.pseudo import PseudoRule

EACH = ["MODEL.DETR.QUERY_GROUPS", "[-1]"]
QUERIES = "query_embed.weight"


@pytest.fixture
def make(tiny_config, tmp_path):
    """Builds the detector of a tiny run and writes it as the weights of a phase."""

    def make(*words, phase=1):
        cfg, data = resolve(tiny_config(tmp_path / "run", *words))
        detector = build_model(cfg)
        path = tmp_path / "model.pth"
        meta = describe(cfg, data.scenario, phase, "train", (64, 64))
        save_state(path, {"model": detector.state_dict(), "cldetr": meta})
        return cfg, data.scenario, detector, path

    return make


def test_a_run_without_groups_takes_the_first_group_of_a_detector_with_groups(
    make, tiny_config, tmp_path
):
    _, scenario, grouped, path = make(*EACH)
    cfg, _ = resolve(tiny_config(tmp_path, "MODEL.DETECTOR", str(path)))
    assert cfg.MODEL.DETR.QUERY_GROUPS == []
    plain = build_model(cfg)
    load_trained_detector(plain, str(path), scenario)
    size = cfg.MODEL.DETR.NUM_QUERIES
    assert len(plain.state_dict()[QUERIES]) == size
    assert torch.equal(plain.state_dict()[QUERIES], grouped.state_dict()[QUERIES][:size])


def test_a_detector_without_groups_gives_its_queries_to_the_first(make, tiny_config, tmp_path):
    cfg, scenario, plain, path = make()
    cfg, _ = resolve(tiny_config(tmp_path, *EACH))
    size = cfg.MODEL.DETR.NUM_QUERIES
    for load in (
        lambda detector: load_trained_detector(detector, str(path), scenario),
        lambda detector: initialise(detector, str(path)),
    ):
        grouped = build_model(cfg)
        before = grouped.state_dict()[QUERIES].clone()
        load(grouped)
        now = grouped.state_dict()[QUERIES]
        assert torch.equal(now[:size], plain.state_dict()[QUERIES])
        assert torch.equal(now[size:], before[size:])


@pytest.mark.parametrize("words", [[], EACH], ids=["plain", "groups"])
def test_another_number_of_queries_is_refused(make, tiny_config, tmp_path, words):
    cfg, scenario, _, path = make(*words)
    half = str(cfg.MODEL.DETR.NUM_QUERIES // 2)  # of which the file has a multiple
    other, _ = resolve(tiny_config(tmp_path, *EACH, "MODEL.DETR.NUM_QUERIES", half))
    for load in (
        lambda x: load_trained_detector(x, str(path), scenario),
        lambda x: initialise(x, str(path)),
    ):
        with pytest.raises(
            InputError, match=r"query_embed.weight: expected|set MODEL.DETR.NUM_QUERIES"
        ):
            load(build_model(other))


def test_classes_stay_with_the_queries_that_learnt_them(make, tiny_config, tmp_path):
    _, _, _, path = make(*EACH, phase=2)  # the fourth class has queries of its own
    cfg, data = resolve(tiny_config(tmp_path, "SCENARIO.NAME", "4"))
    with pytest.raises(InputError, match=r"(?s)other queries predict.*group 1 there, 0 here"):
        load_trained_detector(build_model(cfg), str(path), data.scenario)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*EACH, "MODEL.DETR.TWO_STAGE", "True"], "TWO_STAGE False"),
        (["MODEL.DETR.QUERY_GROUPS", "[0, -1, 0, 1]"], "a group from 0 on for each class"),
    ],
)
def test_groups_that_cannot_be_are_refused_before_training(tiny_config, tmp_path, words, message):
    with pytest.raises(InputError, match=message):
        resolve(tiny_config(tmp_path, *words))


def test_a_config_that_leaves_the_groups_open_takes_those_of_the_weights(
    make, tiny_config, tmp_path
):
    cfg, _, _, path = make(*EACH)
    found = build_detector(tiny_config(tmp_path, *EACH), load_state(path), str(path))
    assert found.query_groups == 2
    assert [found.query_group(label) for label in range(4)] == cfg.MODEL.DETR.QUERY_GROUPS


def test_looking_at_a_phase_leaves_its_queries_as_they_are(make):
    """Pictures and plans make the learner of a phase from weights that are trained."""
    _, scenario, detector, _ = make(*EACH)
    before = detector.state_dict()[QUERIES].clone()
    training_learner(detector, Method("dkd", pseudo=PseudoRule()), scenario, 2, detector)
    assert torch.equal(detector.state_dict()[QUERIES], before)


def test_queries_of_later_phases_are_no_predictions_of_old_classes(make):
    """A score of 0, not of nearly 0: METHOD.PSEUDO.SELECT all takes whatever is above it."""
    cfg, scenario, detector, _ = make(*EACH)
    size = cfg.MODEL.DETR.NUM_QUERIES
    batch = [{"image": torch.randint(0, 255, (3, 64, 64), dtype=torch.uint8)}]
    with torch.no_grad():
        output = detector.eval().predict(detector.preprocess(batch))
    old = list(scenario.old(2))
    scores = detector.scores(output.logits[-1])[0, :, old].amax(dim=-1)
    assert (scores[:size] > 0).all()
    assert (scores[size:] == 0).all()
