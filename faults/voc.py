"""Mutated files of Pascal VOC, each judged by an independent checker.

`judge` is a second, plain reading of the rules in datasets/README.md, on Python's own minidom: it
shares no code with the reader. For every mutated data set both must agree whether it is refused
and, where it is not, on every image, box, label and count. A refusal must be an `InputError` that
names a file and a fix.
"""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any
from xml.dom import minidom
from xml.parsers.expat import ExpatError

from PIL import Image

from cldetr.data.voc import read_voc
from cldetr.errors import InputError
from faults.coco import clip, differs
from faults.tally import Options, Tally

STEMS = ("000005", "000012", "000100")
SIZE = (100, 80)
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
JUNK = (
    *("", " ", "x", "nan", "inf", "-5", "-0", "0", "1", "2", "50", "79", "101", "200", "9999999"),
    *("1e400", "1e2", "1_0", "٣", "0x10", "5 6", "5.5", "+7", "<b/>5", "5<!-- -->6", "a<b>c</b>"),
    *("cat", "Cat", " dog ", "&amp;", "&lt;", "ü", "&#10;", "<![CDATA[cat]]>", "&cat;"),
)
LINES = (
    *("", "000005", "000005 1", "000012  -1", "000100 0", "000007", "../000005", "000005.xml"),
    *("0000\x0105", "000005 2", "\ufeff000005"),
)
TAGS = (
    *("xmin", "ymin", "xmax", "ymax", "name", "difficult", "width", "height"),
    *("size", "object", "bndbox", "annotation", "part"),
)


def run(options: Options) -> Tally:
    """Mutates a valid data set `count` times."""
    tally = Tally("voc")
    rng = random.Random(options.seed)
    work = options.folder("files")
    for folder in ("Annotations", "JPEGImages", "ImageSets/Main"):
        (work / folder).mkdir(parents=True)
    for stem in STEMS:
        Image.new("RGB", SIZE).save(work / "JPEGImages" / f"{stem}.jpg")
    outcomes: Counter[str] = Counter()
    for number in range(options.number(short=200, nightly=2000, long=50_000)):
        files, listing = _mutated(rng)
        for stem, content in files.items():
            (work / "Annotations" / f"{stem}.xml").write_bytes(content)
        (work / "ImageSets/Main/some.txt").write_bytes(listing)
        drop = rng.random() < 0.5
        verdict, kept = judge(files, listing, drop)
        outcomes[verdict] += 1
        wrong = _compare(work, drop, verdict, kept)
        tally.check(
            "mutated data sets: judged as the independent checker does, and told well",
            not wrong,
            f"{number} ({verdict}{', drop' if drop else ''}): {wrong}: {listing!r} {files}",
        )
        if options.out_of_time:
            break
    tally.note("checker: " + ", ".join(f"{count} {what}" for what, count in outcomes.most_common()))
    return tally


