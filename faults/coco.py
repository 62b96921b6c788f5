"""Mutated annotation files, each judged by an independent checker.

`judge` is a second, slow and plain reading of the rules in docs/reliability.md, on Python's own
`json`: it shares no code with the loader. For every mutated file both must agree whether it is
refused and, where it is not, on every image, box, label and count. A refusal must be an
`InputError` that names the file, a bad entry and a fix.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

from cldetr.data.coco import CocoData, load_coco
from cldetr.errors import InputError
from faults.tally import Options, Tally

JUNK: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 7, 640.0, 0.5, -3.5, 1e308, math.nan, math.inf, -math.inf),
    *(2**31, 2**63, 10**400, "", " ", "7", "cat", "a/../../b.jpg", "/etc/passwd", "http://a/b.jpg"),
    *("C:\\x.jpg", "x\x00.jpg", "a\nb.jpg", "ü.jpg", "\ud800", [], {}, [1], [0, 0, 5, 5]),
    *([math.nan, 0, 5, 5], [1, 2, 3], ["1", 2, 3, 4], [-5, -5, 20, 20], [99, 79, 50, 50]),
    *([200, 200, 5, 5], [0, 0, 0, 5], [0, 0, -1, 5], {"id": 1}, [None], "x" * 300),
)


def run(options: Options) -> Tally:
    """Mutates a valid file `count` times."""
    tally = Tally("annotations")
    rng = random.Random(options.seed)
    work = options.folder("files")
    path = work / "annotations.json"
    outcomes: Counter[str] = Counter()
    for number in range(options.number(short=300, nightly=5000, long=50_000)):
        text = _mutated(rng)
        path.write_bytes(text)
        drop = rng.random() < 0.5
        verdict, kept = judge(text, drop)
        outcomes[verdict] += 1
        wrong = _compare(path, drop, verdict, kept)
        tally.check(
            "mutated files: judged as the independent checker does, and told well",
            not wrong,
            f"{number} ({verdict}{', drop' if drop else ''}): {wrong}: {text[:400]!r}",
        )
        if options.out_of_time:
            break
    tally.note("checker: " + ", ".join(f"{count} {what}" for what, count in outcomes.most_common()))
    return tally


def stock(options: Options) -> Tally:
    """What Detectron2's `load_coco_json` does with files that must be refused."""
    from detectron2.data.datasets import load_coco_json

    tally = Tally("annotations, stock")
    rng = random.Random(options.seed)
    path = options.folder("files") / "annotations.json"
    outcomes: Counter[str] = Counter()
    while sum(outcomes.values()) < options.number(100, 2000, 5000):
        text = _mutated(rng)
        if judge(text, False)[0] != "refuse":
            continue
        path.write_bytes(text)
        try:
            with contextlib.redirect_stdout(None):
                load_coco_json(str(path), str(path.parent), f"stock{rng.random()}")
            outcomes["loaded silently"] += 1
        except Exception as error:
            outcomes[f"raised {type(error).__name__}"] += 1
    tally.note(", ".join(f"{count} {what}" for what, count in outcomes.most_common()))
    return tally


def _valid(rng: random.Random) -> dict[str, Any]:
    images, categories = rng.randint(1, 4), rng.randint(1, 4)
    return {
        "images": [
            {"id": i + 1, "file_name": f"{i}.jpg", "width": 100, "height": 80}
            for i in range(images)
        ],
        "annotations": [
            {
                "id": n + 1,
                "image_id": rng.randint(1, images),
                "category_id": rng.randint(1, categories),
                "bbox": [rng.randint(0, 70), rng.randint(0, 50), rng.randint(1, 29), 20.25],
                "area": 33.5,
                "iscrowd": int(rng.random() < 0.2),
            }
            for n in range(rng.randint(0, 5))
        ],
        "categories": [{"id": i + 1, "name": f"class {i}"} for i in range(categories)],
    }


