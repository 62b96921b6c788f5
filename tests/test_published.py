"""Published scenarios: class lists against independent ones, image rules against brute force."""

import json
import os
import random
from pathlib import Path

import numpy as np
import pytest
from detectron2.data.datasets.builtin_meta import COCO_CATEGORIES
from detectron2.data.datasets.pascal_voc import CLASS_NAMES

from cldetr.cli import main
from cldetr.data.coco import load_coco
from cldetr.data.manifest import load_manifest
from cldetr.errors import InputError
from cldetr.grouping import Category
from cldetr.published import (
    find_published,
    match_spelling,
    published_orders,
    published_scenarios,
)
from cldetr.scenario import make_scenario
from cldetr.settings import ScenarioSettings

from .coco_files import VAL2017_BOXES, Labels, coco, write

COCO = [entry["name"] for entry in COCO_CATEGORIES if entry["isthing"]]
COCO_IDS = [entry["id"] for entry in COCO_CATEGORIES if entry["isthing"]]
FACTS = Path(os.environ.get("CLDETR_SHARED_DATA", "")) / "scenarios.json"


def family(name):
    return {key: each for key, each in published_scenarios().items() if key.startswith(f"{name}/")}


def labelled(names, labels):
    """A data set of these categories whose images have objects of these labels."""
    data = Labels(len(names), labels)
    data.categories = tuple(Category(i, name) for i, name in enumerate(names, start=1))
    return data


# The class lists


def test_vocs_scenarios_are_cuts_of_its_own_order():
    for name, each in family("voc").items():
        assert [x for phase in each.phases for x in phase] == list(CLASS_NAMES)
        first, *rest = name.removeprefix("voc/").split("+")
        sizes = [int(first)]
        for term in rest:
            size, _, times = term.partition("x")
            sizes += [int(size)] * int(times or 1)
        assert [len(phase) for phase in each.phases] == sizes
    assert [phase[-1] for phase in find_published("voc/19+1").phases] == ["train", "tvmonitor"]
    assert find_published("voc/10+5+5").phases[1][0] == "diningtable"


@pytest.mark.parametrize("name", [*family("loco_coco"), *family("owod")])
def test_scenarios_on_coco_have_each_of_its_categories_once(name):
    phases = find_published(name).phases
    assert sorted(x for phase in phases for x in phase) == sorted(COCO)
    if name.startswith("loco"):
        assert "+".join(str(len(phase)) for phase in phases) == name.removeprefix("loco_coco/")


def test_open_world_splits_are_those_of_their_papers():
    """M-OWODB's first task is VOC; S-OWODB keeps superclasses together."""
    m_owodb, s_owodb = (find_published(f"owod/{name}").phases for name in ("m_owodb", "s_owodb"))
    assert m_owodb[0] == tuple(match_spelling(CLASS_NAMES, COCO))
    assert [len(phase) for phase in s_owodb] == [19, 21, 20, 20]
    animals_and_vehicles = set(COCO[1:9]) | set(COCO[14:24]) | {"person"}
    assert set(s_owodb[0]) == animals_and_vehicles


def test_psedets_order_is_its_shuffle():
    ids = list(COCO_IDS)
    random.Random(123).shuffle(ids)
    names = dict(zip(COCO_IDS, COCO, strict=True))
    assert published_orders()["psedet"] == tuple(names[i] for i in ids)


@pytest.mark.data
@pytest.mark.skipif(not FACTS.exists(), reason="needs CLDETR_SHARED_DATA with scenarios.json")
def test_every_list_is_that_of_the_file_of_facts():
    facts = json.loads(FACTS.read_text(encoding="utf-8"))
    expected = {f"owod/{name}": facts["owod"][name]["tasks"] for name in ("m_owodb", "s_owodb")}
    for name in ("voc", "loco_coco", "dior", "dota"):
        for setting, phases in facts[name]["settings"].items():
            expected[f"{name}/{setting.split()[-1]}"] = phases
    found = {name: [list(p) for p in each.phases] for name, each in published_scenarios().items()}
    assert found == expected


# Names, as data sets spell them