def _mutated(rng: random.Random) -> tuple[dict[str, bytes], bytes]:
    """The files of a data set and its list, with one to three changes."""
    texts = {stem: _valid(rng) for stem in STEMS}
    lines = list(STEMS)
    for _ in range(rng.randint(1, 3)):
        if rng.random() < 0.1:
            lines.insert(rng.randrange(4), rng.choice(LINES))
            continue
        stem = rng.choice(STEMS)
        texts[stem] = _mutate(texts[stem], rng)
    files = {stem: text.encode("utf-8") for stem, text in texts.items()}
    if rng.random() < 0.1:
        stem = rng.choice(STEMS)
        broken = bytearray(files[stem])
        for _ in range(rng.randint(1, 2)):
            broken[rng.randrange(len(broken))] = rng.randrange(256)
        files[stem] = bytes(broken[: rng.randint(len(broken) // 2, len(broken))])
    return files, "\n".join(lines).encode()


def _valid(rng: random.Random) -> str:
    lines = ["<annotation>", "<filename>x.jpg</filename>", "<size>"]
    lines += [f"<width>{SIZE[0]}</width>", f"<height>{SIZE[1]}</height>", "</size>"]
    for _ in range(rng.randint(0, 3)):
        x, y = rng.randint(1, 60), rng.randint(1, 50)
        sides = (x, y, x + rng.randint(0, 39), y + rng.randint(0, 29))
        lines += ["<object>", f"<name>{rng.choice(['cat', 'dog'])}</name>"]
        lines += [f"<difficult>{int(rng.random() < 0.2)}</difficult>"] * (rng.random() < 0.7)
        lines += ["<bndbox>"]
        lines += [f"<{tag}>{side}</{tag}>" for tag, side in zip(TAGS[:4], sides, strict=True)]
        lines += ["</bndbox>", "</object>"]
    return "\n".join([*lines, "</annotation>"])


def _mutate(text: str, rng: random.Random) -> str:
    choice = rng.random()
    if choice < 0.05:
        return "<!DOCTYPE a [<!ENTITY cat 'cat'>]>" + text
    leaves = list(re.finditer(r"<(\w+)>([^<]*)</\1>\n?", text))
    if not leaves or choice < 0.15:
        tag, other = rng.choice(TAGS), rng.choice(TAGS)
        return text.replace(f"{tag}>", f"{other}>", rng.choice([1, 2, -1]))
    leaf = rng.choice(leaves)
    before, after = text[: leaf.start()], text[leaf.end() :]
    if choice < 0.25:
        return before + after
    if choice < 0.35:
        return before + leaf[0] * 2 + after
    return f"{before}<{leaf[1]}>{rng.choice(JUNK)}</{leaf[1]}>\n{after}"


def judge(files: dict[str, bytes], listing: bytes, drop: bool) -> tuple[str, dict[str, Any]]:
    """Reads a data set by the rules alone: "refuse", or "use" with what is kept."""
    stems = []
    for line in listing.decode("utf-8-sig").split("\n"):
        stem = re.sub(r"\s+(1|0|-1)$", "", line.strip()) if line.strip() else ""
        if stem:
            stems.append(stem)
    if len(set(stems)) < len(stems) or not set(stems) <= set(files):
        return "refuse", {}
    kept: dict[int, Any] = {}
    names: set[str] = set()
    counts = {"dropped_bad": 0, "dropped_empty": 0, "clipped": 0, "crowd": 0}
    number = 0
    for stem in stems:
        read = _read_one(files[stem])
        if read is None:
            return "refuse", {}
        size, objects = read
        for name, texts, difficult in objects:
            number += 1
            names.add(name)
            sides = [float(text) if NUMBER.fullmatch(text) else math.nan for text in texts]
            box = [sides[0] - 1, sides[1] - 1, sides[2] - sides[0] + 1, sides[3] - sides[1] + 1]
            if not all(map(math.isfinite, box)) or box[2] < 0 or box[3] < 0:
                if not drop:
                    return "refuse", {}
                counts["dropped_bad"] += 1
                continue
            corners, cut = clip(box, size)
            if corners is None:
                counts["dropped_empty"] += 1
                continue
            counts["clipped"] += cut
            counts["crowd"] += difficult
            kept[number] = int(stem), name, corners, bool(difficult)
    if not names or len({" ".join(name.split()).casefold() for name in names}) < len(names):
        return "refuse", {}
    return "use", {"images": set(map(int, stems)), "objects": kept, **counts}


def _read_one(content: bytes) -> tuple[tuple[int, int], list[tuple[str, list[str], int]]] | None:
    """Size and objects of an XML file, or None where a rule is broken."""
    try:
        document = minidom.parseString(content)
    except (ExpatError, ValueError, LookupError):
        return None
    root = document.documentElement
    if root is None or document.doctype is not None or root.tagName != "annotation":
        return None
    size = []
    for tag, true in zip(("width", "height"), SIZE, strict=True):
        found = [side for one in _children(root, "size") for side in _children(one, tag)]
        if len(found) > 1:
            return None
        text = _text(found[0]) if found else "0"
        if not NUMBER.fullmatch(text) or text.startswith("-") or not float(text).is_integer():
            return None
        size.append((int(float(text)), true))
    stated = tuple(side for side, _ in size)
    if not all(stated):
        stated = SIZE
    if max(stated) > 65536:
        return None
    objects = []
    for element in _children(root, "object"):
        name, box, flags = (_children(element, tag) for tag in ("name", "bndbox", "difficult"))
        if len(name) != 1 or len(box) != 1 or len(flags) > 1 or not _text(name[0]):
            return None
        sides = [_children(box[0], tag) for tag in TAGS[:4]]
        if any(len(side) != 1 for side in sides):
            return None
        flag = _text(flags[0]) if flags else "0"
        if flag not in ("0", "1"):
            return None
        objects.append((_text(name[0]), [_text(side[0]) for side in sides], int(flag)))
    return (stated[0], stated[1]), objects


def _children(element: Any, tag: str) -> list[Any]:
    return [
        child
        for child in element.childNodes
        if child.nodeType == child.ELEMENT_NODE and child.tagName == tag
    ]


def _text(element: Any) -> str:
    nodes = element.childNodes
    if any(node.nodeType == node.ELEMENT_NODE for node in nodes):
        return ""
    texts = (node.data for node in nodes if node.nodeType in (node.TEXT_NODE, 4))  # 4: CDATA
    return "".join(texts).strip()


def _compare(work: Path, drop: bool, verdict: str, kept: dict[str, Any]) -> str:
    """Reads a data set and says where the reader and the checker disagree."""
    try:
        data = read_voc(f"{work}/some", bad_boxes="drop" if drop else "stop")
    except InputError as error:
        if verdict == "use":
            return f"refused: {error}"
        return told(str(error), str(work), r"\d+\.xml|some\.txt:\d|categories|spell")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return differs(data, kept) if verdict == "use" else "loaded"


def told(message: str, path: str, entry: str) -> str:
    """Says what a message lacks: the path, an entry of the pattern or a fix."""
    if path not in message:
        return f"the message does not name the path: {message}"
    if not re.search(entry, message):
        return f"the message names no entry: {message}"
    return "" if re.search(r"Fix: |: \w+", message) else f"the message has no fix: {message}"
