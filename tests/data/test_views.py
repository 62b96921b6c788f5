"""Views: one meaning per label, every image kept, one copy in memory."""

import pickle
from multiprocessing.reduction import ForkingPickler

import pytest
from detectron2.data.datasets.coco import load_coco_json
from torch.utils.data import DataLoader

from cldetr.data.coco import load_coco
from cldetr.data.views import View, evaluation_subset
from cldetr.scenario import BASE, make_scenario, make_separate_scenario

from ..coco_files import coco, random_coco, write


@pytest.fixture
def toy(tmp_path):
    content = random_coco(0, images=60)
    data = load_coco(write(tmp_path / "a.json", content), tmp_path / "images")
    return content, data, make_scenario("5+2+1", data, order="seed", class_seed=3)


def truth(content, image):
    """Category names and boxes of an image, as the file has them."""
    names = {category["id"]: category["name"] for category in content["categories"]}
    return [
        (names[ann["category_id"]], ann["bbox"], ann["iscrowd"])
        for ann in content["annotations"]
        if ann["image_id"] == image
    ]


def shown(view, entry):
    return [
        (view.categories[obj["category_id"]].name, obj["bbox"], obj["iscrowd"])
        for obj in entry["annotations"]
    ]


def subsets_of(scenario):
    """Every kind of training view, by name, with the classes each image has annotated."""
    chosen = {phase.index: phase.image_ids[::3] for phase in scenario.phases[:2]}
    views = {f"phase{phase.index}": (phase.subset(),) for phase in scenario.phases}
    views |= {f"joint{phase.index}": scenario.joint(phase.index) for phase in scenario.phases}
    return {**views, "exemplars": scenario.exemplars(chosen)}


def test_views_show_exactly_the_objects_of_their_classes_under_the_same_labels(toy):
    content, data, scenario = toy
    for subsets in subsets_of(scenario).values():
        view = View(scenario.categories, subsets, {BASE: data})
        assert len(view) == sum(len(subset.image_ids) for subset in subsets)
        ids = [image for subset in subsets for image in subset.image_ids]
        assert view.image_ids.tolist() == ids
        entries = iter(view)
        for subset in subsets:
            names = {scenario.categories[label].name for label in subset.classes}
            for image in subset.image_ids:
                entry = next(entries)
                assert entry["image_id"] == image
                assert (entry["phase"], entry["classes"]) == (subset.phase, subset.classes)
                assert shown(view, entry) == [
                    row for row in truth(content, image) if row[0] in names
                ]
        assert next(entries, None) is None


def test_entries_are_detectron2s_own(toy):
    _, data, _ = toy
    every = evaluation_subset(data, BASE, data.categories)
    view = View(data.categories, [every], {BASE: data})
    expected = load_coco_json(str(data.json_file), str(data.image_root), "views_own")
    by_id = {entry["image_id"]: entry for entry in expected}
    for index, entry in enumerate(view):
        own = {key: entry.pop(key) for key in ("source", "phase", "classes")}
        assert entry == by_id[entry["image_id"]]
        entry |= own
        assert view[index] == entry
    assert view[-1] == entry
    with pytest.raises(IndexError):
        view[len(view)]


def test_an_empty_view_has_nothing_in_it(toy):
    _, data, scenario = toy
    view = View(scenario.categories, [], {BASE: data})
    assert len(view) == 0
    assert view.image_ids.shape == (0,)


def test_separate_data_sets_meet_under_common_labels(tmp_path):
    first = coco(2, ("cat", "dog"), [(1, 1), (2, 2)])
    second = coco(2, ("bird", "cat"), [(1, 1), (2, 2), (2, 1)])  # ids collide, cat is known
    sets = [
        load_coco(write(tmp_path / f"{name}.json", content), tmp_path / name, name=name)
        for name, content in (("one", first), ("two", second))
    ]
    scenario = make_separate_scenario(sets)
    data = {one.name: one for one in sets}
    assert [category.name for category in scenario.categories] == ["cat", "dog", "bird"]
    phase2 = View(scenario.categories, [scenario.phase(2).subset()], data)
    assert [[obj["category_id"] for obj in entry["annotations"]] for entry in phase2] == [[2], [2]]
    joint = View(scenario.categories, scenario.joint(), data)
    assert [[obj["category_id"] for obj in entry["annotations"]] for entry in joint] == [
        [0],
        [1],
        [2],
        [0, 2],
    ]
    assert [entry["file_name"] for entry in joint] == [
        str(tmp_path / "one" / "0001.jpg"),
        str(tmp_path / "one" / "0002.jpg"),
        str(tmp_path / "two" / "0001.jpg"),
        str(tmp_path / "two" / "0002.jpg"),
    ]


def test_pickles_between_processes_carry_no_arrays(toy):
    _, data, scenario = toy
    view = View(scenario.categories, scenario.joint(), {BASE: data})
    before = list(view)
    buffer = bytes(ForkingPickler.dumps(view))
    assert data.boxes.tobytes() not in buffer
    restored = pickle.loads(buffer)
    assert list(restored) == before == list(view)
    boxes = restored._subsets[0].data.boxes
    boxes[0, 0] = 33.0  # the very same memory
    assert data.boxes[0, 0] == 33.0
    assert list(pickle.loads(pickle.dumps(view))) == list(view)


def _first(batch):
    return batch[0]


def test_spawned_workers_read_the_same_entries(toy):
    _, data, scenario = toy
    view = View(scenario.categories, [scenario.phase(1).subset()], {BASE: data})
    loader = DataLoader(
        view, collate_fn=_first, num_workers=1, multiprocessing_context="spawn", shuffle=False
    )
    assert list(loader) == list(view)


def test_an_image_of_several_subsets_appears_once_with_all_their_classes(tmp_path):
    """Traditional protocol: a replayed exemplar that is in D_2 has the labels of both phases."""
    objects = [(1, 1), (2, 1), (2, 2), (3, 1), (3, 2), (4, 2)]
    content = coco(4, ["cat", "dog"], objects)
    data = load_coco(write(tmp_path / "a.json", content), tmp_path)
    scenario = make_scenario("1+1", data, protocol="traditional")
    assert [phase.image_ids for phase in scenario.phases] == [(1, 2, 3), (2, 3, 4)]
    subsets = [scenario.phase(2).subset(), *scenario.exemplars({1: [1, 2]})]
    view = View(scenario.categories, subsets, {BASE: data})
    shown = {
        entry["image_id"]: [item["category_id"] for item in entry["annotations"]] for entry in view
    }
    assert shown == {3: [1], 4: [1], 1: [0], 2: [0, 1]}
    assert view.image_ids.tolist() == [3, 4, 1, 2]
    assert [(entry["phase"], sorted(entry["classes"])) for entry in view] == [
        *[(2, [1]), (2, [1]), (1, [0]), (0, [0, 1])]
    ]


def test_strict_views_keep_their_order(toy):
    _, data, scenario = toy
    phase = scenario.phase(2)
    exemplars = scenario.exemplars({1: scenario.phase(1).image_ids[::3]})
    view = View(scenario.categories, [phase.subset(), *exemplars], {BASE: data})
    assert view.image_ids.tolist() == [*phase.image_ids, *exemplars[0].image_ids]
