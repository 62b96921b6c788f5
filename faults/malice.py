"""Malicious inputs: nothing in them is executed, and no file outside of the data is opened.

Every payload would create a canary file. Weights files, YAML configs, overrides, pointer files and
descriptions of models are given to the functions that read them; annotation files name images
outside of their folder while a hook notes every file that is opened. A refusal must be an
`InputError`. What is code by design, a `.py` LazyConfig, is not tried: docs/reliability.md says so.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import pickle
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from detectron2.modeling import build_model
from PIL import Image

from cldetr.commands.convert import read_categories
from cldetr.config import config_from_text, load_config
from cldetr.data.coco import load_coco
from cldetr.data.mapper import read_image
from cldetr.data.memory import ExemplarMemory
from cldetr.data.scan import scan_images
from cldetr.engine.checkpoint import latest_checkpoint, load_state, save_checkpoint
from cldetr.engine.initial_weights import initialise
from cldetr.errors import InputError
from cldetr.files import sha256_file
from cldetr.lazy import lazy_part
from faults.tally import Options, Tally

LAZY = Path(__file__).with_name("tiny_lazy.py")


def run(options: Options) -> Tally:
    """Gives every payload to every reader."""
    tally = Tally("malice")
    work = options.folder("files")
    canary = work / "canary"
    for name, attempt in itertools.chain(
        _weights(work, canary),
        _configs(work, canary),
        _overrides(work, canary),
        _others(work, canary),
    ):
        _try(tally, name, attempt, canary)
    _paths(options, tally)
    return tally


def stock(options: Options) -> Tally:
    """The same weights files and configs against Detectron2's own readers."""
    from detectron2.checkpoint import DetectionCheckpointer
    from detectron2.config import CfgNode, get_cfg

    tally = Tally("malice, stock")
    work = options.folder("files")
    canary = work / "canary"
    for gadget, (suffix, dump) in itertools.product(_gadgets(canary), FORMATS.items()):
        path = work / f"evil{suffix}"
        path.write_bytes(dump({"model": gadget}))
        checkpointer = DetectionCheckpointer(torch.nn.Linear(2, 2))
        _try(tally, f"weights ({suffix})", lambda: checkpointer.load(str(path)), canary)  # noqa: B023
    for text in _yaml_texts(canary):
        path = work / "evil.yaml"
        path.write_text(text, encoding="utf-8")
        _try(tally, "YAML, as it is", lambda: get_cfg().merge_from_file(str(path)), canary)  # noqa: B023
        _try(
            *(tally, "YAML, allow_unsafe=True (its default in older versions)"),
            lambda: CfgNode.load_yaml_with_base(str(path), allow_unsafe=True),  # noqa: B023
            canary,
        )
    return tally


def _try(tally: Tally, name: str, attempt: Callable[[], Any], canary: Path) -> None:
    """Runs one attempt: refused by an `InputError` or without effect, and the canary not there."""
    said = ""
    try:
        attempt()
    except InputError:
        pass
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    executed = canary.exists()
    if executed:
        canary.unlink() if canary.is_file() else canary.rmdir()
    tally.check(f"{name}: not executed", not executed, "executed")
    tally.check(f"{name}: refused with a message, or without effect", not said, said)


