import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pycocotools.coco import COCO

from cldetr.cli import main
from cldetr.data.coco import load_coco
from cldetr.data.exemplars import Context, find_strategy
from cldetr.data.memory import ExemplarMemory, PhaseExemplars, phase_counts
from cldetr.errors import InputError
from cldetr.files import sha256_json
from cldetr.scenario import BASE, make_scenario, make_separate_scenario

NAMES = ["ant  [small]", "bee", "cow", "dog"]


def write_annotations(path: Path, seed: int = 0, images: int = 60) -> Path:
    rng = np.random.default_rng(seed)
    annotations = []
    for image in range(images):
        for _ in range(rng.integers(0, 5)):
            box = [*rng.integers(0, 20, 2).tolist(), *rng.integers(2, 10, 2).tolist()]
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": 1000 - image,
                    "category_id": int(rng.choice([1, 3, 7, 9], p=[0.4, 0.3, 0.2, 0.1])),
                    "bbox": box,
                    "area": box[2] * box[3],
                    "iscrowd": int(rng.random() < 0.1),
                }
            )
    content = {
        "images": [
            {"id": 1000 - i, "file_name": f"{i}.jpg", "width": 32, "height": 32}
            for i in range(images)
        ],
        "annotations": annotations,
        "categories": [{"id": i, "name": n} for i, n in zip([1, 3, 7, 9], NAMES, strict=True)],
    }
    path.write_text(json.dumps(content))
    return path


@pytest.fixture
def data(tmp_path):
    return load_coco(write_annotations(tmp_path / "all.json"), tmp_path)


def choose(scenario, data, strategy="kl", budget=0.25):
    memory = ExemplarMemory.empty(scenario)
    for phase in scenario.phases:
        counts = phase_counts(scenario, phase.index, data)
        selection = find_strategy(strategy).choose(counts, budget, Context(seed=5))
        memory = memory.add(
            PhaseExemplars.of(
                scenario,
                phase.index,
                counts,
                selection,
                strategy=strategy,
                budget=budget,
                seed=5,
            )
        )
    return memory


def test_counts_are_of_the_phase_and_leave_crowd_out(data):
    scenario = make_scenario("3+1", data, order="seed", class_seed=2)
    phase = scenario.phase(1)
    counts = phase_counts(scenario, 1, data)
    coco = COCO(str(data.json_file))
    for index, image in enumerate(phase.image_ids):
        row = slice(counts.indptr[index], counts.indptr[index + 1])
        got = dict(zip(counts.indices[row].tolist(), counts.data[row].tolist(), strict=True))
        expected: dict[int, int] = {}
        for annotation in coco.loadAnns(coco.getAnnIds([image], iscrowd=False)):
            label = [1, 3, 7, 9].index(annotation["category_id"])
            if label in phase.classes:
                key = phase.classes.index(label)
                expected[key] = expected.get(key, 0) + 1
        assert got == expected


@pytest.mark.parametrize("budget", [0.25, 7])
def test_memory_survives_the_disk(data, tmp_path, budget):
    scenario = make_scenario("2+2", data)
    memory = choose(scenario, data, budget=budget)
    files = memory.save(tmp_path / "memory", {BASE: data})
    assert [file.name for file in files] == [
        "exemplars_phase1.json",
        "exemplars_phase2.json",
        "memory.json",
    ]
    assert ExemplarMemory.load(tmp_path / "memory") == memory
    assert ExemplarMemory.load(tmp_path / "memory" / "memory.json") == memory
    memory.check(scenario, {BASE: data})


def test_memory_holds_the_union_by_phase(data):
    scenario = make_scenario("2+2", data)
    memory = choose(scenario, data)
    parts = scenario.exemplars(memory.image_ids)
    assert [part.classes for part in parts] == [(0, 1), (2, 3)]
    assert [len(part.image_ids) for part in parts] == [8, 8]  # a quarter of 30 each, rounded
    with pytest.raises(ValueError, match="cannot follow"):
        memory.add(memory.phases[0])


