"""The greedy choice of Eq. 6 against a twin that scores every image in exact arithmetic."""

from fractions import Fraction
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_array

from cldetr.data import greedy_kl
from cldetr.data.exemplars import kl_curve, kl_divergence
from cldetr.data.greedy_kl import Objective, choose_greedily, instance_bins

from ..coco_files import class_counts


def exhaustive(objective: Objective, number: int) -> list[int]:
    """Eq. 6 with the limit of smoothing, image by image, in whole numbers.

    Σ_c W_c log(E_c + k_c) − W log(T + n) orders images as ∏_c (E_c + k_c)^W_c / (T + n)^W does.
    """
    counts = objective.counts
    dense = counts.toarray()
    weights = objective.weights.tolist()
    held, total, chosen = [0] * counts.shape[1], 0, []
    for _ in range(min(number, np.count_nonzero(objective.sizes))):
        scores = {}
        for image in np.flatnonzero(objective.sizes).tolist():
            if image not in chosen:
                after = [have + int(more) for have, more in zip(held, dense[image], strict=True)]
                covered = sum(w for w, value in zip(weights, after, strict=True) if value)
                product = prod(v**w for w, v in zip(weights, after, strict=True) if v)
                size = total + int(objective.sizes[image])
                scores[image] = covered, Fraction(product, size**objective.scale)
        best = max(scores, key=lambda image: (scores[image], -image))
        chosen.append(best)
        held = [have + int(more) for have, more in zip(held, dense[best], strict=True)]
        total += int(objective.sizes[best])
    return chosen


image_lists = st.lists(st.lists(st.integers(0, 4), max_size=6), min_size=1, max_size=14)


@settings(max_examples=150, deadline=None)
@given(rows=image_lists, number=st.integers(1, 14))
def test_choice_equals_exhaustive_greedy(rows, number):
    objective = Objective.classes(class_counts(rows, 5))
    assert choose_greedily(objective, number).tolist() == exhaustive(objective, number)


@settings(max_examples=40, deadline=None)
@given(rows=st.lists(st.lists(st.integers(0, 2), max_size=5), min_size=1, max_size=8))
def test_joint_choice_equals_exhaustive_greedy(rows):
    objective = Objective.classes_and_instances(class_counts(rows, 3))
    assert choose_greedily(objective, 8).tolist() == exhaustive(objective, 8)


def random_counts(seed: int, images: int, classes: int) -> csr_array:
    """Images as in COCO: classes of very unequal frequency, few to an image, often repeated."""
    rng = np.random.default_rng(seed)
    share = (np.arange(classes) + 1.0) ** -1.2
    rows = [
        np.repeat(
            rng.choice(classes, kinds, replace=False, p=share / share.sum()),
            rng.zipf(1.9, kinds).clip(max=20),
        ).tolist()
        for kinds in rng.integers(0, 5, images)
    ]
    return class_counts(rows, classes)


def test_each_choice_has_the_least_divergence():
    counts = random_counts(0, 400, 12)
    objective = Objective.classes(counts)
    chosen = choose_greedily(objective, 60)
    data, dense = counts.sum(axis=0), counts.toarray()
    covered = np.flatnonzero(np.isfinite(kl_curve(counts, chosen)))[0]
    for step in range(covered + 1, 60):
        after = dense[chosen[:step]].sum(0) + dense
        q = after / after.sum(1, keepdims=True)
        p = data / data.sum()
        kl = (p * np.log(p / q)).sum(1)
        kl[chosen[:step]] = np.inf
        kl[counts.sum(axis=1) == 0] = np.inf
        assert kl[chosen[step]] <= kl.min() + 1e-12


@pytest.mark.parametrize("kind", [Objective.classes, Objective.classes_and_instances])
def test_fresh_sums_do_not_change_the_choice(monkeypatch, kind):
    objective = kind(random_counts(3, 3000, 30))
    seldom = choose_greedily(objective, 1200)
    monkeypatch.setattr(greedy_kl, "_REFRESH", 1)
    np.testing.assert_array_equal(choose_greedily(objective, 1200), seldom)


def test_all_labelled_images_can_be_chosen():
    counts = random_counts(4, 500, 8)
    chosen = choose_greedily(Objective.classes(counts), 10_000)
    assert sorted(chosen) == np.flatnonzero(counts.sum(axis=1)).tolist()


def test_of_equal_images_the_first_is_chosen():
    objective = Objective.classes(class_counts([[1], [0], [0], [1], [1, 0], [0, 1]], 2))
    # First 4 and 5, which cover both classes at once; from then on every pair is as good.
    assert choose_greedily(objective, 6).tolist() == [4, 5, 0, 1, 2, 3]