def test_categories_are_matched_in_any_spelling():
    voc = ["sofa", "pottedplant", "tvmonitor", "aeroplane", "motorbike", "diningtable", "cat"]
    spelt = ["couch", "potted plant", "tv", "airplane", "motorcycle", "dining table", "cat"]
    assert match_spelling(voc, spelt) == spelt
    assert match_spelling(spelt, voc) == voc
    assert match_spelling(["Expressway-toll-station"], ["expressway_toll_station"]) == [
        "expressway_toll_station"
    ]
    assert match_spelling(["airplane"], ["plane", "ship"]) == ["plane"]
    assert match_spelling(["airplane"], ["aeroplane", "airplane"]) == ["airplane"]
    assert match_spelling(["zebra"], ["cat"]) == ["zebra"]


def test_a_scenario_of_voc_is_made_of_data_with_coco_spelling():
    names = sorted(match_spelling(CLASS_NAMES, COCO))
    data = labelled(names, [[label] for label in range(20)])
    made = make_scenario("voc/19+1", data, protocol="traditional")
    assert (made.name, made.order, made.protocol) == ("voc/19+1", "list", "traditional")
    assert [names[label] for label in made.phases[1].classes] == ["tv"]
    assert made.phases[1].image_ids == (int(data.image_ids[names.index("tv")]),)


def test_a_category_that_is_missing_or_unknown_is_named():
    lacking = labelled(CLASS_NAMES[:-1], [[0]])
    with pytest.raises(InputError, match=r"'tvmonitor' \(list 2\) is not a category of toy"):
        make_scenario("voc/19+1", lacking, protocol="traditional")
    more = labelled([*CLASS_NAMES, "zebra"], [[label] for label in range(21)])
    with pytest.raises(InputError, match=r"1 categories of toy are in no phase(.|\n)*zebra"):
        make_scenario("voc/19+1", more, protocol="traditional")
    assert make_scenario("voc/19+1", more, protocol="traditional", partial=True).phases


def test_unknown_names_and_contradictions_are_refused():
    data = labelled(CLASS_NAMES, [[label] for label in range(20)])
    with pytest.raises(InputError, match=r"'voc/18\+2': do you mean .*cldetr split --list"):
        make_scenario("voc/18+2", data)
    with pytest.raises(InputError, match=r"traditional protocol, not with strict: set SCENARIO"):
        make_scenario("voc/19+1", data)
    with pytest.raises(InputError, match="its own class order"):
        make_scenario("voc/19+1", data, protocol="traditional", order="released")
    with pytest.raises(InputError, match=r"set SCENARIO\.PROTOCOL loco"):
        ScenarioSettings(name="loco_coco/40+40")
    with pytest.raises(InputError, match=r"has its own phases: remove SCENARIO\.PHASES"):
        ScenarioSettings("loco_coco/40+40", "loco", phases=(("cat",), ("dog",)))


def test_a_published_order_orders_any_sizes():
    data = labelled(COCO, [[label] for label in range(80)])
    made = make_scenario("70+10", data, protocol="traditional", order="psedet")
    assert (made.order, made.class_seed) == ("psedet", None)
    names = [COCO[label] for label in made.seen(2)]
    assert tuple(names) == published_orders()["psedet"]
    with pytest.raises(InputError, match=r"choose id, seed, released, psedet or a list"):
        make_scenario("70+10", data, order="alphabet")


# LoCo-COCO's image rule


def test_an_image_is_in_one_of_the_phases_that_it_shows():
    """One stream for all images, whatever data seed is given; an image of one phase draws, too."""
    a, b = COCO.index("person"), COCO.index("cat")
    data = labelled(COCO, [[a, b], [], [b], [a, b], [a, b], [b, b]])
    made = make_scenario("loco_coco/40+40", data, protocol="loco", data_seed=7)
    generator = random.Random(42)
    expected = [[], []]
    for image, phases in zip([0, 2, 3, 4, 5], [[0, 1], [1], [0, 1], [0, 1], [1]], strict=True):
        expected[generator.choice(phases)].append(int(data.image_ids[image]))
    assert [list(phase.image_ids) for phase in made.phases] == expected
    assert made.data_seed == 42
    used = [image for phase in made.phases for image in phase.image_ids]
    assert sorted(used) == [int(i) for i in np.delete(data.image_ids, 1)]  # all but the empty one


