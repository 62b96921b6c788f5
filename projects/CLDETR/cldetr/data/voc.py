"""Pascal VOC: an XML file per image, read together with the lines that messages name.

`voc:DIR/SPLIT` reads the images listed in DIR/ImageSets/Main/SPLIT.txt, from DIR/Annotations and
DIR/JPEGImages. `voc:DIR` reads every XML file of DIR/Annotations, or of DIR itself, where
annotation tools put them beside the images.

Boxes are VOC's: pixels count from 1 and the last one belongs to the box, so that 1 to W is the
whole width. Objects marked difficult become crowd regions, which are no training targets and
neither hits nor misses in evaluation.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from xml.parsers import expat

from cldetr.data.coco import CocoData, data_from_columns
from cldetr.data.parse import (
    CocoAnnotation,
    CocoBox,
    CocoCategory,
    CocoFile,
    CocoImage,
    Columns,
)
from cldetr.data.problems import Problems
from cldetr.data.registered import image_ids
from cldetr.data.scan import is_image_name, read_size
from cldetr.errors import InputError

logger = logging.getLogger(__name__)

KINDS = {
    "no XML": ("annotation files are missing", "add them, or remove the lines from the list"),
    "bad XML": (
        "annotation files are not XML of Pascal VOC",
        "fix them at that line, or export them again",
    ),
    "listed twice": ("images are listed more than once", "remove the lines"),
    "bad name in list": (
        "lines of the list are not names of files without their ending",
        "write one name a line, without folders",
    ),
    "no element": ("elements are missing, empty or repeated", "write each of them once"),
    "bad size": (
        "sizes are not whole numbers of pixels",
        "write those of the image file, or remove the size to have it read from there",
    ),
    "bad difficult flag": ("difficult is neither 0 nor 1", "write 0 or 1"),
    "two spellings": (
        "category names differ in case or spaces alone",
        "spell a category in one way",
    ),
    "no image": (
        "image files are missing, unreadable or ambiguous",
        "put one file with the name of the XML file in the image folder",
    ),
}
_SIDES = ("xmin", "ymin", "xmax", "ymax")
_FLAGS = {"0": 0, "1": 1}


@dataclass
class Element:
    """An element of an XML file."""

    tag: str
    line: int
    texts: list[str] = field(default_factory=list)
    children: list[Element] = field(default_factory=list)

    def named(self, tag: str) -> list[Element]:
        """The children of a name."""
        return [child for child in self.children if child.tag == tag]

    @property
    def text(self) -> str:
        """The element's own text."""
        return "".join(self.texts).strip()


def read_voc(path: str, *, bad_boxes: str = "stop", trim: bool = True) -> CocoData:
    """Reads Pascal VOC annotations; all problems make one `InputError`.

    Args:
        path: DIR/SPLIT or DIR, see the module.
        bad_boxes: "stop" at boxes that are not four numbers in order, or "drop" and count them.
        trim: cut boxes to their image, as for training.
    """
    begun = time.perf_counter()
    problems = Problems(KINDS)
    reader = _Reader(_find(Path(path)), problems)
    stems = reader.stems()
    for image, stem in zip(image_ids(stems), stems, strict=True):
        reader.read(image, stem)
    return data_from_columns(
        reader.columns(),
        problems,
        name="_".join(Path(os.path.abspath(path)).parts[-2:]),
        origin=f"voc:{path}",
        image_root=reader.layout.images,
        begun=begun,
        bad_boxes=bad_boxes,
        trim=trim,
    )


@dataclass(frozen=True)
class _Layout:
    annotations: Path
    images: Path
    listing: Path | None  # the names to read; all XML files where there is none


def _find(path: Path) -> _Layout:
    """Where the files of `voc:path` are."""
    if path.is_dir():
        root, listing = path, None
    else:
        root, listing = path.parent, path.parent / "ImageSets" / "Main" / f"{path.name}.txt"
        if not listing.is_file():
            found = sorted(file.stem for file in listing.parent.glob("*.txt"))
            hint = f"choose one of {', '.join(found[:20])}" if found else "check the path"
            raise InputError(f"voc:{path}: there is no folder {path} and no file {listing}: {hint}")
    annotations = _folder(root, ("Annotations", "annotations"))
    images = _folder(root, ("JPEGImages", "images"))
    if annotations is None and listing is None:
        return _Layout(root, root, None)
    if annotations is None or images is None:
        missing = "JPEGImages" if annotations else "Annotations"
        raise InputError(f"voc:{path}: there is no folder {root / missing}: check the path")
    return _Layout(annotations, images, listing)


