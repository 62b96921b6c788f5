"""Manifests: what was written is read; what was changed, by chance or on purpose, is refused."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cldetr.data.manifest import (
    check_same,
    differences,
    load_manifest,
    manifest_content,
    save_manifest,
    scenario_hash,
)
from cldetr.errors import InputError
from cldetr.files import sha256_json
from cldetr.scenario import (
    Category,
    make_domain_scenario,
    make_scenario,
    make_separate_scenario,
)

from ..coco_files import Labels


def toy(**options):
    data = Labels(6, [[i % 6, (i * 5) % 6] for i in range(200)])
    return make_scenario("3+2+1", data, **options), data


def separate_toy():
    sets = [Labels(2, [[0, 1]] * 3, name="one"), Labels(3, [[2]] * 4, name="two")]
    return make_separate_scenario(sets)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["strict", "traditional"]),
    st.sampled_from(["id", "seed", "released"]),
    st.integers(0, 2**32 - 1),
)
def test_manifest_gives_the_scenario_back(tmp_path_factory, protocol, order, seed):
    made, _ = toy(protocol=protocol, order=order, class_seed=seed, data_seed=seed)
    path = tmp_path_factory.mktemp("manifest") / "manifest.json"
    digest = save_manifest(made, path)
    assert load_manifest(path) == made
    assert digest == scenario_hash(made) == json.loads(path.read_text())["hash"]


def test_manifest_of_separate_data_sets_gives_the_scenario_back(tmp_path):
    made = separate_toy()
    save_manifest(made, tmp_path / "manifest.json")
    assert load_manifest(tmp_path / "manifest.json") == made


def domain_toy():
    sets = [Labels(3, [[0, 1], [2]], name="clear"), Labels(2, [[0], [1]] * 2, name="fog")]
    return make_domain_scenario(sets)


def test_manifest_of_domains_gives_the_scenario_back(tmp_path):
    made = domain_toy()
    save_manifest(made, tmp_path / "manifest.json")
    assert load_manifest(tmp_path / "manifest.json") == made
    first, second = json.loads((tmp_path / "manifest.json").read_text())["phases"]
    assert (second["classes"], second["refreshed"]) == ([], [0, 1])
    assert second["class_names"] == first["class_names"][:2]


@pytest.mark.parametrize(
    "change", [{"refreshed": [0, 3]}, {"refreshed": []}, {"refreshed": [1, 1]}]
)
def test_a_domain_whose_classes_cannot_be_is_refused(tmp_path, change):
    content = json.loads(json.dumps(manifest_content(domain_toy())))
    content["phases"][1].update(change)
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps({**content, "hash": sha256_json(content)}))
    with pytest.raises(InputError, match="phase 2"):
        load_manifest(path)


def test_manifest_is_readable_and_holds_names_and_ids(tmp_path):
    made, _ = toy(order="seed", class_seed=5)
    made = replace(made, categories=(Category(1, 'Füchse, "rot"'), *made.categories[1:]))
    save_manifest(made, tmp_path / "manifest.json")
    text = (tmp_path / "manifest.json").read_text()
    content = json.loads(text)
    assert max(len(line) for line in text.splitlines()) <= 100
    assert len(text.splitlines()) < 80
    assert "Füchse" in text
    for phase, written in zip(made.phases, content["phases"], strict=True):
        assert written["class_names"] == [made.categories[label].name for label in phase.classes]
        assert tuple(written["image_ids"]) == phase.image_ids


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_changed_byte_is_refused_or_changes_nothing(tmp_path_factory, data):
    made, _ = toy()
    path = tmp_path_factory.mktemp("bytes") / "manifest.json"
    save_manifest(made, path)
    content = bytearray(path.read_bytes())
    index = data.draw(st.integers(0, len(content) - 1))
    content[index] = data.draw(st.integers(0, 255))
    path.write_bytes(bytes(content))
    try:
        assert load_manifest(path) == made  # white space, or the byte it was
    except InputError as error:
        assert str(path) in str(error)  # noqa: PT017


def leaves(value, path=()):
    """Paths of all plain values in nested lists and dictionaries."""
    if isinstance(value, dict | list):
        keys = value if isinstance(value, dict) else range(len(value))
        return [leaf for key in keys for leaf in leaves(value[key], (*path, key))]
    return [path]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_changed_value_is_refused_even_with_a_new_hash(tmp_path_factory, data):
    """A forged hash passes the first check: the content or the comparison then gives it away."""
    made, _ = toy()
    content = json.loads(json.dumps(manifest_content(made)))
    *way, last = data.draw(st.sampled_from(leaves(content)))
    holder = content
    for key in way:
        holder = holder[key]
    old = holder[last]
    new = st.integers(-5, 900) if isinstance(old, int) else st.sampled_from(
        ["strict", "traditional", "separate", "id", "class 1", "base", "other"]
    )  # fmt: skip
    holder[last] = data.draw(new.filter(lambda value: value != old))
    path = tmp_path_factory.mktemp("forged") / "manifest.json"
    path.write_text(json.dumps({**content, "hash": sha256_json(content)}))

    def use():
        loaded = load_manifest(path)
        check_same(made, loaded, "the run's scenario and this one")

    with pytest.raises(InputError):
        use()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a valid manifest"),
        ("[]", "not a valid manifest"),
        ("{}", "has format None"),
        ('{"format": 1}', "has format 1, this version of cldetr reads 2"),
        ('{"format": 2, "name": 3}', "was changed after it was written"),
    ],
)
def test_what_is_not_a_manifest_is_refused(tmp_path, text, message):
    path = tmp_path / "manifest.json"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        load_manifest(path)
    with pytest.raises(InputError, match="cannot be read"):
        load_manifest(tmp_path / "none.json")


def test_contradictions_are_told_at_once(tmp_path):
    content = json.loads(json.dumps(manifest_content(toy()[0])))
    first, second, third = content["phases"]
    second["classes"][0] = first["classes"][0]
    second["image_ids"][0] = first["image_ids"][0]
    third["image_ids"] = []
    third["source"] = "nowhere"
    third["index"] = 7
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps({**content, "hash": sha256_json(content)}))
    with pytest.raises(InputError) as caught:
        load_manifest(path)
    message = str(caught.value)
    assert "is in phases 1 and 2" in message
    assert f"image {first['image_ids'][0]} is in phases 1 and 2" in message
    assert "phase 3 has no image" in message
    assert "'nowhere', not listed" in message
    assert "phase 7 is where phase 3 should be" in message


def test_differences_between_scenarios_are_named():
    made, _ = toy(data_seed=1)
    other, _ = toy(order="seed", data_seed=2)
    found = differences(made, other)
    assert differences(made, made) == []
    assert "order: 'id' → 'seed'" in found
    assert "data_seed: 1 → 2" in found
    assert any(line.startswith("phase 1: ") and "images gone" in line for line in found)
    phases = (*made.phases[:2], replace(made.phases[2], image_ids=made.phases[2].image_ids[::-1]))
    assert differences(made, replace(made, phases=phases)) == [
        "phase 3: the same images in another order"
    ]
    assert differences(made, replace(made, phases=made.phases[:2])) == ["phase 3: gone"]
    with pytest.raises(InputError, match="run and settings differ"):
        check_same(made, other, "run and settings")
