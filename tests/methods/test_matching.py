"""Quality-guided matching: which least IoU each label asks for, and from which phase on."""

import pytest
import torch

from cldetr.errors import InputError
from cldetr.methods.matching import MatcherRule, set_min_iou
from cldetr.modeling.structures import Target


def labels(flags):
    flags = torch.tensor(flags)
    return Target(
        torch.zeros(len(flags), dtype=torch.int64), torch.rand(len(flags), 4), None, flags
    )


def test_pseudo_labels_and_new_labels_have_floors_of_their_own():
    plain = Target(torch.tensor([0]), torch.rand(1, 4))
    found = set_min_iou([labels([False, True]), plain], MatcherRule(0.7, 0.5), progress=0.0)
    assert found[0].min_iou.tolist() == pytest.approx([0.5, 0.7])
    assert found[1].min_iou.tolist() == pytest.approx([0.5])


@pytest.mark.parametrize(
    ("progress", "wanted"),
    [(0.0, [0.0, 0.0]), (0.1, [0.2, 0.3]), (0.2, [0.4, 0.6]), (1, [0.4, 0.6])],
)
def test_a_ramp_raises_both_floors_from_zero(progress, wanted):
    rule = MatcherRule(pseudo_iou=0.6, new_iou=0.4, ramp=0.2)
    (found,) = set_min_iou([labels([False, True])], rule, progress)
    assert found.min_iou.tolist() == pytest.approx(wanted)


@pytest.mark.parametrize("settings", [{"pseudo_iou": 1.2}, {"new_iou": -0.1}, {"ramp": 2.0}])
def test_floors_outside_the_unit_interval_are_refused_by_their_key(settings):
    (name,) = settings
    with pytest.raises(InputError, match=rf"METHOD.MATCHER.{name.upper()} must lie in \[0, 1\]"):
        MatcherRule(**settings)