def test_memory_file_can_be_read_by_people(data, tmp_path):
    memory = choose(make_scenario("2+2", data), data)
    memory.save(tmp_path, {BASE: data})
    text = (tmp_path / "memory.json").read_text()
    assert max(map(len, text.splitlines())) <= 110
    phase = json.loads(text)["phases"][0]
    assert phase["strategy"] == "kl"
    assert phase["classes"][0]["name"] == "ant  [small]"
    assert len(phase["image_ids"]) == len(phase["kl"]) == 8
    assert phase["kl"][0] is None or phase["kl"][0] >= 0
    labelled = sum(phase["data_images"][1:])
    objects = sum(record["objects_in_data"] for record in phase["classes"])
    assert phase["objects_per_image"]["data"] == pytest.approx(objects / labelled)


def test_coco_file_holds_the_exemplars_with_labels_of_their_phase(data, tmp_path):
    scenario = make_scenario("2+2", data, order="seed", class_seed=1)
    memory = choose(scenario, data)
    memory.save(tmp_path, {BASE: data})
    whole = COCO(str(data.json_file))
    for phase in memory.phases:
        part = COCO(str(tmp_path / f"exemplars_phase{phase.index}.json"))
        ids = sorted(scenario.categories[record.label].id for record in phase.classes)
        assert [image["id"] for image in part.dataset["images"]] == list(phase.image_ids)
        assert [category["id"] for category in part.dataset["categories"]] == ids
        expected = whole.loadAnns(whole.getAnnIds(list(phase.image_ids), ids))
        key = "id"
        assert sorted(part.dataset["annotations"], key=lambda a: a[key]) == sorted(
            expected, key=lambda a: a[key]
        )
        counts = [
            len(part.getAnnIds(catIds=[scenario.categories[record.label].id], iscrowd=False))
            for record in phase.classes
        ]
        assert counts == [record.objects_in_exemplars for record in phase.classes]


def test_separate_data_sets_are_matched_by_name(data, tmp_path):
    content = json.loads(data.json_file.read_text())
    ids = {1: 4, 3: 5, 7: 2, 9: 3}  # the same names under other ids, in another order
    for annotation in content["annotations"]:
        annotation["category_id"] = ids[annotation["category_id"]]
    for category in content["categories"]:
        category["id"] = ids[category["id"]]
        if category["name"] == "cow":
            category["name"] = "emu"
    (tmp_path / "later.json").write_text(json.dumps(content))
    later = load_coco(tmp_path / "later.json", tmp_path)
    scenario = make_separate_scenario([data, later])
    sources = {source.name: source for source in (data, later)}
    assert [scenario.categories[label].name for label in scenario.phase(2).classes] == ["emu"]
    assert later.categories[0].name == "emu"
    counts = phase_counts(scenario, 2, later)
    emus = int(((later.labels == 0) & ~later.crowd).sum())
    assert counts.sum(axis=0).tolist() == [emus]

    memory = ExemplarMemory.empty(scenario)
    for phase, source in zip(scenario.phases, (data, later), strict=True):
        own = phase_counts(scenario, phase.index, source)
        selection = find_strategy("kl").choose(own, 5, Context())
        memory = memory.add(
            PhaseExemplars.of(scenario, phase.index, own, selection, strategy="kl", budget=5)
        )
    memory.save(tmp_path / "memory", sources)
    ExemplarMemory.load(tmp_path / "memory").check(scenario, sources)
    coco = COCO(str(tmp_path / "memory" / "exemplars_phase2.json"))
    assert coco.getCatIds() == [scenario.categories[4].id]
    assert len(coco.getAnnIds(iscrowd=False)) == memory.phases[1].classes[0].objects_in_exemplars


def test_saving_again_gives_the_same_bytes(data, tmp_path):
    memory = choose(make_scenario("2+2", data), data)
    files = memory.save(tmp_path, {BASE: data})
    before = [file.read_bytes() for file in files]
    ExemplarMemory.load(tmp_path).save(tmp_path, {BASE: data})
    assert [file.read_bytes() for file in files] == before


