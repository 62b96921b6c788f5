"""Scenarios: every image in its phase, every class in one, for every form and seed."""

import json

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cldetr.data.coco import load_coco
from cldetr.errors import InputError
from cldetr.scenario import make_domain_scenario, make_scenario, make_separate_scenario

from .coco_files import VAL2017_BOXES, VAL2017_SPLITS, Labels

COCO_IDS = [i for i in range(1, 91) if i not in (12, 26, 29, 30, 45, 66, 68, 69, 71, 83)]


def coco_sized(images=118_287):
    """COCO's numbers: train2017's images, none annotated, under the 80 official category ids."""
    data = Labels(80, [[]] * images, first_id=0)
    data.image_ids = np.arange(images)
    data.categories = tuple(
        type(category)(number, category.name)
        for number, category in zip(COCO_IDS, data.categories, strict=True)
    )
    return data


@st.composite
def splits(draw):
    """A data set with class sizes per phase that use all its categories."""
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=6))
    images = draw(st.integers(sum(sizes), 80))
    rows = st.lists(st.integers(0, sum(sizes) - 1), max_size=4)
    labels = draw(st.lists(rows, min_size=images, max_size=images))
    return Labels(sum(sizes), labels), sizes


def written(sizes):
    """Sizes as people write them, runs of equal sizes as AxB."""
    runs = []
    for size in sizes:
        if runs and runs[-1][0] == size:
            runs[-1][1] += 1
        else:
            runs.append([size, 1])
    return "+".join(str(size) if times == 1 else f"{size}x{times}" for size, times in runs)


seeds = st.integers(0, 2**32 - 1)


@settings(max_examples=150, deadline=None)
@given(splits(), st.sampled_from(["id", "seed"]), seeds, seeds, st.booleans())
def test_strict_phases_partition_images_and_classes(split, order, class_seed, data_seed, terse):
    data, sizes = split
    name = written(sizes) if terse else "+".join(map(str, sizes))
    made = make_scenario(name, data, order=order, class_seed=class_seed, data_seed=data_seed)
    images = [image for phase in made.phases for image in phase.image_ids]
    classes = [label for phase in made.phases for label in phase.classes]
    assert sorted(images) == data.image_ids.tolist()  # once each, images without objects too
    assert sorted(classes) == list(range(sum(sizes)))
    assert [len(phase.classes) for phase in made.phases] == sizes
    for phase in made.phases:
        share = len(images) * len(phase.classes) / sum(sizes)
        assert abs(len(phase.image_ids) - share) < 1
    assert made == make_scenario(
        name, data, order=order, class_seed=class_seed, data_seed=data_seed
    )


@settings(max_examples=100, deadline=None)
@given(
    splits(),
    st.sampled_from(["id", "seed", "released"]),
    st.sampled_from(["strict", "traditional"]),
    seeds,
)
def test_the_first_phase_is_the_same_however_the_rest_is_divided(split, order, protocol, seed):
    """Sweeps rely on it: they share the first phases of 7+3 and 7+1x3."""
    data, sizes = split
    assume(protocol == "strict" or len({*data.labels.tolist()}) == sum(sizes))
    rest = [1] * (sum(sizes) - sizes[0])
    first, same = (
        make_scenario(name, data, protocol=protocol, order=order, class_seed=seed, data_seed=seed)
        for name in ("+".join(map(str, sizes)), "+".join(map(str, [sizes[0], *rest])))
    )
    assert first.phase(1) == same.phase(1)


@settings(max_examples=100, deadline=None)
@given(splits(), seeds)
def test_traditional_phases_hold_exactly_the_images_with_their_classes(split, seed):
    data, sizes = split
    labels = list(range(sum(sizes)))
    np.random.RandomState(seed).shuffle(labels)
    groups = [{labels.pop(0) for _ in range(size)} for size in sizes]
    rows = np.split(data.labels, data.starts[1:-1])
    expected = [
        tuple(i for i, row in zip(data.image_ids, rows, strict=True) if group & set(row))
        for group in groups
    ]
    name = "+".join(map(str, sizes))
    options = {"protocol": "traditional", "order": "seed", "class_seed": seed}
    if all(expected):
        made = make_scenario(name, data, **options)
        assert [phase.image_ids for phase in made.phases] == expected
        assert made.data_seed is None
    else:
        with pytest.raises(InputError, match="gets no image"):
            make_scenario(name, data, **options)


@settings(max_examples=50, deadline=None)
@given(splits(), st.randoms(use_true_random=False))
def test_phases_by_name_are_taken_as_given(split, random):
    data, sizes = split
    names = [category.name for category in data.categories]
    random.shuffle(names)
    groups = [[names.pop() for _ in range(size)] for size in sizes]
    made = make_scenario(groups, data)
    assert [[data.categories[label].name for label in phase.classes] for phase in made.phases] == (
        groups
    )
    assert sorted(i for phase in made.phases for i in phase.image_ids) == data.image_ids.tolist()