def _folder(root: Path, names: Sequence[str]) -> Path | None:
    return next((root / name for name in names if (root / name).is_dir()), None)


class _Reader:
    """Reads XML files one by one into the sections of a COCO file."""

    def __init__(self, layout: _Layout, problems: Problems) -> None:
        self.layout, self.problems = layout, problems
        self.image_files: dict[str, list[str]] = {}  # name without ending → files
        for entry in os.scandir(layout.images):
            if is_image_name(entry.name):
                self.image_files.setdefault(Path(entry.name).stem, []).append(entry.name)
        self.images: list[tuple[CocoImage, str]] = []  # and the XML file
        self.objects: list[tuple[str, int, CocoBox, int, int]] = []  # name, image, box, crowd, line
        self.unreadable: dict[int, str] = {}

    def stems(self) -> list[str]:
        """Names of the files to read, without their endings."""
        listing = self.layout.listing
        if listing is None:
            files = sorted(os.listdir(self.layout.annotations))
            stems = [file[:-4] for file in files if file.endswith(".xml") and file[0] != "."]
            if not stems:
                raise InputError(f"there is no XML file in {self.layout.annotations}: check it")
            unused = len(self.image_files.keys() - set(stems))
            if unused:
                logger.warning(
                    "%s: %d images have no XML file and are not used", self.layout.images, unused
                )
            return stems
        try:
            lines = listing.read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{listing} cannot be read as text ({error}): fix it") from None
        first: dict[str, int] = {}
        for number, line in enumerate(lines, start=1):
            # Lists of one category say 1, 0 or −1 after the name.
            words = line.rsplit(maxsplit=1)
            stem = (words[0] if len(words) == 2 and words[1] in ("1", "0", "-1") else line).strip()
            if not stem:
                continue
            where = f"{listing.name}:{number}: {stem[:60]!r}"
            if "/" in stem or "\\" in stem or not stem.isprintable():
                self.problems.add("bad name in list", where)
            elif stem in first:
                self.problems.add("listed twice", f"{where}, as in line {first[stem]}")
            else:
                first[stem] = number
        if not first:
            self.problems.stop(f"voc: {listing}")
            raise InputError(f"{listing} lists no image: write one name a line")
        return list(first)

    def read(self, image: int, stem: str) -> None:
        """Reads the XML file of an image."""
        file = f"{stem}.xml"
        try:
            with open(self.layout.annotations / file, "rb") as stream:
                root = parse_xml(stream.read())
        except FileNotFoundError:
            self.problems.add("no XML", file)
            return
        except (expat.ExpatError, ValueError, OSError) as error:
            self.problems.add("bad XML", f"{file}:{getattr(error, 'lineno', 1)}: {error}")
            return
        if root.tag != "annotation":
            self.problems.add("bad XML", f"{file}:{root.line}: <{root.tag}> is not <annotation>")
            return
        file_name = self._image_file(stem, root)
        width, height = self._size(root, file, file_name)
        if file_name and width:
            self.images.append((CocoImage(image, file_name, width, height), file))
            for element in root.named("object"):
                self._object(element, image, file)

    def _image_file(self, stem: str, root: Element) -> str | None:
        """The image with the name of the XML file, or else the one that this names."""
        files = self.image_files.get(stem, [])
        if len(files) != 1:
            stated = [os.path.basename(element.text) for element in root.named("filename")]
            files = [name for name in stated if name in self.image_files.get(Path(name).stem, [])]
        if len(files) == 1:
            return files[0]
        self.problems.add("no image", f"of {stem}.xml in {self.layout.images}")
        return None

    def _size(self, root: Element, file: str, file_name: str | None) -> tuple[int, int]:
        """Width and height; from the image where the XML file has none or 0; 0 if unknown."""
        sides = []
        for tag in ("width", "height"):
            found = [side for size in root.named("size") for side in size.named(tag)]
            for number, side in enumerate(found):
                if number or not parse_number(side.text).is_integer() or side.text.startswith("-"):
                    where = f"{file}:{side.line}: {tag} is {side.text[:40]!r}"
                    self.problems.add("bad size", where + " the second time" * bool(number))
                    return 0, 0
            sides.append(int(parse_number(found[0].text)) if found else 0)
        if all(sides) or file_name is None:
            return sides[0], sides[1]
        size = read_size(self.layout.images / file_name)
        if isinstance(size, str):
            self.problems.add("no image", f"{self.layout.images / file_name}: {size}")
            return 0, 0
        return size

    def _object(self, element: Element, image: int, file: str) -> None:
        name = self._only(element, "name", file)
        box = self._only(element, "bndbox", file)
        if name is None or box is None:
            return
        if not name.text:
            self.problems.add("no element", f"{file}:{name.line}: name")
            return
        sides = [self._only(box, tag, file) for tag in _SIDES]
        if any(side is None for side in sides):
            return
        texts = [side.text for side in sides if side is not None]
        x0, y0, x1, y1 = map(parse_number, texts)
        flags = element.named("difficult")
        crowd = _FLAGS.get(flags[0].text) if flags else 0
        if crowd is None or len(flags) > 1:
            self.problems.add("bad difficult flag", f"{file}:{flags[-1].line}")
            return
        if not math.isfinite(x0 + y0 + x1 + y1):
            pairs = zip(_SIDES, texts, strict=True)
            self.unreadable[len(self.objects)] = ", ".join(f"{s} {t[:20]!r}" for s, t in pairs)
        coco_box = CocoBox(x0 - 1, y0 - 1, x1 - x0 + 1, y1 - y0 + 1)
        self.objects.append((name.text, image, coco_box, crowd, box.line))

    def _only(self, element: Element, tag: str, file: str) -> Element | None:
        found = element.named(tag)
        if len(found) == 1:
            return found[0]
        how = "twice" if found else "missing"
        self.problems.add("no element", f"{file}:{element.line}: {tag} is {how}")
        return None

    def columns(self) -> Columns:
        """What was read. Categories are sorted by name: VOC's own order."""
        names = sorted({name for name, *_ in self.objects})
        check_spellings(names, self.problems)
        if not self.images:
            self.problems.add("empty list", "images")
        elif not names:
            self.problems.add("empty list", "categories (no image has an object)")
        ids = {name: number for number, name in enumerate(names, start=1)}
        file = CocoFile(
            [image for image, _ in self.images],
            [
                CocoAnnotation(n, image, ids[name], box, iscrowd=crowd)
                for n, (name, image, box, crowd, _) in enumerate(self.objects, start=1)
            ],
            [CocoCategory(number, name) for name, number in ids.items()],
        )
        files: Mapping[int, str] = {image.id: file for image, file in self.images}
        return Columns(
            file,
            self.unreadable,
            lambda row: self.images[row][1],
            lambda row: f"{files[self.objects[row][1]]}:{self.objects[row][4]}",
        )


