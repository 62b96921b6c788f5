import numpy as np
import pytest

from cldetr.data.coco import load_coco
from cldetr.data.exemplars import (
    STRATEGIES,
    Context,
    find_strategy,
    kl_divergence,
    phase_budget,
    resolve_budget,
    select_adaptive,
    select_balanced,
    select_herding,
    select_kl,
    select_kl_and_instances,
    select_random,
    select_released,
)
from cldetr.data.herding import ObjectFeatures
from cldetr.data.memory import phase_counts
from cldetr.errors import InputError
from cldetr.scenario import make_scenario

from ..coco_files import VAL2017_BOXES, Labels, class_counts


@pytest.mark.parametrize(
    ("budget", "number"),
    [(0.1, 10), (0.104, 10), (0.105, 11), (1.0, 100), (1, 100), (0.001, 1), (7, 7), (500.0, 500)],
)
def test_budget_is_a_share_up_to_one_and_a_number_above(budget, number):
    assert resolve_budget(budget, 100) == number


@pytest.mark.parametrize("budget", [0, -1, 1.5, float("nan"), float("inf"), True, "0.1", None])
def test_other_budgets_are_refused(budget):
    with pytest.raises(InputError, match="exemplar budget"):
        resolve_budget(budget, 100)


def test_a_share_is_of_the_whole_data_set_where_phases_share_images():
    # Of 40 images 20 show both classes: |D| = 40, |D_1| + |D_2| = 30 + 30.
    rows = [[0]] * 10 + [[1]] * 10 + [[0, 1]] * 20
    traditional = make_scenario("1+1", Labels(2, rows), protocol="traditional")
    share = phase_budget(0.2, traditional)
    assert share == pytest.approx(0.2 * 40 / 60)
    numbers = [resolve_budget(share, len(phase.image_ids)) for phase in traditional.phases]
    assert sum(numbers) == 8  # 20% of 40
    assert phase_budget(1, traditional) == 1
    assert phase_budget(7, traditional) == 7
    strict = make_scenario("1+1", Labels(2, rows))
    assert phase_budget(0.2, strict) == 0.2


def test_unknown_strategy_lists_the_choices():
    with pytest.raises(InputError, match=r"'kI' is unknown.*kl, kl.instances, random, balanced"):
        find_strategy("kI")


ROWS = [[0], [], [1, 1], [0, 2], [2], [0], [1], []]


def features_of(rows):
    """One-hot features: herding then sees no more than the class."""
    labels = np.array([label for row in rows for label in row])
    images = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
    return ObjectFeatures(np.eye(3)[labels], labels, images)


@pytest.mark.parametrize("word", [word for word in STRATEGIES if word != "released"])
def test_every_strategy_fills_its_budget_with_labelled_images_first(word):
    counts = class_counts(ROWS, 3)
    context = Context(features=features_of(ROWS))
    for budget in range(2, 9):
        selection = find_strategy(word).choose(counts, budget, context)
        assert len(selection.indices) == len(set(selection.indices.tolist())) == budget
        assert selection.shortfall == 0
        labelled = [i for i in selection.indices.tolist() if ROWS[i]]
        assert len(labelled) == min(budget, 6)
        assert selection.indices.tolist()[:6] == labelled
    assert selection.indices[-2:].tolist() == [1, 7]
    assert "2 of the images have no label" in selection.note


@pytest.mark.parametrize("word", STRATEGIES)
def test_budget_beyond_the_data_takes_all_and_tells_the_shortfall(word):
    counts = class_counts(ROWS, 3)
    selection = find_strategy(word).choose(counts, 20, Context(features=features_of(ROWS)))
    assert selection.budget == 20
    assert selection.shortfall == 20 - len(selection.indices) == (14 if word == "released" else 12)


@pytest.mark.parametrize("word", STRATEGIES)
def test_every_strategy_records_the_divergence_after_each_choice(word):
    counts = class_counts(ROWS, 3)
    selection = find_strategy(word).choose(counts, 5, Context(features=features_of(ROWS)))
    for size in range(1, len(selection.indices) + 1):
        held = counts[selection.indices[:size]].sum(axis=0)
        expected = kl_divergence(counts.sum(axis=0), held)
        assert selection.kl[size - 1] == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("word", ["random", "balanced"])
def test_drawing_depends_on_the_seed_alone(word):
    counts = class_counts([[i % 3] for i in range(60)], 3)
    first, again, other = (
        find_strategy(word).choose(counts, 20, Context(seed=seed)).indices.tolist()
        for seed in (1, 1, 2)
    )
    assert first == again != other


def test_kl_by_hand():
    # p = (3/4, 1/4). The first image covers both classes. Then one of class 0 gives shares
    # (2/3, 1/3), and a second one (3/4, 1/4), which is the data's.
    counts = class_counts([[0], [0], [0, 1], [0, 0, 0, 1]], 2)
    assert counts.sum(axis=0).tolist() == [6, 2]
    selection = select_kl(counts, 4)
    assert selection.indices.tolist() == [3, 0, 2, 1]
    assert selection.kl[0] == 0
    # after [3, 0]: (4/5, 1/5)
    assert selection.kl[1] == pytest.approx(0.75 * np.log(0.75 / 0.8) + 0.25 * np.log(0.25 / 0.2))


