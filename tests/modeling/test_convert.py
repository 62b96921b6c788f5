"""Checkpoints as the official implementations write them, made here from the published names."""

import argparse
import functools
import json
import pickle

import pytest
import torch
import torchvision
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.modeling import build_model

from cldetr.cli import main
from cldetr.commands.convert import read_seen
from cldetr.data.manifest import save_manifest
from cldetr.engine.initial_weights import load_trained_detector
from cldetr.errors import InputError
from cldetr.modeling.convert import COCO, convert_checkpoint, gather_rows
from cldetr.scenario import Category, make_scenario

from ..coco_files import Labels

COCO_IDS = [number for number, _ in COCO]
BODY = "backbone.0.body."


@functools.cache
def torchvision_resnet():
    """A ResNet-50 whose batch statistics are off their initial values."""
    model = torchvision.models.resnet50().eval()
    for name, tensor in model.state_dict().items():
        if tensor.dim() == 1 and not name.startswith("fc."):
            tensor.add_(torch.rand(tensor.shape) * 0.2)
    return model


def resnet_state():
    return dict(torchvision_resnet().state_dict())


def linear(state, name, out, width):
    state[f"{name}.weight"] = torch.randn(out, width) * 0.02
    state[f"{name}.bias"] = torch.randn(out) * 0.02


def norm(state, name, width=256):
    state[f"{name}.weight"] = torch.rand(width) + 0.5
    state[f"{name}.bias"] = torch.randn(width) * 0.1


def attention(state, name):
    state[f"{name}.in_proj_weight"] = torch.randn(768, 256) * 0.02
    state[f"{name}.in_proj_bias"] = torch.randn(768) * 0.02
    linear(state, f"{name}.out_proj", 256, 256)


def deformable_attention(state, name):
    linear(state, f"{name}.sampling_offsets", 256, 256)
    linear(state, f"{name}.attention_weights", 128, 256)
    linear(state, f"{name}.value_proj", 256, 256)
    linear(state, f"{name}.output_proj", 256, 256)


def body():
    weights = resnet_state()
    return {
        BODY + name: tensor
        for name, tensor in weights.items()
        if not name.startswith("fc.") and not name.endswith("num_batches_tracked")
    }


def heads(state, count, refine):
    """Class and box heads; without refinement all layers have the same."""
    for layer in range(count):
        for name in ("class_embed.{}", "bbox_embed.{}.layers.0", "bbox_embed.{}.layers.1"):
            rows = 91 if name.startswith("class") else 256
            linear(state, name.format(layer), rows, 256)
        linear(state, f"bbox_embed.{layer}.layers.2", 4, 256)
    if not refine:
        for name in [x for x in state if "_embed.0." in x]:
            for layer in range(1, count):
                state[name.replace("_embed.0.", f"_embed.{layer}.")] = state[name]
    else:
        for name in [x for x in state if x.startswith(("bbox_embed.", "class_embed."))]:
            state[f"transformer.decoder.{name}"] = state[name]


def deformable_detr(refine=False, two_stage=False):
    torch.manual_seed(1)
    state = body()
    state["transformer.level_embed"] = torch.randn(4, 256)
    for layer in range(6):
        encoder, decoder = (f"transformer.{x}coder.layers.{layer}" for x in ("en", "de"))
        deformable_attention(state, f"{encoder}.self_attn")
        deformable_attention(state, f"{decoder}.cross_attn")
        attention(state, f"{decoder}.self_attn")
        for name, norms in ((encoder, 2), (decoder, 3)):
            linear(state, f"{name}.linear1", 1024, 256)
            linear(state, f"{name}.linear2", 256, 1024)
            for number in range(norms):
                norm(state, f"{name}.norm{number + 1}")
    for level, (width, kernel) in enumerate([(512, 1), (1024, 1), (2048, 1), (2048, 3)]):
        state[f"input_proj.{level}.0.weight"] = torch.randn(256, width, kernel, kernel) * 0.02
        state[f"input_proj.{level}.0.bias"] = torch.zeros(256)
        norm(state, f"input_proj.{level}.1")
    if two_stage:
        linear(state, "transformer.enc_output", 256, 256)
        norm(state, "transformer.enc_output_norm")
        linear(state, "transformer.pos_trans", 512, 512)
        norm(state, "transformer.pos_trans_norm", 512)
    else:
        linear(state, "transformer.reference_points", 2, 256)
        state["query_embed.weight"] = torch.randn(300, 512)
    heads(state, 7 if two_stage else 6, refine)
    return state


