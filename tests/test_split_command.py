"""`cldetr split`: what it prints, writes and finds."""

import contextlib
import io
import json
import statistics
from collections import Counter

import pytest
from pycocotools.coco import COCO

from cldetr.cli import main
from cldetr.data.coco import load_coco
from cldetr.data.manifest import load_manifest
from cldetr.files import sha256_file
from cldetr.scenario import BASE, make_separate_scenario

from .coco_files import VAL2017_BOXES, coco, random_coco, write


def split(*options):
    return main(["split", *map(str, options)])


@pytest.fixture
def annotations(tmp_path):
    return write(tmp_path / "a.json", random_coco(4, images=60, categories=8))


def objects(content, images, names):
    known = {category["id"]: category["name"] for category in content["categories"]}
    return [
        ann
        for ann in content["annotations"]
        if ann["image_id"] in images and known[ann["category_id"]] in names
    ]


@pytest.mark.parametrize("protocol", ["strict", "traditional"])
def test_audit_counts_what_each_phase_shows_and_hides(annotations, tmp_path, protocol):
    out = tmp_path / "out"
    options = ["--scenario", "5+2+1", "--protocol", protocol, "--order", "seed", "--out", out]
    assert split("--annotations", annotations, *options, "--class-seed", 2) == 0
    content = json.loads(annotations.read_text())
    manifest = json.loads((out / "manifest.json").read_text())
    audit = json.loads((out / "audit.json").read_text())
    fingerprints = load_manifest(out / "manifest.json").fingerprints
    assert fingerprints == ((BASE, sha256_file(annotations)),)
    old: list[str] = []
    phases = manifest["phases"]
    for number, (phase, found) in enumerate(zip(phases, audit["phases"], strict=True)):
        images, later = (
            set(phase["image_ids"]),
            [n for p in phases[number + 1 :] for n in p["class_names"]],
        )
        own = objects(content, images, phase["class_names"])
        assert found["images"] == len(images)
        assert found["instances"] == len(own)
        assert found["crowd"] == sum(ann["iscrowd"] for ann in own)
        assert found["annotated"] == len({ann["image_id"] for ann in own})
        assert found["empty"] == len(images) - found["annotated"]
        assert found["hidden"] == {
            "old": len(objects(content, images, old)),
            "future": len(objects(content, images, later)),
            "never": 0,
        }
        assert found["instances_per_class"] == {
            name: len(objects(content, images, [name])) for name in phase["class_names"]
        }
        old += phase["class_names"]
    overlap = {tuple(pair["phases"]): pair["images"] for pair in audit["overlap"]}
    for i, first in enumerate(phases):
        for j, second in enumerate(phases[:i]):
            shared = len(set(first["image_ids"]) & set(second["image_ids"]))
            assert overlap.get((j + 1, i + 1), 0) == shared
    assert bool(overlap) == (protocol == "traditional")


def test_printed_report_fits_a_terminal_and_says_what_matters(annotations, tmp_path, capsys):
    assert split("--annotations", annotations, "--scenario", "5+2+1") == 0
    text = capsys.readouterr().out
    assert max(len(line) for line in text.splitlines()[2:]) <= 100
    for word in ("5+2+1", "strict", "data seed 0", "images", "annotated", "instances"):
        assert word in text
    for finding in ("image overlap: none", "left unannotated", "classes without instances: none"):
        assert finding in text
    for category in json.loads(annotations.read_text())["categories"]:
        assert category["name"] in text


def test_phase_files_are_valid_coco_with_all_categories(annotations, tmp_path):
    out = tmp_path / "out"
    options = ["--scenario", "5+3", "--order", "seed", "--out", out, "--write-json"]
    assert split("--annotations", annotations, *options) == 0
    content = json.loads(annotations.read_text())
    for phase in json.loads((out / "manifest.json").read_text())["phases"]:
        path = out / f"phase{phase['index']}.json"
        with contextlib.redirect_stdout(io.StringIO()):
            api = COCO(str(path))
        assert {c["id"]: c["name"] for c in api.dataset["categories"]} == {
            c["id"]: c["name"] for c in content["categories"]
        }
        assert [image["id"] for image in api.dataset["images"]] == phase["image_ids"]
        expected = {ann["id"]: ann for ann in objects(content, set(api.imgs), phase["class_names"])}
        assert api.anns == expected
        load_coco(path, tmp_path)  # and it passes our own checks