def test_balanced_gives_every_class_its_turn():
    # 40 images of class 0, five of class 1, two of class 2, one object each
    counts = class_counts([[0]] * 40 + [[1]] * 5 + [[2]] * 2, 3)
    selection = select_balanced(counts, 12, Context(seed=3))
    # four turns each; class 2 passes twice, and the others have its share
    assert counts[selection.indices].sum(axis=0).tolist() == [5, 5, 2]
    assert counts[selection.indices[:6]].sum(axis=0).tolist() == [2, 2, 2]


def test_balanced_skips_images_that_another_class_drew():
    counts = class_counts([[0, 1], [1]], 2)
    assert sorted(select_balanced(counts, 2).indices.tolist()) == [0, 1]


def test_adaptive_prefers_many_classes_and_then_rare_ones():
    rows = [[0], [0, 0, 1], [0, 1], [2], [1, 2], [0, 1, 2]]
    selection = select_adaptive(class_counts(rows, 3), 6)
    # [0, 1, 2] is worth 3; then every class is worth ½: the first image with two of them is 1, then
    # 0 and 1 are worth ⅓ and 2 still ½: image 4 with ⅚; then ⅓ + ¼ of image 2 against ⅓ of 0 and 3
    assert selection.indices.tolist() == [5, 1, 4, 2, 3, 0]


def test_released_takes_the_first_tenth_and_drops_what_has_no_label():
    rows = [[0], [], [0], []] + [[0]] * 31
    selection = select_released(class_counts(rows, 1), 0.1)  # 3.5 images: 3, as there
    assert selection.indices.tolist() == [0, 2]
    assert selection.budget == 3
    assert selection.shortfall == 1
    assert "1 without a label dropped" in selection.note


def test_herding_by_hand():
    # One class, features on the unit circle at 0°, 90°, −90°, 180° and again 90°
    features = np.array([[1, 0], [0, 1], [0, -1], [-1, 0], [0, 1]], float)
    labels, images = np.zeros(5, int), np.arange(5)
    counts = class_counts([[0]] * 5, 1)
    context = Context(features=ObjectFeatures(features, labels, images))
    # mean (0, 0.2). First the nearest single one: 1 (distance 0.8), before its equal 4. Then the
    # mean of 1 and another: with 0 or 3 (±½, ½), with 2 (0, 0), with 4 (0, 1): 2. Then (0, ⅓) with
    # 4, (±⅓, 0) with 0 or 3: 4. Then (±¼, ¼): 0 first.
    assert select_herding(counts, 5, context).indices.tolist() == [1, 2, 4, 0, 3]


def test_herding_ignores_the_length_of_features():
    features = np.array([[5, 0], [0, 0.1], [0, -3], [-1, 0], [0, 40]], float)
    context = Context(features=ObjectFeatures(features, np.zeros(5, int), np.arange(5)))
    counts = class_counts([[0]] * 5, 1)
    assert select_herding(counts, 5, context).indices.tolist() == [1, 2, 4, 0, 3]


def test_herding_equals_a_search_over_all_images():
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 3, rng.integers(1, 5)).tolist() for _ in range(40)]
    labels = np.array([label for row in rows for label in row])
    images = np.repeat(np.arange(40), [len(row) for row in rows])
    features = rng.normal(size=(len(labels), 6))
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    shuffled = rng.permutation(len(labels))
    objects = ObjectFeatures(features[shuffled], labels[shuffled], images[shuffled])

    chosen: list[int] = []
    while len(chosen) < 25:
        for label in range(3):
            mean = features[labels == label].mean(0)
            distances = {}
            for image in range(40):
                if image not in chosen and label in rows[image]:
                    own = (labels == label) & np.isin(images, [*chosen, image])
                    distances[image] = np.linalg.norm(features[own].mean(0) - mean)
            chosen.append(min(distances, key=distances.get))
    counts = class_counts(rows, 3)
    got = select_herding(counts, 25, Context(features=objects)).indices.tolist()
    assert got == chosen[:25]


def test_herding_without_features_is_refused():
    with pytest.raises(InputError, match="needs features"):
        select_herding(class_counts([[0]], 1), 0.5)


@pytest.mark.data
@pytest.mark.skipif(not VAL2017_BOXES.exists(), reason="needs the boxes of val2017")
def test_kl_matches_the_distribution_of_coco_val2017_far_better_than_chance():
    data = load_coco(VAL2017_BOXES, "images")
    counts = phase_counts(make_scenario("70+10", data, order="id"), 1, data)
    matched, joint, by_chance = (
        strategy(counts, 0.1) for strategy in (select_kl, select_kl_and_instances, select_random)
    )
    assert len(matched.indices) == resolve_budget(0.1, counts.shape[0])
    assert matched.kl[-1] < by_chance.kl[-1] / 20
    assert joint.kl[-1] < by_chance.kl[-1] / 20
    sizes = counts.sum(axis=1)
    wanted = sizes[sizes > 0].mean()
    assert abs(sizes[joint.indices].mean() - wanted) < 0.15 * wanted
    assert sizes[matched.indices].mean() < 0.75 * wanted  # what Eq. 6 alone does
