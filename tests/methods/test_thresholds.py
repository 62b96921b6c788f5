"""Thresholds by class: the exact 2-means of one dimension, the floor and the fallback."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cldetr.errors import InputError
from cldetr.methods.pseudo import Predictions, PseudoRule, candidates, make_pseudo_labels
from cldetr.methods.thresholds import class_thresholds, split_scores, threshold_scores

RULE = PseudoRule(select="per_class", score=0.4, score_floor=0.2, soft=False)


def test_two_groups_are_told_apart_by_hand():
    assert split_scores(np.array([0.9, 0.21, 0.25, 0.8, 0.3])) == 0.8
    assert split_scores(np.array([0.5, 0.5, 0.6])) == 0.6
    assert split_scores(np.array([0.5, 0.5])) is None
    assert split_scores(np.array([0.5])) is None


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 20), min_size=2, max_size=12))
def test_no_division_into_two_is_better(values):
    scores = np.array(values) / 20
    found = split_scores(scores)
    cost = {}
    for limit in sorted(set(scores))[1:]:
        low, high = scores[scores < limit], scores[scores >= limit]
        cost[limit] = ((low - low.mean()) ** 2).sum() + ((high - high.mean()) ** 2).sum()
    if not cost:
        assert found is None
    else:
        assert cost[found] == pytest.approx(min(cost.values()), abs=1e-12)


def test_a_class_with_few_scores_has_the_rules_score():
    scores = np.array([0.3] * 6 + [0.8] * 6 + [0.9] * 3)
    labels = np.array([4] * 12 + [7] * 3)
    found = class_thresholds(scores, labels, [7, 4, 2], RULE)
    assert found.values == {2: 0.4, 4: 0.8, 7: 0.4}
    assert found.fallback == (2, 7)


def test_scores_below_the_floor_do_not_count_and_each_query_has_its_best_class():
    scores = torch.tensor([[[0.5, 0.3], [0.1, 0.19], [0.0, 0.2]]])
    pred = Predictions(scores, torch.rand(1, 3, 4), None)
    found = threshold_scores(pred, RULE)
    assert found[0].tolist() == pytest.approx([0.5, 0.2])
    assert found[1].tolist() == [0, 1]


def test_a_prediction_is_kept_at_its_class_threshold():
    scores = torch.tensor([[[0.5, 0.0], [0.0, 0.5], [0.45, 0.1]]])
    thresholds = torch.tensor([0.45, 0.6])
    usable = torch.ones(1, 2, dtype=torch.bool)
    (found,) = make_pseudo_labels(
        scores, torch.rand(1, 3, 4), None, usable, RULE, thresholds=thresholds
    )
    assert found.labels.tolist() == [0, 0]
    stored = candidates(Predictions(scores, torch.rand(1, 3, 4), None), RULE)
    assert stored.tolist() == [[True, True, True]]  # thresholds may be found from what is stored


def test_a_fallback_below_the_floor_is_refused():
    with pytest.raises(InputError, match=r"SCORE_FLOOR 0\.2"):
        PseudoRule(select="per_class", score=0.1)