def detr(pre_norm=False, rows=92):
    torch.manual_seed(2)
    state = body()
    for layer in range(6):
        encoder, decoder = (f"transformer.{x}coder.layers.{layer}" for x in ("en", "de"))
        attention(state, f"{encoder}.self_attn")
        attention(state, f"{decoder}.self_attn")
        attention(state, f"{decoder}.multihead_attn")
        for name, norms in ((encoder, 2), (decoder, 3)):
            linear(state, f"{name}.linear1", 2048, 256)
            linear(state, f"{name}.linear2", 256, 2048)
            for number in range(norms):
                norm(state, f"{name}.norm{number + 1}")
    if pre_norm:
        norm(state, "transformer.encoder.norm")
    norm(state, "transformer.decoder.norm")
    linear(state, "class_embed", rows, 256)
    for number, out in enumerate([256, 256, 4]):
        linear(state, f"bbox_embed.layers.{number}", out, 256)
    state["query_embed.weight"] = torch.randn(100, 256)
    state["input_proj.weight"] = torch.randn(256, 2048, 1, 1) * 0.02
    state["input_proj.bias"] = torch.zeros(256)
    return state


def up_detr_pretraining():
    state = detr(pre_norm=True, rows=3)
    linear(state, "patch2query", 256, 2048)
    linear(state, "feature_align.layers.0", 256, 256)
    linear(state, "feature_align.layers.1", 2048, 256)
    return state


def load(cfg, file):
    """Loads a file into a config's detector as Detectron2 does; returns it and what it lacks."""
    model = build_model(cfg).eval()
    checkpointer = DetectionCheckpointer(model)
    lacks = []
    keep = checkpointer._load_model

    def remember(checkpoint):
        result = keep(checkpoint)
        missing = set(result.missing_keys) - set(model.optional_keys)
        lacks.extend([*missing, *result.unexpected_keys])
        return result

    checkpointer._load_model = remember
    checkpointer.load(str(file))
    return model, lacks


def test_official_deformable_detr_becomes_ours(tmp_path, config_file, capsys):
    state = deformable_detr()
    assert len(state) == 561
    assert sum(name.startswith(BODY) for name in state) == 265
    source, out = tmp_path / "official.pth", tmp_path / "ours.pth"
    file = {"model": state, "optimizer": {}, "epoch": 49, "args": argparse.Namespace(lr=2e-4)}
    torch.save(file, source)
    assert main(["convert", str(source), str(out)]) == 0
    assert "80 categories" in capsys.readouterr().out

    model, lacks = load(config_file("detector/deformable_detr_r50.yaml"), out)
    assert lacks == []
    for name in ("class_embed.0.weight", "class_embed.5.bias"):
        assert torch.equal(model.state_dict()[name], state[name][COCO_IDS])
    for name, tensor in state.items():
        if not name.startswith((BODY, "class_embed.")):
            assert torch.equal(model.state_dict()[name], tensor), name
    about = torch.load(out)["cldetr"]
    assert about["categories"][:2] == [{"id": 1, "name": "person"}, {"id": 2, "name": "bicycle"}]
    assert about["settings"]["DETR.WITH_BOX_REFINE"] is False

    theirs = torchvision_resnet()
    image = torch.randn(1, 3, 75, 90)
    with torch.no_grad():
        x = theirs.maxpool(theirs.relu(theirs.bn1(theirs.conv1(image))))
        wanted = theirs.layer4(theirs.layer3(theirs.layer2(theirs.layer1(x))))
        assert torch.equal(model.backbone(image)["res5"], wanted)


def test_released_cl_detr_with_prefixes_and_counters_becomes_ours():
    state = {f"module.module.{name}": tensor for name, tensor in deformable_detr().items()}
    state["module.module.backbone.0.body.total_params"] = torch.zeros(1)
    state["module.module.transformer.total_ops"] = torch.zeros(1)
    converted = convert_checkpoint({"model": state}, "cl_detr")
    assert len(converted.model) == 561
    assert sum(map(len, converted.dropped.values())) == 2


@pytest.mark.parametrize("two_stage", [False, True])
def test_refining_checkpoints_lose_the_second_names_of_their_heads(two_stage):
    state = deformable_detr(refine=True, two_stage=two_stage)
    converted = convert_checkpoint(state)
    assert converted.settings["DETR.WITH_BOX_REFINE"] is True
    assert converted.settings["DETR.TWO_STAGE"] is two_stage
    assert len(converted.dropped["second names of the heads"]) == 8 * (6 + two_stage)
    ours = converted.model["class_embed.5.weight"]
    assert torch.equal(ours, state["class_embed.5.weight"][COCO_IDS])
    if two_stage:  # the proposals' "any object" is row 0, which is no category of COCO
        assert torch.equal(converted.model["class_embed.6.bias"][0], state["class_embed.6.bias"][0])
        assert torch.equal(
            converted.model["class_embed.6.bias"][1:], state["class_embed.6.bias"][COCO_IDS[1:]]
        )