def loco_by_brute_force(content, phases):
    """The published rule, straight over the JSON of a COCO file."""
    names = {category["id"]: category["name"] for category in content["categories"]}
    shown = {image["id"]: set() for image in content["images"]}
    for annotation in content["annotations"]:
        shown[annotation["image_id"]].add(names[annotation["category_id"]])
    random.seed(42)
    chosen = [[] for _ in phases]
    for image in content["images"]:
        present = [i for i, phase in enumerate(phases) if shown[image["id"]] & set(phase)]
        if present:
            chosen[random.choice(present)].append(image["id"])
    return chosen


def test_the_draw_is_the_published_one_even_where_boxes_are_dropped(tmp_path):
    """A box without area is no training target, but the release draws with it."""
    rng = np.random.default_rng(0)
    pairs = [(int(rng.integers(1, 200)), int(rng.integers(1, 81))) for _ in range(400)]
    content = coco(200, COCO, pairs)
    for annotation in content["annotations"][::9]:
        annotation["bbox"][2] = 0
    data = load_coco(write(tmp_path / "a.json", content), tmp_path)
    assert data.report.dropped_empty == 45
    for name in family("loco_coco"):
        made = make_scenario(name, data, protocol="loco")
        expected = loco_by_brute_force(content, find_published(name).phases)
        assert [list(phase.image_ids) for phase in made.phases] == expected


@pytest.mark.data
@pytest.mark.skipif(not VAL2017_BOXES.exists(), reason="needs the boxes of val2017")
@pytest.mark.parametrize("name", family("loco_coco"))
def test_the_draw_on_val2017_is_the_published_one(name):
    data = load_coco(VAL2017_BOXES, VAL2017_BOXES.parent, bad_boxes="drop")
    made = make_scenario(name, data, protocol="loco")
    content = json.loads(VAL2017_BOXES.read_text())
    expected = loco_by_brute_force(content, find_published(name).phases)
    assert [list(phase.image_ids) for phase in made.phases] == expected


# The command


def test_split_lists_and_audits_every_published_scenario(tmp_path, capsys):
    assert main(["split", "--list"]) == 0
    listed = capsys.readouterr().out
    families = set()  # whose page is drawn: once each, plots take their time
    for name, each in published_scenarios().items():
        assert f"{name} " in listed
        names = [x for phase in each.phases for x in phase]
        rng = np.random.default_rng(1)
        # Each category alone on two images, and with a second one on a third.
        pairs = [(image, 1 + image % len(names)) for image in range(1, 3 * len(names) + 1)]
        pairs += [(image, int(rng.integers(1, len(names) + 1))) for image, _ in pairs[::3]]
        content = coco(len(pairs), names, pairs)
        file = write(tmp_path / f"{name.replace('/', '_')}.json", content)
        out = tmp_path / f"{file.stem}_out"
        first = name.partition("/")[0] not in families
        families.add(name.partition("/")[0])
        words = ["split", "--annotations", str(file), "--scenario", name]
        assert main([*words, *(("--out", str(out)) if first else ())]) == 0
        assert f"{name}: {each.protocol}" in capsys.readouterr().out
        if not first:
            continue
        manifest = load_manifest(out / "manifest.json")
        assert [len(phase.classes) for phase in manifest.phases] == list(map(len, each.phases))
        audit = json.loads((out / "audit.json").read_text())
        assert audit["classes_never_learnt"] == []
        assert bool(audit["overlap"]) == (each.protocol == "traditional")
        assert each.protocol in (out / "audit.html").read_text().casefold()


def test_split_refuses_another_protocol(tmp_path, capsys):
    file = write(tmp_path / "a.json", coco(20, CLASS_NAMES, [(i, i) for i in range(1, 21)]))
    words = ["split", "--annotations", str(file), "--scenario", "voc/15+5"]
    assert main([*words, "--protocol", "strict"]) == 2
    assert "published with the traditional protocol" in capsys.readouterr().err
    assert main(words) == 0
