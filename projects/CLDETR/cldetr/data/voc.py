"""Pascal VOC: an XML file per image.

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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree
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
    "unknown name": (
        "category names are not among those of the data set",
        "correct them, or register the data set with all names",
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


@dataclass(frozen=True)
class _XmlFile:
    """A parsed file, which can tell the lines of its elements."""

    name: str
    content: bytes
    root: ElementTree.Element

    def where(self, element: ElementTree.Element) -> str:
        """File and line of an element, for messages: parses the file again."""
        index = next(i for i, other in enumerate(self.root.iter()) if other is element)
        return f"{self.name}:{element_lines(self.content)[index]}"


def read_voc(
    path: str,
    *,
    bad_boxes: str = "stop",
    trim: bool = True,
    name: str = "",
    categories: Sequence[str] = (),
) -> CocoData:
    """Reads Pascal VOC annotations; all problems make one `InputError`.

    Args:
        path: DIR/SPLIT or DIR, see the module.
        bad_boxes: "stop" at boxes that are not four numbers in order, or "drop" and count them.
        trim: cut boxes to their image, as for training.
        name: of the data set; the last two parts of the path by default.
        categories: their names in order; by default those that occur, in alphabetical order.
    """
    begun = time.perf_counter()
    problems = Problems(KINDS)
    reader = _Reader(_find(Path(path)), problems)
    stems = reader.stems()
    for image, stem in zip(image_ids(stems), stems, strict=True):
        reader.read(image, stem)
    return data_from_columns(
        reader.columns(categories),
        problems,
        name=name or "_".join(Path(os.path.abspath(path)).parts[-2:]),
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
        # Name, box, crowd, index of the image, and index among the objects of its XML file.
        self.objects: list[tuple[str, CocoBox, int, int, int]] = []
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
            lines = listing.read_text(encoding="utf-8-sig").split("\n")
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
        try:
            xml = self._parse(f"{stem}.xml")
        except FileNotFoundError:
            self.problems.add("no XML", f"{stem}.xml")
            return
        except ElementTree.ParseError as error:
            self.problems.add("bad XML", f"{stem}.xml:{error.position[0]}: {error}")
            return
        except (expat.ExpatError, ValueError, OSError) as error:
            self.problems.add("bad XML", f"{stem}.xml:{getattr(error, 'lineno', 1)}: {error}")
            return
        if xml.root.tag != "annotation":
            where = xml.where(xml.root)
            self.problems.add("bad XML", f"{where}: <{xml.root.tag}> is not <annotation>")
            return
        file_name = self._image_file(stem, xml.root)
        width, height = self._size(xml, file_name)
        if file_name and width:
            self.images.append((CocoImage(image, file_name, width, height), xml.name))
            for index, element in enumerate(xml.root.findall("object")):
                self._object(xml, element, (len(self.images) - 1, index))

    def _parse(self, name: str) -> _XmlFile:
        with open(os.path.join(self.layout.annotations, name), "rb") as stream:
            content = stream.read()
        return _XmlFile(name, content, parse_xml(content))

    def _image_file(self, stem: str, root: ElementTree.Element) -> str | None:
        """The image with the name of the XML file, or else the one that this names."""
        files = self.image_files.get(stem, [])
        if len(files) != 1:
            stated = [os.path.basename(_text(element)) for element in root.findall("filename")]
            files = [name for name in stated if name in self.image_files.get(Path(name).stem, [])]
        if len(files) == 1:
            return files[0]
        self.problems.add("no image", f"of {stem}.xml in {self.layout.images}")
        return None

    def _size(self, xml: _XmlFile, file_name: str | None) -> tuple[int, int]:
        """Width and height; from the image where the XML file has none or 0; 0 if unknown."""
        sides = []
        for tag in ("width", "height"):
            found = xml.root.findall(f"size/{tag}")
            for number, side in enumerate(found):
                text = _text(side)
                if number or not parse_number(text).is_integer() or text.startswith("-"):
                    where = f"{xml.where(side)}: {tag} is {text[:40]!r}"
                    self.problems.add("bad size", where + " the second time" * bool(number))
                    return 0, 0
            sides.append(int(parse_number(_text(found[0]))) if found else 0)
        if all(sides) or file_name is None:
            return sides[0], sides[1]
        size = read_size(self.layout.images / file_name)
        if isinstance(size, str):
            self.problems.add("no image", f"{self.layout.images / file_name}: {size}")
            return 0, 0
        return size

    def _object(self, xml: _XmlFile, element: ElementTree.Element, origin: tuple[int, int]) -> None:
        parts = self._children(xml, element, ("name", "bndbox"), ("difficult",))
        sides = parts and self._children(xml, parts["bndbox"], _SIDES)
        if not parts or not sides:
            return
        name, texts = _text(parts["name"]), [_text(sides[tag]) for tag in _SIDES]
        crowd = _FLAGS.get(_text(parts["difficult"])) if "difficult" in parts else 0
        if not name:
            self.problems.add("no element", f"{xml.where(parts['name'])}: name is empty")
        if crowd is None:
            self.problems.add("bad difficult flag", xml.where(parts["difficult"]))
        if not name or crowd is None:
            return
        x0, y0, x1, y1 = map(parse_number, texts)
        if not math.isfinite(x0 + y0 + x1 + y1):
            pairs = zip(_SIDES, texts, strict=True)
            self.unreadable[len(self.objects)] = ", ".join(f"{s} {t[:20]!r}" for s, t in pairs)
        box = CocoBox(x0 - 1, y0 - 1, x1 - x0 + 1, y1 - y0 + 1)
        self.objects.append((name, box, crowd, *origin))

    def _children(
        self,
        xml: _XmlFile,
        element: ElementTree.Element,
        needed: Sequence[str],
        optional: Sequence[str] = (),
    ) -> dict[str, ElementTree.Element] | None:
        """An element's children by their tags; None where a needed one is missing or repeated."""
        found = {child.tag: child for child in element}
        wrong = [f"{tag} is missing" for tag in needed if tag not in found]
        if len(found) < len(element):
            tags = [child.tag for child in element]
            wrong += [f"{tag} is repeated" for tag in (*needed, *optional) if tags.count(tag) > 1]
        for what in wrong:
            self.problems.add("no element", f"{xml.where(element)}: {what}")
        return None if wrong else found

    def _object_label(self, row: int) -> str:
        *_, image, index = self.objects[row]
        xml = self._parse(self.images[image][1])
        return xml.where(xml.root.findall("object")[index].findall("bndbox")[0])

    def columns(self, categories: Sequence[str]) -> Columns:
        """What was read, under these categories or all that occur, sorted by name as VOC's are."""
        found = sorted({name for name, *_ in self.objects})
        names = list(categories) or found
        for unknown in sorted({*found} - {*names}):
            self.problems.add("unknown name", repr(unknown))
        check_spellings(found, self.problems)
        if not self.images:
            self.problems.add("empty list", "images")
        elif not names:
            self.problems.add("empty list", "categories (no image has an object)")
        ids = {name: number for number, name in enumerate(names, start=1)}  # an unknown name: 1
        file = CocoFile(
            [image for image, _ in self.images],
            [
                CocoAnnotation(n, self.images[index][0].id, ids.get(name, 1), box, iscrowd=crowd)
                for n, (name, box, crowd, index, _) in enumerate(self.objects, start=1)
            ],
            [CocoCategory(number, name) for name, number in ids.items()],
        )
        return Columns(file, self.unreadable, lambda row: self.images[row][1], self._object_label)


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


def parse_xml(content: bytes) -> ElementTree.Element:
    """Parses XML without a document type.

    That is where entities are declared that expand to gigabytes or to the content of other files,
    and VOC has none. In an encoding that hides the word there are zero bytes.
    """
    if b"<!DOCTYPE" in content or b"\0" in content:
        element_lines(content)
    return ElementTree.fromstring(content)


def element_lines(content: bytes) -> list[int]:
    """The line of every element, in the order of the file; refuses a document type."""
    parser = expat.ParserCreate()
    lines: list[int] = []

    def refuse(*_: object) -> None:
        raise ValueError("it declares a document type (DOCTYPE), which is not read")

    parser.StartElementHandler = lambda tag, _: lines.append(parser.CurrentLineNumber)
    parser.StartDoctypeDeclHandler = refuse
    parser.Parse(content, True)
    return lines


def _text(element: ElementTree.Element) -> str:
    """An element's text; none where other elements are among it."""
    return "" if len(element) else (element.text or "").strip()