def test_seeds_change_classes_and_images_independently():
    data = Labels(20, [[]] * 50)
    base = make_scenario("10+10", data, order="seed", class_seed=1, data_seed=1)
    other_classes = make_scenario("10+10", data, order="seed", class_seed=2, data_seed=1)
    other_images = make_scenario("10+10", data, order="seed", class_seed=1, data_seed=2)
    assert base.phases[0].classes != other_classes.phases[0].classes
    assert base.phases[0].image_ids == other_classes.phases[0].image_ids
    assert base.phases[0].classes == other_images.phases[0].classes
    assert base.phases[0].image_ids != other_images.phases[0].image_ids


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("70+10", [103_501, 14_786]),
        ("40+40", [59_143, 59_144]),
        ("40+20x2", [59_143, 29_572, 29_572]),
        ("40+10x4", [59_143, 14_786, 14_786, 14_786, 14_786]),
        ("40 + 10×4", [59_143, 14_786, 14_786, 14_786, 14_786]),
    ],
)
def test_shares_of_coco_are_the_papers(name, sizes):
    made = make_scenario(name, coco_sized(), order="seed")
    assert [len(phase.image_ids) for phase in made.phases] == sizes
    assert sum(sizes) == 118_287
    halves = [118_287 / 2] + [118_287 / (2 * (len(sizes) - 1))] * (len(sizes) - 1)
    expected = [118_287 * 7 / 8, 118_287 / 8] if name == "70+10" else halves
    assert np.abs(np.subtract(sizes, expected)).max() <= 1


def test_released_orders_are_those_of_the_authors_code():
    data = coco_sized()
    made = make_scenario("70+10", data, order="released", class_seed=7, data_seed=8)
    ids = [data.categories[label].id for phase in made.phases for label in phase.classes]
    assert ids[:10] == [74, 64, 65, 5, 79, 59, 36, 88, 9, 49]
    assert ids[-10:] == [78, 41, 28, 52, 37, 84, 53, 63, 19, 76]
    assert made.phases[0].image_ids[:4] == (64178, 85715, 45081, 48080)
    assert [len(phase.image_ids) for phase in made.phases] == [103_501, 14_785]
    assert (made.class_seed, made.data_seed) == (123, 123)
    halves = make_scenario("40+40", data, order="released")
    assert [len(phase.image_ids) for phase in halves.phases] == [59_143, 59_143]
    shuffled = np.arange(118_287)
    np.random.RandomState(123).shuffle(shuffled)
    assert halves.phases[1].image_ids == tuple(shuffled[59_143:-1].tolist())  # the last is lost


@pytest.mark.data
@pytest.mark.skipif(not VAL2017_SPLITS.exists(), reason="needs the published class orders")
@pytest.mark.parametrize("name", ["40+40", "70+10", "40+20x2", "40+10x4"])
@pytest.mark.parametrize(("key", "order"), [("erd_idorder", "id"), ("cldetr_seed123", "released")])
def test_class_orders_are_the_published_ones(name, key, order):
    data = load_coco(VAL2017_BOXES, "images")
    made = make_scenario(name, data, order=order)
    published = json.loads(VAL2017_SPLITS.read_text())[f"{key}_{name}"]
    for phase, expected in zip(made.phases, published, strict=True):
        categories = [data.categories[label] for label in phase.classes]
        assert [category.id for category in categories] == expected["ids"]
        assert [category.name for category in categories] == expected["names"]


@pytest.mark.data
@pytest.mark.skipif(not VAL2017_BOXES.exists(), reason="needs the boxes of val2017")
@pytest.mark.parametrize(
    ("name", "images", "instances"),
    [("40+40", [4113, 2340], [23_969, 12_812]), ("70+10", [4801, 851], [34_421, 2_360])],
)
def test_traditional_protocol_has_its_check_values_on_val2017(name, images, instances):
    data = load_coco(VAL2017_BOXES, "images")
    made = make_scenario(name, data, protocol="traditional")
    assert [len(phase.image_ids) for phase in made.phases] == images
    # Rounded to integers, one box of this file has no width: it is dropped, and counted.
    dropped = [category for _, _, category in data.report.dropped]
    label = {category.id: index for index, category in enumerate(data.categories)}
    every = np.concatenate([data.labels, [label[category] for category in dropped]])
    assert [np.isin(every, phase.classes).sum() for phase in made.phases] == instances