def test_phase_files_of_a_partial_scenario_train_to_it(tmp_path, capsys):
    objects = [(image, 1 + image % 3) for image in range(1, 13)]
    path = write(tmp_path / "a.json", coco(12, ("stray", "cat", "dog"), objects))
    options = ["--phases", "cat;dog", "--out", tmp_path, "--write-json"]
    assert split("--annotations", path, *options) == 2
    assert "SCENARIO.PARTIAL True, --partial" in capsys.readouterr().err
    assert split("--annotations", path, *options, "--partial") == 0
    files = [tmp_path / "phase1.json", tmp_path / "phase2.json"]
    again = make_separate_scenario([load_coco(file, tmp_path) for file in files])
    assert again.name == "1+1"
    assert [category.name for category in again.categories] == ["cat", "dog"]


def test_objects_per_image_and_box_sizes_are_shown(annotations, tmp_path, capsys):
    assert split("--annotations", annotations, "--scenario", "5+3", "--out", tmp_path) == 0
    assert "max, hidden too" in capsys.readouterr().out
    content = json.loads(annotations.read_text())
    audit = json.loads((tmp_path / "audit.json").read_text())
    for phase, found in zip(
        json.loads((tmp_path / "manifest.json").read_text())["phases"], audit["phases"], strict=True
    ):
        images = dict.fromkeys(phase["image_ids"], 0)
        every, sizes = Counter(images), []
        own = {ann["id"] for ann in objects(content, set(images), phase["class_names"])}
        for ann in content["annotations"]:
            if ann["image_id"] in images and not ann["iscrowd"]:
                every[ann["image_id"]] += 1
                if ann["id"] in own:
                    images[ann["image_id"]] += 1
                    sizes.append((ann["bbox"][2] * ann["bbox"][3]) ** 0.5)
        per_image = found["objects_per_image"]
        assert per_image["mean"] == pytest.approx(len(sizes) / len(images), abs=0.005)
        assert per_image["max"] == max(images.values())
        assert per_image["max_with_hidden"] == max(every.values())
        assert found["box_sizes"]["50%"] == pytest.approx(statistics.median(sizes), abs=0.05)
    page = (tmp_path / "audit.html").read_text()
    assert "Objects per image and their sizes" in page


def test_leftovers_of_another_scenario_are_pointed_out(annotations, tmp_path, capsys):
    out = tmp_path / "out"
    split("--annotations", annotations, "--scenario", "5+2+1", "--out", out, "--write-json")
    split("--annotations", annotations, "--scenario", "5+3", "--out", out, "--write-json")
    text = capsys.readouterr().out
    assert f"note: {out / 'phase3.json'} is an older file" in text
    assert "phase2.json is" not in text


def test_files_of_their_own_become_phases(tmp_path, capsys):
    files = [
        write(tmp_path / "a" / "ann.json", coco(2, ("cat", "dog"), [(1, 1), (2, 2)])),
        write(tmp_path / "b" / "ann.json", coco(3, ("bird", "cat"), [(1, 1), (3, 2)])),
    ]
    assert split("--phases-from", *files, "--out", tmp_path / "out", "--write-json") == 0
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert [phase["class_names"] for phase in manifest["phases"]] == [["cat", "dog"], ["bird"]]
    second = json.loads((tmp_path / "out" / "phase2.json").read_text())
    assert [c["name"] for c in second["categories"]] == ["cat", "dog", "bird"]
    assert [ann["category_id"] for ann in second["annotations"]] == [3]
    assert "1 of old classes" in capsys.readouterr().out


def test_files_of_the_same_categories_become_domains(tmp_path, capsys):
    files = [
        write(tmp_path / "a" / "ann.json", coco(2, ("cat", "dog"), [(1, 1), (2, 2)])),
        write(tmp_path / "b" / "ann.json", coco(3, ("dog", "cat"), [(1, 1), (3, 2), (3, 2)])),
    ]
    out = tmp_path / "out"
    words = ("--phases-from", *files, "--protocol", "domains", "--out", out, "--write-json")
    assert split(*words) == 0
    text = capsys.readouterr().out
    assert "2 domains: domains (the same classes in each data set)" in text
    assert "phase 2: 0 objects left unannotated" in text
    second = json.loads((out / "audit.json").read_text())["phases"][1]
    assert second["classes"] == 2
    assert second["instances_per_class"] == {"dog": 1, "cat": 2}
    assert "images of another domain" in (out / "audit.html").read_text()
    # The file of a phase trains to the same: labels are those of the first domain.
    content = json.loads((out / "phase2.json").read_text())
    assert [c["name"] for c in content["categories"]] == ["cat", "dog"]
    assert [ann["category_id"] for ann in content["annotations"]] == [2, 1, 1]