def test_detr_keeps_no_object_last():
    state = detr()
    converted = convert_checkpoint({"model": state})
    assert converted.kind == "detr"
    assert converted.settings["DETR.PRE_NORM"] is False
    head = converted.model["class_embed.weight"]
    assert head.shape == (81, 256)
    assert torch.equal(head, state["class_embed.weight"][[*COCO_IDS, 91]])


def test_up_detr_pretraining_fills_all_but_the_class_head(tmp_path, config_file, capsys):
    state = up_detr_pretraining()
    assert len(state) == 460 + 6
    torch.save({"model": state}, tmp_path / "up.pth")
    assert main(["convert", str(tmp_path / "up.pth"), str(tmp_path / "ours.pth")]) == 0
    printed = capsys.readouterr().out
    for name in ("patch2query.weight", "feature_align.layers.1.bias", "class_embed.weight"):
        assert name in printed
    model, lacks = load(config_file("detector/up_detr_r50.yaml"), tmp_path / "ours.pth")
    assert sorted(lacks) == ["class_embed.bias", "class_embed.weight"]
    assert torch.equal(model.query_embed.weight, state["query_embed.weight"])


@pytest.mark.parametrize("swav", [False, True])
def test_torchvision_backbones_are_taken(swav):
    state = resnet_state()
    if swav:
        del state["fc.weight"], state["fc.bias"]
        state["projection_head.0.weight"] = torch.zeros(2, 2)
        state["prototypes.weight"] = torch.zeros(2, 2)
        state = {f"module.{name}": tensor for name, tensor in state.items()}
    converted = convert_checkpoint(state)
    assert converted.kind == "backbone"
    assert len(converted.model) == 265
    assert len(converted.dropped["a classifier on the backbone"]) == 2
    found = converted.model["backbone.res3.0.shortcut.norm.running_var"]
    name = "layer2.0.downsample.1.running_var"
    assert torch.equal(found, state[f"module.{name}" if swav else name])
    assert "backbone.stem.conv1.norm.bias" in converted.model


def test_smaller_resnets_are_taken():
    converted = convert_checkpoint(torchvision.models.resnet18().state_dict())
    assert converted.settings["RESNETS.DEPTH"] == 18
    converted = convert_checkpoint(torchvision.models.resnet34().state_dict())
    assert converted.settings["RESNETS.DEPTH"] == 34


def test_weights_take_detectron2s_torchvision_file(tmp_path, config_file):
    """MODEL.WEIGHTS: detectron2://ImageNetPretrained/torchvision/R-50.pkl, in its format."""
    converted = convert_checkpoint(resnet_state())
    arrays = {
        name.removeprefix("backbone."): tensor.numpy() for name, tensor in converted.model.items()
    }
    file = tmp_path / "R-50.pkl"
    content = {"model": arrays, "__author__": "torchvision", "matching_heuristics": True}
    file.write_bytes(pickle.dumps(content))
    model, lacks = load(config_file("detector/deformable_detr_r50.yaml"), file)
    assert all(not name.startswith("backbone.") for name in lacks)
    for name, tensor in converted.model.items():
        assert torch.equal(model.state_dict()[name], tensor), name
    again = convert_checkpoint(content)
    assert again.model.keys() == converted.model.keys()


def test_missing_weights_are_an_error_that_names_them():
    state = deformable_detr()
    del state["transformer.encoder.layers.3.norm1.bias"]
    del state["bbox_embed.2.layers.1.weight"]
    with pytest.raises(InputError) as error:
        convert_checkpoint(state)
    assert "transformer.encoder.layers.3.norm1.bias is missing" in str(error.value)
    assert "bbox_embed.2.layers.1.weight is missing" in str(error.value)


def test_unknown_weights_are_reported():
    state = detr()
    state["mask_head.conv.weight"] = torch.zeros(1)
    converted = convert_checkpoint(state)
    assert converted.dropped == {"unknown to the detector": ["mask_head.conv.weight"]}


def test_head_that_fits_no_categories_is_an_error():
    state = deformable_detr()
    for name in [x for x in state if x.startswith("class_embed.")]:
        state[name] = state[name][:21]
    with pytest.raises(InputError, match="21 rows, which fits neither 80"):
        convert_checkpoint(state)