def test_equal_scores_of_unlike_images_are_ties():
    # Weights 1 and 2; once one object of 0 and one of 1 are held, three more of 0 make 4^1 of its
    # factor, one more of 1 makes 2^2: the same product, though not the same sum in floating point.
    counts = class_counts([[0, 0, 0], [0, 1], [1]], 2)
    objective = Objective(counts, np.array([1, 2]), np.array([1, 1, 1]), 3)
    assert choose_greedily(objective, 3).tolist() == [1, 0, 2]
    swapped = Objective(counts[np.array([2, 1, 0])], objective.weights, objective.sizes, 3)
    assert choose_greedily(swapped, 3).tolist() == [1, 0, 2]


def test_a_difference_below_rounding_counts():
    # The weights differ by one in 10^17: as float64 they are the same number.
    counts = class_counts([[0], [1], [0], [1]], 2)
    weights = np.array([10**17, 10**17 + 1])
    objective = Objective(counts, weights, counts.sum(axis=1), int(weights.sum()))
    assert choose_greedily(objective, 4).tolist() == [1, 0, 3, 2]


def test_covering_prefers_the_larger_share_then_the_finite_part():
    rows = [[0], [1, 2], [0, 1], [0, 0, 0, 1], [3]]
    objective = Objective.classes(class_counts(rows, 4))
    # p ∝ (5, 3, 1, 1). Images 2 and 3 cover 8 of 10; log shares: 5/10 ln ½ + 3/10 ln ½ = −0.55
    # against 5/10 ln ¾ + 3/10 ln ¼ = −0.56. Then 1 and 4 cover one class each: (1, 2, 1) in
    # 4 objects against (1, 1, 1) in 3.
    chosen = choose_greedily(objective, 5).tolist()
    assert chosen == exhaustive(objective, 5)
    assert chosen[0] == 2
    assert set(chosen[1:3]) == {1, 4}


def test_images_without_a_label_are_no_candidates():
    # Once [0, 1] is held the match is perfect: any labelled image makes it worse, an empty one
    # would not. It must not be chosen for that.
    objective = Objective.classes(class_counts([[], [0, 1], [], [0], [1]], 2))
    assert choose_greedily(objective, 5).tolist() == [1, 3, 4]


def test_no_labels_at_all_choose_nothing():
    objective = Objective.classes(class_counts([[], []], 2))
    assert choose_greedily(objective, 1).tolist() == []
    assert Objective.classes_and_instances(objective.counts).scale == 0


def test_progress_adds_up():
    calls: list[int] = []
    objective = Objective.classes(random_counts(5, 900, 10))
    choose_greedily(objective, 700, calls.append)
    assert sum(calls) == 700


def test_bins_of_instances_double_every_two():
    numbers = np.arange(1, 33)
    edges = numbers[np.flatnonzero(np.diff(instance_bins(numbers), prepend=-1))]
    assert edges.tolist() == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32]


def test_each_joint_choice_has_the_least_sum_of_divergences():
    counts = random_counts(7, 150, 6)
    sizes = counts.sum(axis=1)
    chosen = choose_greedily(Objective.classes_and_instances(counts), 40).tolist()
    labelled = np.flatnonzero(sizes)
    bins = np.bincount(instance_bins(sizes[labelled]))
    checked = 0
    for step in range(1, 40):
        sums = {}
        for image in set(labelled.tolist()) - set(chosen[:step]):
            after = np.array([*chosen[:step], image])
            held = np.bincount(instance_bins(sizes[after]), minlength=len(bins))
            sums[image] = kl_divergence(
                counts.sum(axis=0), counts[after].sum(axis=0)
            ) + kl_divergence(bins, held)
        if np.isfinite(best := min(sums.values())):
            assert sums[chosen[step]] <= best + 1e-12
            checked += 1
    assert checked > 20


def test_joint_objective_keeps_the_number_of_objects_per_image():
    counts = random_counts(6, 3000, 15)
    sizes = counts.sum(axis=1)
    plain = choose_greedily(Objective.classes(counts), 300)
    joint = choose_greedily(Objective.classes_and_instances(counts), 300)
    wanted = sizes[sizes > 0].mean()
    assert abs(sizes[joint].mean() - wanted) < abs(sizes[plain].mean() - wanted) / 2
    assert kl_curve(counts, joint)[-1] < 1e-2