def test_domains_of_one_file_are_refused(annotations, capsys):
    assert split("--annotations", annotations, "--scenario", "5+3", "--protocol", "domains") == 2
    assert "--phases-from" in capsys.readouterr().err


def test_files_that_share_images_are_found_out(tmp_path, capsys):
    files = [
        write(tmp_path / "a.json", coco(3, ("cat",), [(1, 1)])),
        write(tmp_path / "b.json", coco(2, ("bird",), [(1, 1)])),
    ]
    assert split("--phases-from", *files) == 0
    assert "phases 1 and 2 share 2" in capsys.readouterr().out
    assert split("--phases-from", *files, "--image-root", tmp_path / "x", tmp_path / "y") == 0
    assert "image overlap: none" in capsys.readouterr().out


def test_phases_and_orders_are_taken_by_name(annotations, tmp_path):
    names = [c["name"] for c in json.loads(annotations.read_text())["categories"]]
    groups = [names[:5], names[5:7], names[7:]]
    as_json = write(tmp_path / "phases.json", groups)
    as_lines = write(tmp_path / "phases.txt", "\n".join(map(",".join, groups)))
    order = write(tmp_path / "order.txt", "\n".join(names))
    inline = "; ".join(map(", ".join, groups))
    made = []
    for options in (
        ["--phases", inline],
        ["--phases", as_json],
        ["--phases", as_lines],
        ["--scenario", "5+2+1", "--order", order],
    ):
        out = tmp_path / f"out{len(made)}"
        assert split("--annotations", annotations, *options, "--out", out) == 0
        made.append(load_manifest(out / "manifest.json").phases)
    assert made[0] == made[1] == made[2] == made[3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--scenario", "5+3"], "give --annotations"),
        (["--annotations", "none.json", "--scenario", "5+3"], "no annotation file none.json"),
        (["--annotations", "A"], "either --scenario"),
        (["--annotations", "A", "--scenario", "5+3", "--phases", "x"], "either --scenario"),
        (["--annotations", "A", "--scenario", "5+9"], "needs 14 categories but a has 8"),
        (["--annotations", "A", "--scenario", "5+2"], "needs 7 categories"),
        (["--annotations", "A", "--scenario", "5+3", "--order", "name"], "choose id, seed"),
        (["--annotations", "A", "--scenario", "5+3", "--data-seed", "-1"], "seed must be"),
        (["--annotations", "A", "--phases", "class 1;nothing"], "not a category of a"),
        (["--annotations", "A", "--scenario", "5+3", "--write-json"], "--out"),
        (["--annotations", "A", "--scenario", "5+3", "--image-root", "x", "y"], "2 folders"),
        (["--phases-from", "A", "--scenario", "5+3"], "without --annotations"),
        (["--phases-from", "A", "A"], "are the same file"),
    ],
)
def test_what_the_user_can_fix_is_told_without_a_traceback(annotations, capsys, options, message):
    options = [annotations if option == "A" else option for option in options]
    assert split(*options) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_bad_boxes_are_dropped_on_request(tmp_path, capsys):
    content = coco()
    content["annotations"][0]["bbox"] = [1, 2, -3, 4]
    path = write(tmp_path / "a.json", content)
    assert split("--annotations", path, "--scenario", "2+1") == 2
    assert "--bad-boxes drop" in capsys.readouterr().err
    assert split("--annotations", path, "--scenario", "2+1", "--bad-boxes", "drop") == 0


def test_classes_without_instances_are_named(tmp_path, capsys):
    path = write(tmp_path / "a.json", coco(6, objects=[(1, 1), (2, 1)]))
    assert split("--annotations", path, "--scenario", "1+1", "--partial") == 0
    text = capsys.readouterr().out
    assert "classes without instances: dog (phase 2)" in text
    assert "classes never learnt: bird" in text


@pytest.mark.data
@pytest.mark.skipif(not VAL2017_BOXES.exists(), reason="needs the boxes of val2017")
def test_val2017_has_its_check_values(tmp_path):
    options = ["--scenario", "70+10", "--protocol", "traditional", "--order", "id"]
    assert split("--annotations", VAL2017_BOXES, *options, "--out", tmp_path) == 0
    audit = json.loads((tmp_path / "audit.json").read_text())
    assert [phase["images"] for phase in audit["phases"]] == [4801, 851]
    assert [p["instances"] + p["dropped"] for p in audit["phases"]] == [34_421, 2_360]
