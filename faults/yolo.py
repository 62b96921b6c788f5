"""Mutated files of YOLO, each judged by an independent checker.

`judge` is a second, plain reading of the rules in datasets/README.md that shares no code with the
reader. For every mutated data set both must agree whether it is refused and, where it is not, on
every image, box, label and count. A refusal must be an `InputError` that names a file and a fix.
"""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import yaml
from PIL import Image

from cldetr.data.yolo import read_yolo
from cldetr.errors import InputError
from faults.coco import clip, differs
from faults.tally import Options, Tally
from faults.voc import NUMBER, told

IMAGES = ("a", "b", "c")
SIZE = (100, 80)
FOLDERS: tuple[Any, ...] = ("images", "./images", "images/", "../images", ["images"], ".", "./")
JUNK: tuple[Any, ...] = (
    *(None, True, False, 0, 1, 2, -1, 0.5, 2**70, "", " ", "cat", "Cat", "nowhere", "/etc/passwd"),
    *("http://a/b", "x\x00", "\ud800", [], {}, [1], [None], ["images", "images"], ["a", "b"]),
    *({"0": "a", "1": "b"}, {0: "a", 1: "b"}, {1: "a"}, {"x": "a"}, "a/../../b", ["cat", True]),
)
WORDS = (
    *("0", "1", "2", "-1", "0.5", "1.0", "1.005", "1.5", "-0.005", "-0.2", "nan", "inf", "1e400"),
    *(
        "0.25",
        "0.75",
        "1e-1",
        "x",
        "1_0",
        "٣",
        "0x1",
        "50",
        "+0.5",
        ".5",
        "5.",
        "0.0",
        "0.999999",
        "\u00a0",
        "#",
    ),
)


def run(options: Options) -> Tally:
    """Mutates a valid data set `count` times."""
    tally = Tally("yolo")
    rng = random.Random(options.seed)
    work = options.folder("files")
    (work / "images").mkdir()
    for name in IMAGES:
        Image.new("RGB", SIZE).save(work / "images" / f"{name}.png")
    outcomes: Counter[str] = Counter()
    for number in range(options.number(short=200, nightly=2000, long=50_000)):
        settings, labels = _mutated(rng)
        (work / "data.yaml").write_bytes(settings)
        (work / "labels").mkdir(exist_ok=True)
        for name in IMAGES:
            path = work / "labels" / f"{name}.txt"
            path.unlink(missing_ok=True)
            if name in labels:
                path.write_bytes(labels[name])
        drop = rng.random() < 0.5
        verdict, kept = judge(settings, labels, drop)
        outcomes[verdict] += 1
        wrong = _compare(work, drop, verdict, kept)
        tally.check(
            "mutated data sets: judged as the independent checker does, and told well",
            not wrong,
            f"{number} ({verdict}{', drop' if drop else ''}): {wrong}: {settings!r} {labels}",
        )
        if options.out_of_time:
            break
    tally.note("checker: " + ", ".join(f"{count} {what}" for what, count in outcomes.most_common()))
    return tally


def _mutated(rng: random.Random) -> tuple[bytes, dict[str, bytes]]:
    """A data.yaml and label files by image, with one to three changes."""
    names: Any = ["cat", "dog"] if rng.random() < 0.5 else {0: "cat", 1: "dog"}
    settings: Any = {"train": rng.choice(FOLDERS), "names": names}
    if rng.random() < 0.5:
        settings["nc"] = 2
    labels = {name: [_line(rng) for _ in range(rng.randint(0, 3))] for name in IMAGES}
    for _ in range(rng.randint(1, 3)):
        if rng.random() < 0.25 and isinstance(settings, dict):
            settings = _mutate_settings(settings, rng)
        else:
            _mutate_labels(labels, rng)
    text = yaml.safe_dump(settings) if rng.random() < 0.5 else json.dumps(settings)
    files = {name: "\n".join(map(" ".join, lines)).encode() for name, lines in labels.items()}
    content = text.encode("utf-8", "surrogatepass")
    if rng.random() < 0.1:
        content = _broken(content, rng)
    if files and rng.random() < 0.05:
        name = rng.choice(list(files))
        files[name] = _broken(files[name] or b"0", rng)
    return content, files


def _line(rng: random.Random) -> list[str]:
    label = str(rng.randint(0, 1))
    count = 4 if rng.random() < 0.7 else 2 * rng.randint(3, 5)
    return [label, *(f"{rng.uniform(0, 1):.6f}" for _ in range(count))]


def _mutate_settings(settings: dict[str, Any], rng: random.Random) -> Any:
    choice, key = rng.random(), rng.choice(["train", "names", "names", "nc", "path"])
    if choice < 0.05:
        return rng.choice(JUNK)
    if choice < 0.2:
        return {other: value for other, value in settings.items() if other != key}
    if choice < 0.5 and isinstance(settings.get("names"), list):
        names = list(settings["names"])
        names.insert(rng.randrange(len(names) + 1), rng.choice(JUNK))
        return settings | {"names": names}
    return settings | {key: rng.choice(JUNK)}


