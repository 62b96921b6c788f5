import numpy as np
import pytest

from cldetr.data.exemplars import kl_curve, kl_divergence

from ..coco_files import class_counts


def test_counts_labels_of_each_image():
    counts = class_counts([[2, 0, 2], [], [1]], 3)
    assert counts.toarray().tolist() == [[1, 0, 2], [0, 0, 0], [0, 1, 0]]
    assert counts.indices.tolist() == [0, 2, 1]  # ascending in a row, without stored zeros


def test_kl_by_hand():
    # p = (1/2, 1/4, 1/4), q = (1/4, 1/2, 1/4): KL = (1/2) ln 2 − (1/4) ln 2
    assert kl_divergence(np.array([4, 2, 2]), np.array([1, 2, 1])) == pytest.approx(np.log(2) / 4)
    assert kl_divergence(np.array([4, 2, 2]), np.array([2, 1, 1])) == 0


def test_kl_is_infinite_while_a_class_is_missing_and_ignores_classes_without_objects():
    assert kl_divergence(np.array([4, 2]), np.array([1, 0])) == np.inf
    assert kl_divergence(np.array([4, 2]), np.array([0, 0])) == np.inf
    assert kl_divergence(np.array([4, 0]), np.array([1, 0])) == 0


def test_kl_keeps_its_digits_when_it_is_tiny():
    # p = 1/2 ± 0, q = 1/2 ± d: KL = −½ ln(1 − 4 d²) ≈ 2 d², far below what log p − log q resolves
    half = 10**8
    d = 1 / (2 * half)
    got = kl_divergence(np.array([1, 1]), np.array([half + 1, half - 1]))
    assert got == pytest.approx(2 * d**2, rel=1e-6)


def test_kl_curve_follows_the_choices():
    counts = class_counts([[0, 0, 1], [0], [1], []], 2)
    curve = kl_curve(counts, np.array([3, 1, 2, 0]))
    data = counts.sum(axis=0)  # 3, 2
    assert curve[:2].tolist() == [np.inf, np.inf]
    np.testing.assert_allclose(
        curve[2:], [kl_divergence(data, np.array([1, 1])), kl_divergence(data, np.array([3, 2]))]
    )
    assert curve[3] == 0


def test_kl_curve_is_the_same_in_blocks():
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 5, rng.integers(0, 4)).tolist() for _ in range(2500)]
    counts = class_counts(rows, 5)
    order = rng.permutation(2500)
    curve = kl_curve(counts, order)
    for size in (1, 1024, 1025, 2500):
        held = counts[order[:size]].sum(axis=0)
        assert curve[size - 1] == pytest.approx(
            kl_divergence(counts.sum(axis=0), held), rel=1e-9, abs=1e-18
        )