class _Call:
    """Pickles as the call of a function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


def _gadgets(canary: Path) -> Iterator[Any]:
    """Objects that would create the canary when they are unpickled in the usual way."""
    path = str(canary)
    yield _Call(os.mkdir, path)
    yield _Call(os.system, f"touch {path}")
    yield _Call(eval, f"open({path!r}, 'w')")
    yield _Call(exec, f"open({path!r}, 'w')")
    yield _Call(open, path, "w")
    yield _Call(shutil.copy, __file__, path)
    yield _Call(Path.mkdir, canary)
    yield _Call(torch.load, path)
    yield _Call(pickle.loads, pickle.dumps(_Call(os.mkdir, path)))
    yield [{"deep": (_Call(os.mkdir, path),)}]


def _legacy(content: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer, _use_new_zipfile_serialization=False)
    return buffer.getvalue()


def _zipped(content: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


# How a file's name ends and what it holds.
FORMATS: dict[str, Callable[[Any], bytes]] = {
    ".zip.pth": _zipped,
    ".legacy.pth": _legacy,
    ".bare.pth": pickle.dumps,
    ".0.pkl": lambda content: pickle.dumps(content, protocol=0),
    ".2.pkl": lambda content: pickle.dumps(content, protocol=2),
    ".5.pkl": lambda content: pickle.dumps(content, protocol=5),
}


def _weights(work: Path, canary: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    for number, (gadget, (suffix, dump)) in enumerate(
        itertools.product(_gadgets(canary), FORMATS.items())
    ):
        path = work / f"evil{number}{suffix}"
        path.write_bytes(dump({"model": gadget}))
        yield "weights", lambda path=path: load_state(path)  # type: ignore[misc]
        yield (
            "weights as MODEL.WEIGHTS",
            lambda path=path: initialise(torch.nn.Linear(2, 2), str(path)),  # type: ignore[misc, arg-type]
        )
        folder = work / f"checkpoints{number}"
        save_checkpoint(folder, 10, {"model": {}})
        state = folder / "step_00000010/state.pth"
        state.write_bytes(path.read_bytes())
        text = f'{{"step": 10, "sha256": "{sha256_file(state)}"}}\n'
        (folder / "step_00000010/digest.json").write_text(text, encoding="utf-8")
        yield (
            "checkpoint with a valid digest",
            lambda folder=folder: latest_checkpoint(folder),  # type: ignore[misc]
        )
        (folder / "last_checkpoint").write_text(f"../evil{number}{suffix}", encoding="utf-8")
        yield "pointer file", lambda folder=folder: latest_checkpoint(folder)  # type: ignore[misc]


def _yaml_texts(canary: Path) -> list[str]:
    path = str(canary)
    return [
        f"OUTPUT_DIR: !!python/object/apply:os.mkdir ['{path}']",
        f"OUTPUT_DIR: !!python/object/apply:os.system ['touch {path}']",
        f"OUTPUT_DIR: !!python/object/new:os.system ['touch {path}']",
        f'SEED: !!python/object/apply:builtins.eval [\'open("{path}", "w")\']',
        f"SEED: !!python/object/apply:subprocess.check_output [['touch', '{path}']]",
        "SEED: !!python/name:os.system",
        "SEED: !!python/module:os",
        f"? !!python/object/apply:os.mkdir ['{path}']\n: 1",
        f"MODEL: {{DETR: {{NUM_QUERIES: !!python/object/apply:os.mkdir ['{path}']}}}}",
        f"- !!python/object/apply:os.mkdir ['{path}']",
    ]


def _configs(work: Path, canary: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    texts = _yaml_texts(canary)
    texts += ["", "- a\n- b", "just text", "SEED: [", "a: &a [*a]", "\x00", "_BASE_: evil.yaml"]
    texts += ["_BASE_: /etc/hostname", "_BASE_: [1]", "SEED: {x: 1}", "MODEL: 3", "1: 2"]
    for text in texts:
        path = work / "evil.yaml"

        def attempt(text: str = text, path: Path = path) -> None:
            path.write_text(text, encoding="utf-8")
            load_config(str(path))

        yield "YAML", attempt
        child = work / "child.yaml"

        def inherited(text: str = text, path: Path = path, child: Path = child) -> None:
            path.write_text(text, encoding="utf-8")
            child.write_text("_BASE_: evil.yaml\nSEED: 1", encoding="utf-8")
            load_config(str(child))

        yield "YAML through _BASE_", inherited
    plain = work / "plain.yaml"
    plain.write_text("SEED: 1", encoding="utf-8")
    for text in _yaml_texts(canary):
        value = text.partition(": ")[2]
        for key in ("SEED", "OUTPUT_DIR", "SOLVER.BASE_LR", "DATASETS.TRAIN"):
            yield (
                "YAML overrides",
                lambda key=key, value=value: load_config(str(plain), [key, value]),  # type: ignore[misc]
            )


TARGETS = (
    *("os.system", "os.mkdir", "builtins.eval", "builtins.exec", "subprocess.run"),
    *("cldetr.engine.sweep.subprocess.getoutput", "cldetr.engine.sweep.run_sweep"),
    *("detectron2.utils.collect_env.subprocess.check_output", "cldetr.files.os.mkdir"),
    *("torch.nn.modules.module.torch.load", "torch.nn.functional.torch.hub.load"),
    *("detectron2.modeling.backbone.resnet.np.load", "cldetr.modeling.detector.torch.load"),
    *("cldetr.layers.build.subprocess.run", "cldetr.data.shapes.shutil.rmtree"),
    *("detectron2.config.LazyConfig.load", "cldetr.lazy.read_lazy_config"),
    *("torch.nn.modules.module.weakref.sys.modules", "cldetr.nothing.at.all", "", "model"),
)


def _overrides(work: Path, canary: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    """`_target_` in every place where an override could put it, up to building the model."""
    evil = work / "evil_lazy.py"
    evil.write_text(f"import os\nos.mkdir({str(canary)!r})\nmodel = {{}}\n", encoding="utf-8")

    def build(text: str) -> None:
        build_model(load_config(str(LAZY), ["train.device=cpu", text]))

    def restore(part: str, content: dict[str, Any]) -> None:
        """What reads a weights file or config.yaml does with a part of a LazyConfig."""
        for word in reversed(part.split(".")):
            content = {word: content}
        text = json.dumps({"MODEL": {"META_ARCHITECTURE": "LazyModel"}, "LAZY": content})
        lazy_part(config_from_text(text, "evil"), part)

    for target in TARGETS:
        arguments = {"path": str(canary), "command": f"mkdir {canary}", "filename": str(evil)}
        for content in ({"_target_": target, **arguments}, {"_target_": target, "path": str(evil)}):
            payload = json.dumps(content)
            for text in (
                f"model.backbone={payload}",
                f"model={payload}",
                f"model.in_features=[{payload}]",
                f"model.criterion.matcher={payload}",
            ):
                yield "_target_ overrides", lambda text=text: build(text)  # type: ignore[misc]
            for part in ("model", "optimizer", "lr_multiplier", "dataloader.train"):
                yield (
                    "_target_ in a stored config",
                    lambda part=part, content=content: restore(part, content),  # type: ignore[misc]
                )
        for key in ("model", "model.backbone"):
            text = f"{key}._target_={target}"
            yield "_target_ overrides", lambda text=text: build(text)  # type: ignore[misc]
    for value in ("!!python/object/apply:os.mkdir [x]", "${oc.env:HOME}", "[", "{a: &a [*a]}"):
        yield "values of overrides", lambda value=value: build(f"train.seed={value}")  # type: ignore[misc]


def _others(work: Path, canary: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Pickles under the names of files that are JSON."""
    evil = work / "evil.json"
    evil.write_bytes(pickle.dumps(_Call(os.mkdir, str(canary))))
    yield "pickle as annotation file", lambda: load_coco(evil, work)
    yield "pickle as memory", lambda: ExemplarMemory.load(evil)
    yield "pickle as categories", lambda: read_categories([evil])