def _mutated(rng: random.Random) -> bytes:
    """A valid file with one to three changes; sometimes its bytes are broken as well."""
    content: Any = _valid(rng)
    for _ in range(rng.randint(1, 3)):
        content = _mutate(content, rng)
    text = json.dumps(content).encode("utf-8", "surrogatepass")
    if rng.random() < 0.1:
        broken = bytearray(text)
        for _ in range(rng.randint(1, 2)):
            broken[rng.randrange(len(broken))] = rng.randrange(256)
        text = bytes(broken[: rng.randint(len(broken) // 2, len(broken))])
    return text


def _mutate(content: Any, rng: random.Random) -> Any:
    content = copy.deepcopy(content)
    if not isinstance(content, dict) or rng.random() < 0.02:
        return rng.choice(JUNK)
    section = rng.choice(["images", "annotations", "annotations", "categories"])
    entries = content.get(section)
    if rng.random() < 0.04 or not isinstance(entries, list):
        if rng.random() < 0.5:
            content.pop(section, None)
        else:
            content[section] = rng.choice(JUNK)
        return content
    if not entries or rng.random() < 0.05:
        entries.append(rng.choice(JUNK))
        return content
    place = rng.randrange(len(entries))
    entry = entries[place]
    choice = rng.random()
    if choice < 0.08:
        entries.append(copy.deepcopy(entry))
    elif choice < 0.14:
        del entries[place]
    elif not isinstance(entry, dict) or choice < 0.17:
        entries[place] = rng.choice(JUNK)
    else:
        keys = [*entry, "ignore", "iscrowd", "extra"]
        key = rng.choice(keys)
        if choice < 0.3:
            entry.pop(key, None)
        elif key == "bbox" and isinstance(entry.get(key), list) and entry[key] and choice < 0.6:
            entry[key][rng.randrange(len(entry[key]))] = rng.choice(JUNK)
        else:
            entry[key] = rng.choice(JUNK)
    return content


def judge(text: bytes, drop: bool) -> tuple[str, dict[str, Any]]:
    """Reads a file by the rules alone: "refuse", or "use" with what is kept."""
    try:
        content = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError):
        return "refuse", {}
    if not isinstance(content, dict):
        return "refuse", {}
    sections = [content.get(name) for name in ("images", "annotations", "categories")]
    if not all(isinstance(section, list) for section in sections):
        return "refuse", {}
    images, annotations, categories = (list(section or []) for section in sections)
    if not images or not categories:
        return "refuse", {}
    if not all(isinstance(entry, dict) for entry in (*images, *annotations, *categories)):
        return "refuse", {}
    names = {}
    for entry in categories:
        number, name = _whole_number(entry.get("id")), entry.get("name")
        if number is None or number in names or not _is_text(name) or not name.strip():
            return "refuse", {}
        names[number] = name
    if len(set(names.values())) < len(names):
        return "refuse", {}
    sizes: dict[int, tuple[int, int]] = {}
    for entry in images:
        number = _whole_number(entry.get("id"))
        width, height = _whole_number(entry.get("width")), _whole_number(entry.get("height"))
        name = entry.get("file_name")
        if number is None or number in sizes or not _is_text(name) or not _stays_inside(name):
            return "refuse", {}
        if width is None or height is None:
            return "refuse", {}
        if not (0 < width <= 65536 and 0 < height <= 65536):
            return "refuse", {}
        sizes[number] = width, height
    kept, seen = {}, set()
    counts = {"dropped_bad": 0, "dropped_empty": 0, "clipped": 0, "crowd": 0}
    for entry in annotations:
        number = _whole_number(entry.get("id"))
        image, category = (
            _whole_number(entry.get("image_id")),
            _whole_number(entry.get("category_id")),
        )
        if number is None or number in seen or image not in sizes or category not in names:
            return "refuse", {}
        seen.add(number)
        crowd = _flag(entry.get("iscrowd", 0))
        if crowd not in (0, 1) or _flag(entry.get("ignore", 0)) != 0:
            return "refuse", {}
        area = entry.get("area")
        if area is not None and not (_is_number(area) and _finite(area) and area >= 0):
            return "refuse", {}
        box = entry.get("bbox")
        fine = isinstance(box, list) and len(box) == 4 and all(map(_is_number, box))
        if not fine or not all(map(_finite, box)) or box[2] < 0 or box[3] < 0:
            if not drop:
                return "refuse", {}
            counts["dropped_bad"] += 1
            continue
        corners, cut = clip(box, sizes[image])
        if corners is None:
            counts["dropped_empty"] += 1
            continue
        counts["clipped"] += cut
        counts["crowd"] += crowd
        kept[number] = image, names[category], corners, bool(crowd)
    return "use", {"images": set(sizes), "objects": kept, **counts}


def clip(box: list[float], size: tuple[int, int]) -> tuple[list[float] | None, bool]:
    """The box within its image, or None where nothing of it is; and whether it was cut."""
    x, y, w, h = map(float, box)
    if w == 0 or h == 0:
        return None, False
    left, top = min(max(x, 0.0), size[0]), min(max(y, 0.0), size[1])
    right, bottom = min(max(x + w, 0.0), size[0]), min(max(y + h, 0.0), size[1])
    if right <= left or bottom <= top:
        return None, False
    over = x < -1e-3 or y < -1e-3 or x + w > size[0] + 1e-3 or y + h > size[1] + 1e-3
    return ([left, top, right - left, bottom - top] if over else [x, y, w, h]), over


def _whole_number(value: Any) -> int | None:
    """A 64-bit integer, also written as 640.0."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if isinstance(value, float) and (not math.isfinite(value) or value != int(value)):
        return None
    number = int(value)
    return number if -(2**63) <= number < 2**63 else None


def _flag(value: Any) -> int | None:
    return int(value) if isinstance(value, bool) else _whole_number(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _finite(value: float) -> bool:
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False


def _is_text(value: Any) -> bool:
    if not isinstance(value, str):
        return False
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:  # half a surrogate pair
        return False
    return True


def _stays_inside(name: str) -> bool:
    """Whether a file name is a plain relative path."""
    if not name.strip() or name.startswith("/") or name.endswith("/") or "\\" in name:
        return False
    if "://" in name or (len(name) > 1 and name[1] == ":" and name[0].isalpha()):
        return False
    if any(ord(letter) < 32 for letter in name):
        return False
    return ".." not in name.split("/")


def _compare(path: Path, drop: bool, verdict: str, kept: dict[str, Any]) -> str:
    """Loads a file and says where the loader and the checker disagree."""
    try:
        data = load_coco(path, path.parent, bad_boxes="drop" if drop else "stop")
    except InputError as error:
        if verdict != "refuse":
            return f"refused: {error}"
        return _badly_told(str(error), path)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if verdict != "use":
        return "loaded"
    return differs(data, kept)


def _badly_told(message: str, path: Path) -> str:
    if str(path) not in message:
        return f"the message does not name the file: {message}"
    whole_file = re.search(
        r"not valid JSON|cannot be read as JSON|not UTF-8|is not a COCO", message
    )
    if whole_file or "is empty" in message or "holds" in message or "byte order" in message:
        return ""
    if "Fix: " not in message:
        return f"the message has no fix: {message}"
    if not re.search(
        r"(image|annotation|category|images\[|annotations\[|categories\[|\d)", message
    ):
        return f"the message names no entry: {message}"
    return ""


def differs(data: CocoData, kept: dict[str, Any]) -> str:
    """Says where loaded data are not what a checker kept; nothing where they are."""
    if set(data.image_ids.tolist()) != kept["images"]:
        return "other images"
    report = data.report
    assert report is not None
    for key in ("dropped_bad", "dropped_empty", "clipped", "crowd"):
        if getattr(report, key) != kept[key]:
            return f"{key} is {getattr(report, key)}, not {kept[key]}"
    found = {}
    for image, first, last in zip(
        data.image_ids.tolist(), data.starts[:-1].tolist(), data.starts[1:].tolist(), strict=True
    ):
        for row in range(first, last):
            name = data.categories[data.labels[row]].name
            box = data.boxes[row].tolist()
            found[int(data.object_ids[row])] = image, name, box, bool(data.crowd[row])
    if found.keys() != kept["objects"].keys():
        return f"objects {sorted(found)} instead of {sorted(kept['objects'])}"
    for number, (image, name, box, crowd) in kept["objects"].items():
        there = found[number]
        if (image, name, crowd) != (there[0], there[1], there[3]) or not all(
            math.isclose(a, b, abs_tol=1e-9) for a, b in zip(box, there[2], strict=True)
        ):
            return f"object {number} is {there}, not {(image, name, box, crowd)}"
    return ""