def _mutate_labels(labels: dict[str, list[list[str]]], rng: random.Random) -> None:
    if not labels:
        return
    name = rng.choice(list(labels))
    choice, lines = rng.random(), labels[name]
    if choice < 0.08:
        del labels[name]
    elif not lines or choice < 0.15:
        lines.append([rng.choice(WORDS) for _ in range(rng.randint(0, 8))])
    else:
        line = rng.choice(lines)
        index = rng.randrange(len(line)) if line else 0
        if choice < 0.25:
            line.insert(index, rng.choice(WORDS))
        elif choice < 0.35:
            del line[index : index + 1]
        else:
            line[index : index + 1] = [rng.choice(WORDS)]


def _broken(content: bytes, rng: random.Random) -> bytes:
    broken = bytearray(content)
    broken[rng.randrange(len(broken))] = rng.randrange(256)
    return bytes(broken[: rng.randint(len(broken) // 2, len(broken))])


def judge(settings: bytes, labels: dict[str, bytes], drop: bool) -> tuple[str, dict[str, Any]]:
    """Reads a data set by the rules alone: "refuse", or "use" with what is kept."""
    names = _names(settings)
    if names is None or not labels:
        return "refuse", {}
    kept: dict[int, Any] = {}
    counts = {"dropped_bad": 0, "dropped_empty": 0, "clipped": 0, "crowd": 0}
    number = 0
    for image, name in enumerate(IMAGES, start=1):
        try:
            text = labels.get(name, b"").decode("utf-8-sig")
        except UnicodeDecodeError:
            return "refuse", {}
        for line in text.replace("\r\n", "\n").replace("\r", "\n").split("\n"):
            words = line.split()
            if not words:
                continue
            read = _object([_number(word) for word in words], len(names))
            if read is None:
                return "refuse", {}
            label, box = read
            number += 1
            if box is None:
                if not drop:
                    return "refuse", {}
                counts["dropped_bad"] += 1
                continue
            corners, cut = clip(box, SIZE)
            if corners is None:
                counts["dropped_empty"] += 1
                continue
            counts["clipped"] += cut
            kept[number] = image, names[label], corners, False
    return "use", {"images": {1, 2, 3}, "objects": kept, **counts}


def _names(content: bytes) -> list[str] | None:
    """The class names of a data.yaml whose folder holds the images; None where it is refused."""
    try:
        settings = yaml.safe_load(content.decode("utf-8-sig"))
    except (yaml.YAMLError, ValueError, RecursionError):
        return None
    if not isinstance(settings, dict) or "kpt_shape" in settings:
        return None
    folders = settings.get("train")
    for folder in folders if isinstance(folders, list) else [folders]:
        if not isinstance(folder, str) or folder.strip() not in FOLDERS:
            return None
    path = settings.get("path")
    if not folders or not (path is None or (isinstance(path, str) and path.strip() in (".", "./"))):
        return None
    names = settings.get("names")
    if isinstance(names, dict):
        wanted = {str(index): index for index in range(len(names))}
        if {str(key) for key in names} != wanted.keys():
            return None
        names = [name for _, name in sorted(names.items(), key=lambda pair: wanted[str(pair[0])])]
    if not isinstance(names, list) or not names or settings.get("nc", len(names)) != len(names):
        return None
    if not all(
        isinstance(name, str | int | float) and not isinstance(name, bool) for name in names
    ):
        return None
    texts = [str(name).strip() for name in names]
    if any(not text or "\ud800" in text for text in texts):
        return None
    unique = {" ".join(text.split()).casefold() for text in texts}
    return texts if len(unique) == len(texts) else None


def _number(word: str) -> float:
    return float(word) if NUMBER.fullmatch(word) else math.nan


def _object(values: list[float], classes: int) -> tuple[int, list[float] | None] | None:
    """Class and box of a line; a box of None is malformed, no result means that it is refused."""
    label, rest = values[0], values[1:]
    if not (len(rest) == 4 or (len(rest) >= 6 and len(rest) % 2 == 0)):
        return None
    if label not in range(classes):
        return None
    is_box = len(rest) == 4
    for index, value in enumerate(rest):
        if is_box and index >= 2 and value < 0:
            continue
        if math.isfinite(value) and not -0.01 <= value <= 1.01:
            return None
    if not all(map(math.isfinite, rest)) or (is_box and min(rest[2:]) < 0):
        return int(label), None
    if is_box:
        left, right = rest[0] - rest[2] / 2, rest[0] + rest[2] / 2
        top, bottom = rest[1] - rest[3] / 2, rest[1] + rest[3] / 2
    else:
        left, right, top, bottom = min(rest[::2]), max(rest[::2]), min(rest[1::2]), max(rest[1::2])
    box = [left * SIZE[0], top * SIZE[1], (right - left) * SIZE[0], (bottom - top) * SIZE[1]]
    return int(label), box


def _compare(work: Path, drop: bool, verdict: str, kept: dict[str, Any]) -> str:
    """Reads a data set and says where the reader and the checker disagree."""
    try:
        data = read_yolo(f"{work}/data.yaml/train", bad_boxes="drop" if drop else "stop")
    except InputError as error:
        if verdict == "use":
            return f"refused: {error}"
        return told(str(error), str(work), r"labels/\w\.txt|data\.yaml")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return differs(data, kept) if verdict == "use" else "loaded"