def test_changed_memory_is_refused(data, tmp_path):
    memory = choose(make_scenario("2+2", data), data)
    memory.save(tmp_path, {BASE: data})
    file = tmp_path / "memory.json"
    text = file.read_text()
    file.write_text(text.replace(str(memory.phases[0].image_ids[0]), "999999", 1))
    with pytest.raises(InputError, match="was changed"):
        ExemplarMemory.load(tmp_path)
    file.write_text(text[: len(text) // 2])
    with pytest.raises(InputError, match="not a valid exemplar memory"):
        ExemplarMemory.load(tmp_path)


def test_changed_or_missing_coco_file_is_refused(data, tmp_path):
    choose(make_scenario("2+2", data), data).save(tmp_path, {BASE: data})
    file = tmp_path / "exemplars_phase2.json"
    file.write_text(file.read_text() + " ")
    with pytest.raises(InputError, match=r"exemplars_phase2.json.*was changed"):
        ExemplarMemory.load(tmp_path)
    file.unlink()
    with pytest.raises(InputError, match="is missing"):
        ExemplarMemory.load(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        [],
        {},
        {"format": 2},
        {"format": 1, "files": {}, "categories": [], "fingerprints": [], "phases": "none"},
        {"format": 1, "files": 3, "categories": [], "fingerprints": [], "phases": []},
    ],
)
def test_other_json_is_refused(tmp_path, content):
    file = tmp_path / "memory.json"
    if isinstance(content, dict):
        content = {**content, "hash": sha256_json(content)}
    file.write_text(json.dumps(content))
    with pytest.raises(InputError, match=r"valid exemplar memory|has format"):
        ExemplarMemory.load(file)


def test_missing_memory_is_named(tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        ExemplarMemory.load(tmp_path)


def test_memory_of_other_classes_is_refused(data):
    memory = choose(make_scenario("2+2", data), data)
    with pytest.raises(InputError, match=r"phase 1: classes \(0, 1\) .*\(0, 1, 2\)"):
        memory.check(make_scenario("3+1", data), {BASE: data})
    fewer = make_scenario([["bee", "cow"]], data, partial=True)
    with pytest.raises(InputError, match="phase 2 is not in the scenario"):
        memory.check(fewer, {BASE: data})


def test_memory_of_other_images_is_refused_with_the_first_ten(data):
    memory = choose(make_scenario("2+2", data), data)
    with pytest.raises(InputError, match="is not an image of that phase") as caught:
        memory.check(make_scenario("2+2", data, data_seed=1), {BASE: data})
    found = len(str(caught.value).splitlines())
    assert found <= 12


def test_memory_of_another_file_is_refused(data, tmp_path):
    memory = choose(make_scenario("2+2", data), data)
    other = load_coco(write_annotations(tmp_path / "other.json", seed=1), tmp_path)
    with pytest.raises(InputError, match="the memory was chosen from"):
        memory.check(make_scenario("2+2", other), {BASE: other})
    with pytest.raises(InputError, match="'base' is missing"):
        memory.check(make_scenario("2+2", data), {})


def test_memory_with_other_counts_is_refused(data):
    scenario = make_scenario("2+2", data)
    memory = choose(scenario, data)
    first = memory.phases[0]
    record = replace(first.classes[0], objects_in_data=1)
    wrong = replace(first, classes=(record, *first.classes[1:]))
    with pytest.raises(InputError, match=r"objects of 'ant  \[small\]'.*the memory says 1 and"):
        replace(memory, phases=(wrong, memory.phases[1])).check(scenario, {BASE: data})


def test_command_writes_memory_and_coco_and_prints_the_match(data, tmp_path, capsys):
    out, coco = tmp_path / "out" / "memory.json", tmp_path / "out" / "coco.json"
    arguments = ["--annotations", str(data.json_file), "--out", str(out), "--coco", str(coco)]
    assert main(["exemplars", *arguments, "--classes", "bee", "9", "--budget", "12"]) == 0
    printed = capsys.readouterr().out
    assert "12 of 60 images chosen" in printed
    assert "KL(data ‖ exemplars)" in printed
    memory = ExemplarMemory.load(out)
    assert [record.name for record in memory.phases[0].classes] == ["bee", "dog"]
    assert [image["id"] for image in json.loads(coco.read_text())["images"]] == list(
        memory.phases[0].image_ids
    )


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--strategy", "best"], "choose one of"),
        (["--strategy", "herding"], "needs features"),
        (["--budget", "0"], "exemplar budget"),
        (["--classes", "bea"], "bee"),
        (["--out", "/dev/null/memory.json"], "cannot be written"),
    ],
)
def test_command_says_what_to_fix(data, tmp_path, capsys, more, message):
    arguments = ["--annotations", str(data.json_file), "--out", str(tmp_path / "memory.json")]
    assert main(["exemplars", *arguments, *more]) == 2
    assert message in capsys.readouterr().err