@pytest.mark.parametrize("text", ["", "+", "40+", "0+80", "40+0x2", "a+b", "40-40", "40+20x", "x2"])
def test_what_is_no_scenario_is_refused_with_an_example(text):
    with pytest.raises(InputError, match=r"70\+10"):
        make_scenario(text, Labels(80, [[]] * 100))


def test_sizes_that_do_not_fit_the_categories_are_refused_with_both_totals():
    data = Labels(80, [[]] * 100)
    for name in ("70+20", "40+100000x3"):
        with pytest.raises(InputError, match="has 80"):
            make_scenario(name, data, partial=True)
    with pytest.raises(InputError, match="needs 70 categories but toy has 80"):
        make_scenario("60+10", data)
    made = make_scenario("60+10", data, partial=True)
    assert len(made.seen(2)) == 70
    assert len(made.categories) == 80


def test_all_problems_of_named_phases_are_told_at_once():
    with pytest.raises(InputError) as caught:
        make_scenario([["class 0", "clas 1"], ["class 0", "zebra"]], Labels(3, [[]] * 9))
    message = str(caught.value)
    assert "do you mean 'class 1'" in message
    assert "'class 0' is named twice (lists 1 and 2)" in message
    assert "'zebra'" in message
    with pytest.raises(InputError, match="1 categories of toy are in no phase"):
        make_scenario([["class 0"], ["class 1"]], Labels(3, [[]] * 9))


def test_an_explicit_class_order_is_followed():
    data = Labels(4, [[]] * 8)
    by_name = make_scenario("2+2", data, order=["class 2", "class 0", "class 3", "class 1"])
    by_id = make_scenario("2+2", data, order=[3, 1, 4, 2])
    assert by_name.phases == by_id.phases
    assert [phase.classes for phase in by_name.phases] == [(2, 0), (3, 1)]
    assert by_name.order == "list"
    with pytest.raises(InputError, match="class 3"):
        make_scenario("2+2", data, order=["class 2", "class 0", "class 1"])
    with pytest.raises(InputError, match="choose id, seed, released"):
        make_scenario("2+2", data, order="random")


def test_a_phase_without_images_stops():
    with pytest.raises(InputError, match=r"phase 1 .* gets no image"):
        make_scenario("1+9", Labels(10, [[]] * 5))
    with pytest.raises(InputError, match=r"phase 2 .* gets no image"):
        make_scenario("1+1", Labels(2, [[0], [0]]), protocol="traditional")


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_an_impossible_seed_is_refused(seed):
    with pytest.raises(InputError, match="seed"):
        make_scenario("1+1", Labels(2, [[]] * 4), data_seed=seed)


def test_classes_are_old_seen_and_future_by_phase():
    made = make_scenario("2+1+1", Labels(4, [[]] * 8))
    assert [made.old(i) for i in (1, 2, 3)] == [(), (0, 1), (0, 1, 2)]
    assert [made.seen(i) for i in (1, 2, 3)] == [(0, 1), (0, 1, 2), (0, 1, 2, 3)]
    assert [made.future(i) for i in (1, 2, 3)] == [(2, 3), (3,), ()]
    with pytest.raises(IndexError):
        made.phase(0)


@pytest.mark.parametrize("protocol", ["strict", "traditional"])
def test_joint_training_sees_every_image_so_far_once_with_all_seen_classes(protocol):
    data = Labels(4, [[i % 4, (i + 1) % 4] for i in range(20)])
    made = make_scenario("2+1+1", data, protocol=protocol)
    for index in (1, 2, 3):
        [part] = made.joint(index)
        images = {image for phase in made.phases[:index] for image in phase.image_ids}
        assert sorted(part.image_ids) == sorted(images)
        assert part.classes == made.seen(index)
    assert made.joint() == made.joint(3)


def test_exemplars_keep_the_classes_of_their_own_phase():
    made = make_scenario("2+1+1", Labels(4, [[]] * 20))
    chosen = {2: made.phases[1].image_ids[:2], 1: made.phases[0].image_ids[:3]}
    first, second = made.exemplars(chosen)
    assert (first.phase, first.classes, first.image_ids) == (1, (0, 1), chosen[1])
    assert (second.phase, second.classes, second.image_ids) == (2, (2,), chosen[2])
    oracle = made.exemplars(chosen, reveal=True)
    assert [part.image_ids for part in oracle] == [chosen[1], chosen[2]]
    assert {part.classes for part in oracle} == {(0, 1, 2)}
    stranger = made.phases[2].image_ids[0]
    with pytest.raises(InputError, match=f"image {stranger} is not in phase 1"):
        made.exemplars({1: [stranger]})


