"""Bad annotation files: one message for all that is wrong, and never another kind of error."""

import copy
import json
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cldetr.data.coco import load_coco
from cldetr.data.problems import KINDS
from cldetr.data.validate import is_unsafe
from cldetr.errors import InputError

from ..coco_files import coco, write


def change(section, index, **values):
    """A fault: sets (or, with `...`, removes) keys of an entry of the valid file."""

    def apply(content):
        entry = content[section][index]
        for key, value in values.items():
            if value is ...:
                del entry[key]
            else:
                entry[key] = value

    return apply


def append(section, entry):
    return lambda content: content[section].append(entry)


def empty(section):
    return lambda content: content[section].clear()


DUPLICATE_IMAGE = {"id": 2, "file_name": "z.jpg", "width": 9, "height": 9}
FAULTS = {
    # name: (fault, what the message must say)
    "category id twice": (append("categories", {"id": 1, "name": "fox"}), "1 ('cat' and 'fox')"),
    "category name twice": (append("categories", {"id": 9, "name": "cat"}), "'cat' (ids 1 and 9)"),
    "category name empty": (change("categories", 0, name=" "), "empty name (1): 1."),
    "category without name": (change("categories", 1, name=...), "category 2: name"),
    "category name a number": (change("categories", 1, name=7), "category 2: name is 7"),
    "category id a text": (change("categories", 1, id="2"), "categories[1]: id is '2'"),
    "category id a boolean": (change("categories", 0, id=True), "categories[0]: id is True"),
    "category id beyond 64 bits": (change("categories", 1, id=2**63), "id is 9223372036854775808"),
    "category not an object": (append("categories", "cat"), "categories[3] is a string"),
    "no categories": (empty("categories"), "lists are empty (1): categories"),
    "no images": (empty("images"), "lists are empty (1): images"),
    "image id twice": (append("images", DUPLICATE_IMAGE), "image 2"),
    "image without size": (change("images", 0, width=...), "image 1: width"),
    "image of no width": (change("images", 0, width=0), "image 1: 0×80"),
    "image of negative height": (change("images", 1, height=-3), "image 2: 100×-3"),
    "image of absurd size": (change("images", 2, width=10**7), "image 3: 10000000×80"),
    "image size a text": (change("images", 0, width="100"), "image 1: width is '100'"),
    "image size half a pair": (change("images", 0, width="\ud800"), "image 1: width is"),
    "image size a fraction": (change("images", 0, width=99.5), "image 1: width is 99.5"),
    "image id beyond 64 bits": (change("images", 0, id=2**63), "id is 9223372036854775808"),
    "image id null": (change("images", 0, id=None), "images[0]: id is None"),
    "image without file": (change("images", 1, file_name=...), "image 2: file_name"),
    "file name null": (change("images", 1, file_name=None), "image 2: file_name is None"),
    "file name absolute": (change("images", 0, file_name="/etc/passwd"), "'/etc/passwd'"),
    "file name upwards": (change("images", 0, file_name="a/../../b.jpg"), "'a/../../b.jpg'"),
    "file name a URL": (change("images", 0, file_name="http://a/b.jpg"), "'http://a/b.jpg'"),
    "file name with a drive": (change("images", 0, file_name="C:b.jpg"), "'C:b.jpg'"),
    "file name with backslash": (change("images", 0, file_name="a\\b.jpg"), "'a\\\\b.jpg'"),
    "file name empty": (change("images", 0, file_name=""), "image 1: ''"),
    "file name of two lines": (change("images", 0, file_name="a\nb.jpg"), "'a\\nb.jpg'"),
    "annotation id twice": (change("annotations", 1, id=1), "annotation 1"),
    "annotation without id": (change("annotations", 1, id=...), "annotations[1]: id"),
    "annotation of unknown image": (
        change("annotations", 0, image_id=99),
        "annotation 1: image 99",
    ),
    "annotation of unknown category": (
        change("annotations", 0, category_id=99),
        "annotation 1: category 99",
    ),
    "annotation without image": (change("annotations", 0, image_id=...), "annotation 1: image_id"),
    "annotation without category": (
        change("annotations", 0, category_id=...),
        "annotation 1: category_id",
    ),
    "annotation null": (append("annotations", None), "annotations[3] is null"),
    "crowd flag 2": (change("annotations", 0, iscrowd=2), "annotation 1: 2"),
    "crowd flag a text": (change("annotations", 0, iscrowd="no"), "iscrowd is 'no'"),
    "ignore flag": (change("annotations", 0, ignore=1), "`ignore`"),
    "area negative": (change("annotations", 0, area=-1.0), "annotation 1: -1.0"),
    "area NaN": (change("annotations", 0, area=math.nan), "annotation 1: nan"),
    "area a text": (change("annotations", 0, area="big"), "annotation 1: 'big'"),
}
BAD_BOXES = {
    "NaN": [math.nan, 1, 2, 3],
    "infinite": [1, 1, math.inf, 3],
    "beyond floats": [10**400, 1, 2, 3],
    "negative width": [1, 1, -2, 3],
    "negative height": [1, 1, 2, -3.5],
    "text": ["1", 1, 2, 3],
    "boolean": [True, 1, 2, 3],
    "null": None,
    "short": [1, 2, 3],
    "long": [1, 2, 3, 4, 5],
    "empty": [],
    "an object": {"x": 1},
    "missing": ...,
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_stops_the_load_with_entry_and_fix(tmp_path, name):
    fault, message = FAULTS[name]
    content = coco()
    fault(content)
    path = write(tmp_path / "a.json", content)
    for option in ("stop", "drop"):  # dropping bad boxes excuses nothing else
        with pytest.raises(InputError) as caught:
            load_coco(path, tmp_path, bad_boxes=option)
        assert message in str(caught.value)
        assert str(path) in str(caught.value)
        assert "Fix: " in str(caught.value)


@pytest.mark.parametrize("name", BAD_BOXES)
def test_bad_box_stops_or_is_dropped_and_counted(tmp_path, name):
    content = coco()
    change("annotations", 1, bbox=BAD_BOXES[name])(content)
    path = write(tmp_path / "a.json", content)
    with pytest.raises(InputError, match=r"annotation 2: .*bad_boxes='drop'"):
        load_coco(path, tmp_path)
    data = load_coco(path, tmp_path, bad_boxes="drop")
    assert data.object_ids.tolist() == [1, 3]
    assert data.report.dropped_bad == 1
    assert data.report.dropped == ((2, 1, 2),)


def test_all_faults_make_one_message(tmp_path):
    content = coco()
    order = ["no categories", "no images", "category not an object"]  # would hide others
    for name in FAULTS.keys() - order:
        one = copy.deepcopy(coco())
        FAULTS[name][0](one)
        shift = 1000 * (1 + list(FAULTS).index(name))
        for section, key in (("images", "file_name"), ("categories", "name")):
            for entry in one[section]:
                if isinstance(entry.get("id"), int) and not isinstance(entry["id"], bool):
                    entry["id"] += shift
                if isinstance(entry.get(key), str) and key == "name" and entry[key].strip():
                    entry[key] += f" {shift}"
        for entry in one["annotations"]:
            for key in ("id", "image_id", "category_id"):
                if entry is not None and key in entry:
                    entry[key] += shift
        for section in one:
            content[section] += one[section]
    content["categories"].append("cat")
    with pytest.raises(InputError) as caught:
        load_coco(write(tmp_path / "a.json", content), tmp_path)
    message = str(caught.value)
    shown = [what for what, _ in KINDS.values() if what in message]
    missing = {what for what, _ in KINDS.values()} - set(shown)
    assert missing == {KINDS["empty list"][0], KINDS["bad box"][0]}  # no such fault was planted


def test_many_problems_of_one_kind_are_counted_and_the_first_named(tmp_path):
    content = coco(images=50, objects=[(i, 99) for i in range(1, 51)])
    with pytest.raises(InputError) as caught:
        load_coco(write(tmp_path / "a.json", content), tmp_path)
    message = str(caught.value)
    assert "not listed (50)" in message
    assert "annotation 10: category 99, …" in message
    assert "annotation 11:" not in message


def test_a_bad_entry_does_not_make_what_refers_to_it_bad(tmp_path):
    content = coco()
    change("categories", 0, name=None)(content)
    change("images", 0, width=None)(content)
    with pytest.raises(InputError) as caught:
        load_coco(write(tmp_path / "a.json", content), tmp_path)
    assert "2 problems" in str(caught.value)
    assert "not listed" not in str(caught.value)


@pytest.mark.parametrize(
    "name",
    ["a.jpg", "a/b c.jpg", "a..b.jpg", "..a.jpg", "ü/漢.png", "ab:c.jpg", "~/a.jpg", "./a.jpg"],
)
def test_ordinary_file_names_are_safe(name):
    assert not is_unsafe(name)


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**20), 10**20),
    st.floats(),
    st.text(max_size=5),
    st.just([]),
    st.just({}),
    st.lists(st.floats(), max_size=5),
)


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_no_change_of_any_value_makes_another_kind_of_error(tmp_path_factory, data):
    content = coco()
    for _ in range(data.draw(st.integers(1, 3))):
        section = data.draw(st.sampled_from(sorted(content)))
        entries = content[section]
        if not isinstance(entries, list) or not entries or data.draw(st.integers(0, 9)) == 0:
            content[section] = data.draw(JUNK)
            continue
        index = data.draw(st.integers(0, len(entries) - 1))
        if isinstance(entries[index], dict) and entries[index]:
            key = data.draw(st.sampled_from(sorted(entries[index])))
            entries[index][key] = data.draw(JUNK)
        else:
            entries[index] = data.draw(JUNK)
    path = write(tmp_path_factory.mktemp("fuzz") / "a.json", content)
    option = data.draw(st.sampled_from(["stop", "drop"]))
    try:
        loaded = load_coco(path, path.parent, bad_boxes=option)
    except InputError:
        return
    assert len(loaded.image_ids) == 3
    assert (loaded.boxes[:, 2:] > 0).all()
    assert loaded.report.objects + len(loaded.report.dropped) == len(content["annotations"])


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6))
def test_no_damaged_byte_makes_another_kind_of_error(tmp_path_factory, seed):
    rng = random.Random(seed)
    content = bytearray(json.dumps(coco()).encode())
    for _ in range(rng.randint(1, 3)):
        content[rng.randrange(len(content))] = rng.randrange(256)
    path = tmp_path_factory.mktemp("bytes") / "a.json"
    path.write_bytes(bytes(content[: rng.randint(len(content) // 2, len(content))]))
    try:
        load_coco(path, path.parent)
    except InputError:
        return