def _paths(options: Options, tally: Tally) -> None:
    """Images outside of the image folder, under every kind of name."""
    root = options.folder("root/images")
    outside = options.work / "root"
    image = Image.new("RGB", (8, 8))
    for place in (outside / "secret.png", root / "good.png", outside / "images2/x.png"):
        place.parent.mkdir(exist_ok=True)
        image.save(place)
    (root / "link.png").symlink_to("../secret.png")
    (root / "chain.png").symlink_to("link.png")
    (root / "folder").symlink_to("..")
    (root / "sibling").symlink_to("../images2")
    names = [
        *("../secret.png", "a/../../secret.png", "./../secret.png", "images/../../secret.png"),
        *(f"{outside}/secret.png", f"//{outside}/secret.png", f"file://{outside}/secret.png"),
        *("link.png", "chain.png", "folder/secret.png", "sibling/x.png", "folder/images/good.png"),
        *("..\\secret.png", "C:\\secret.png", "http://127.0.0.1:1/x.png", "~/secret.png"),
        *("%2e%2e/secret.png", "good.png\x00.png", "..", ".", "../images2/x.png", "|touch x"),
        *("detectron2://x.png", "catalog://x", "folder/../../secret.png"),
    ]
    opened = _watch()
    real = os.path.realpath(root)
    for name in names:
        file = options.work / "names.json"
        content = {
            "images": [{"id": 1, "file_name": name, "width": 8, "height": 8}],
            "annotations": [],
            "categories": [{"id": 1, "name": "thing"}],
        }
        file.write_text(json.dumps(content), encoding="utf-8")
        opened.clear()
        said = ""
        for step in (scan_images, lambda data: read_image(_entry(data), "RGB")):
            try:
                step(load_coco(file, root))
                said += "loaded "
            except InputError:
                pass
            except Exception as error:
                said += f"{type(error).__name__}: {error} "
        leaks = [
            path
            for path in opened
            if path.startswith(str(options.work)) and not path.startswith(real)
            if path != str(file)
        ]
        inside = (
            os.path.realpath(root / name) == f"{real}/good.png" if "\x00" not in name else False
        )
        tally.check(
            "paths in annotations: nothing outside is opened", not leaks, f"{name}: {leaks}"
        )
        tally.check("paths in annotations: refused", not said or inside, f"{name!r}: {said}")


def _entry(data: Any) -> dict[str, Any]:
    return {"file_name": str(data.image_path(0)), "width": 8, "height": 8}


def _watch() -> list[str]:
    """A list that receives the real path of every file that is opened from now on."""
    opened: list[str] = []

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str | bytes):
            opened.append(os.path.realpath(os.fsdecode(arguments[0])))

    sys.addaudithook(hook)
    return opened