def test_rows_in_our_order_are_kept_and_a_subset_is_gathered():
    head = torch.arange(5.0)[:, None]
    assert torch.equal(gather_rows(head, [10, 20, 30, 40, 50], no_object=False), head)
    assert torch.equal(gather_rows(head, [1, 3], no_object=False), head[[1, 3]])
    assert torch.equal(gather_rows(head, [0, 3], no_object=True), head[[0, 3, 4]])


def test_categories_come_from_annotation_files(tmp_path):
    annotations = tmp_path / "instances.json"
    categories = [{"id": 7, "name": "train"}, {"id": 3, "name": "car", "supercategory": "x"}]
    annotations.write_text(json.dumps({"images": [], "categories": categories}))
    torch.save({"model": detr()}, tmp_path / "detr.pth")
    out = tmp_path / "ours.pth"
    command = ["convert", str(tmp_path / "detr.pth"), str(out), "--categories", str(annotations)]
    assert main(command) == 0
    content = torch.load(out)
    assert content["cldetr"]["categories"] == [{"id": 3, "name": "car"}, {"id": 7, "name": "train"}]
    assert content["model"]["class_embed.bias"].shape == (3,)


@pytest.mark.parametrize("kind", ["auto", "cl_detr"])
def test_a_checkpoint_of_all_categories_becomes_the_first_phase_by_seen(
    tmp_path, config_file, kind
):
    """The official 80-class file loses the rows of what is to come; the authors' keeps them."""
    state = deformable_detr()
    torch.save({"model": state}, tmp_path / "official.pth")
    scenario = make_scenario("70+10", Coco(), order="released")
    save_manifest(scenario, tmp_path / "manifest.json")
    out = tmp_path / "first.pth"
    command = ["convert", str(tmp_path / "official.pth"), str(out), "--kind", kind]
    assert main([*command, "--seen", str(tmp_path / "manifest.json")]) == 0
    about = torch.load(out)["cldetr"]
    first = scenario.phases[0].classes
    assert about["seen"] == [COCO[label][1] for label in first]
    assert len(about["categories"]) == (80 if kind == "cl_detr" else 70)

    detector = build_model(config_file("detector/deformable_detr_r50.yaml"))
    initial = detector.state_dict()["class_embed.0.weight"].clone()
    load_trained_detector(detector, str(out), scenario)
    found = detector.state_dict()["class_embed.0.weight"]
    official = state["class_embed.0.weight"][COCO_IDS]
    old, new = list(first), list(scenario.phases[1].classes)
    assert torch.equal(found[old], official[old])
    assert torch.equal(found[new], official[new] if kind == "cl_detr" else initial[new])
    with pytest.raises(InputError, match="--seen"):
        load_trained_detector(detector, str(out), make_scenario("70+10", Coco()))


def test_seen_takes_names_and_a_list_of_names(tmp_path):
    (tmp_path / "names.txt").write_text("cat\n\ndog\n")
    assert read_seen([str(tmp_path / "names.txt")], COCO) == ["cat", "dog"]
    assert read_seen(["traffic light", "dog"], COCO) == ["traffic light", "dog"]
    with pytest.raises(InputError, match="'cot'; did you mean cow or cat"):
        read_seen(["cot"], COCO)


class Coco(Labels):
    """A few images under COCO's categories."""

    def __init__(self):
        super().__init__(80, [[]] * 80)
        self.categories = tuple(Category(number, name) for number, name in COCO)


class Malice:
    def __reduce__(self):
        return (print, ("code ran",))


@pytest.mark.parametrize("suffix", ["pth", "pkl"])
def test_code_in_a_checkpoint_is_refused(tmp_path, capsys, suffix):
    source = tmp_path / f"bad.{suffix}"
    if suffix == "pth":
        torch.save({"model": Malice()}, source)
    else:
        source.write_bytes(pickle.dumps({"model": Malice()}))
    assert main(["convert", str(source), str(tmp_path / "out.pth")]) == 2
    captured = capsys.readouterr()
    assert "code ran" not in captured.out
    assert "cannot load" in captured.err
    assert not (tmp_path / "out.pth").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"a.weight": torch.zeros(2)}, "no kind that we know"),
        ({"epoch": 3}, "no weights"),
    ],
)
def test_files_of_no_known_kind_are_refused(content, message):
    with pytest.raises(InputError, match=message):
        convert_checkpoint(content)


def test_other_kind_than_said_is_refused():
    with pytest.raises(InputError, match="of kind detr, not deformable_detr"):
        convert_checkpoint(detr(), "deformable_detr")