def check_spellings(names: Sequence[str], problems: Problems) -> None:
    """Reports categories that a typing error has made two of."""
    known: dict[str, str] = {}
    for name in names:
        other = known.setdefault(" ".join(name.split()).casefold(), name)
        if other != name:
            problems.add("two spellings", f"{other!r} and {name!r}")


def parse_number(text: str) -> float:
    """A number as people write it; NaN for any other text."""
    try:
        return float(text) if text.isascii() and "_" not in text else math.nan
    except ValueError:
        return math.nan


def parse_xml(content: bytes) -> Element:
    """Parses XML into elements with their lines.

    A document type is refused: it is where entities are declared that expand to gigabytes or to
    the content of other files, and VOC has none.
    """
    parser = expat.ParserCreate()
    parser.buffer_text = True
    top = Element("", 0)
    stack = [top]

    def start(tag: str, attributes: Mapping[str, str]) -> None:
        element = Element(tag, parser.CurrentLineNumber)
        stack[-1].children.append(element)
        stack.append(element)

    def refuse(*_: object) -> None:
        raise ValueError("it declares a document type (DOCTYPE), which is not read")

    parser.StartElementHandler = start
    parser.EndElementHandler = lambda tag: stack.pop()
    parser.CharacterDataHandler = lambda text: stack[-1].texts.append(text)
    parser.StartDoctypeDeclHandler = refuse
    parser.Parse(content, True)
    return top.children[0]