def separate(*names_with_labels):
    sets = []
    for index, (names, labels) in enumerate(names_with_labels):
        data = Labels(len(names), labels, name=f"set {index}", first_id=1)
        data.categories = tuple(
            type(c)(c.id, name) for c, name in zip(data.categories, names, strict=True)
        )
        sets.append(data)
    return sets


def test_separate_data_sets_extend_the_labels_without_moving_any():
    first, second, third = separate(
        (["cat", "dog"], [[0], [1], []]), (["bird"], [[0]]), (["ant", "bee"], [[0, 1]])
    )
    two, three = (
        make_separate_scenario([first, second]),
        make_separate_scenario([first, second, third]),
    )
    assert [c.name for c in three.categories] == ["cat", "dog", "bird", "ant", "bee"]
    assert three.categories[:3] == two.categories
    assert three.phases[:2] == two.phases
    assert [phase.source for phase in three.phases] == ["set 0", "set 1", "set 2"]
    assert len({c.id for c in three.categories}) == 5  # though the files' ids collide
    assert three.phases[0].image_ids == (1, 4, 7)
    assert [part.source for part in three.joint(2)] == ["set 0", "set 1"]


def test_a_category_arrives_with_the_first_data_set_that_has_objects_of_it():
    names = ["cat", "dog", "yeti"]  # both files were exported with the whole list
    made = make_separate_scenario(separate((names, [[0]]), (names, [[1, 0]])))
    assert [c.name for c in made.categories] == ["cat", "yeti", "dog"]
    assert [phase.classes for phase in made.phases] == [(0, 1), (2,)]


def test_conflicts_between_separate_data_sets_are_told_at_once():
    sets = separate((["cat"], [[0]]), (["Cat "], [[0]]), (["cat"], [[0]]), (["dog"], []))
    sets[2].fingerprint = sets[0].fingerprint
    sets[3].name = "set 0"
    with pytest.raises(InputError) as caught:
        make_separate_scenario(sets)
    message = str(caught.value)
    assert "'Cat '" in message
    assert "set 2 and set 0 are the same file" in message
    assert "set 2 brings no new category" in message
    assert "both named set 0" in message
    assert "set 0 has no image" in message


def test_domains_teach_the_same_classes_by_name():
    names = ["cat", "dog", "bird"]
    made = make_domain_scenario(
        separate((names, [[0], [1, 2]]), (["bird", "cat", "dog"], [[0], [1]]), (["dog"], [[0]]))
    )
    assert made.name == "3 domains"
    assert [c.name for c in made.categories] == names
    assert [phase.classes for phase in made.phases] == [(0, 1, 2), (), ()]
    assert [phase.annotated for phase in made.phases] == [(0, 1, 2), (2, 0, 1), (1,)]
    assert [phase.taught for phase in made.phases] == [(0, 1, 2), (2, 0, 1), (1,)]
    assert [made.seen(i) for i in (1, 2, 3)] == [(0, 1, 2)] * 3
    assert [made.old(i) for i in (1, 2, 3)] == [(), (0, 1, 2), (0, 1, 2)]
    assert [made.future(i) for i in (1, 2, 3)] == [(), (), ()]
    assert [part.source for part in made.joint()] == ["set 0", "set 1", "set 2"]
    # Only the third domain may show objects of classes that it does not list.
    assert [made.hides_seen(i) for i in (1, 2, 3)] == [False, False, True]


def test_where_classes_arrive_earlier_images_hide_later_ones():
    made = make_scenario("2+1", Labels(3, [[0, 1, 2]] * 9))
    assert [made.hides_seen(i) for i in (1, 2)] == [False, True]


def test_domains_may_share_an_annotation_file():
    sets = separate((["car"], [[0]]), (["car"], [[0]]))  # as clear and foggy streets do
    sets[1].fingerprint = sets[0].fingerprint
    assert len(make_domain_scenario(sets).phases) == 2


def test_what_is_no_domain_is_told_at_once():
    sets = separate((["cat"], [[0]]), (["cat", "dog"], [[0, 1]]), (["Cat"], [[0]]), (["cat"], []))
    with pytest.raises(InputError) as caught:
        make_domain_scenario(sets)
    message = str(caught.value)
    assert "set 1 has dog, unknown to set 0" in message
    assert "set SCENARIO.PROTOCOL to strict" in message
    assert "set 2 says 'Cat' where set 0 says 'cat'" in message
    assert "set 3 has no image" in message
    with pytest.raises(InputError, match="give a data set for each domain"):
        make_domain_scenario(sets[:1])


def test_a_data_set_without_new_categories_is_told_of_domains():
    sets = separate((["cat"], [[0]]), (["cat"], [[0]]))
    with pytest.raises(InputError, match=r"SCENARIO\.PROTOCOL to domains"):
        make_separate_scenario(sets)
