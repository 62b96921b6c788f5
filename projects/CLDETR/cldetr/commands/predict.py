"""`cldetr predict`: find objects in images; writes pictures and COCO-format JSON."""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image
from tqdm import tqdm

from cldetr.analysis.predict import Detection, Predictor
from cldetr.data.scan import IMAGE_ENDINGS, check_file, is_image_name
from cldetr.drawing.boxes import Box, class_color, draw_boxes, make_canvas, save_png
from cldetr.errors import InputError
from cldetr.files import write_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's options."""
    parser.add_argument("images", nargs="+", type=Path, help="image files, or folders of them")
    parser.add_argument(
        "--weights",
        type=Path,
        required=True,
        metavar="FILE",
        help="model.pth, or a run directory: its newest model",
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="where pictures and JSON go"
    )
    parser.add_argument(
        "--score", type=float, default=0.5, help="minimum score of a detection (default: 0.5)"
    )
    parser.add_argument(
        "--config-file",
        metavar="FILE",
        help="the config of the model; needed only for weights that do not name theirs",
    )
    parser.add_argument(
        "--short-side",
        type=int,
        metavar="PIXELS",
        help="resize images to this short side; 0 keeps their size (default: as in training)",
    )
    parser.add_argument("--device", default="auto", help="cpu, cuda, or auto (a GPU, if any)")
    parser.add_argument(
        "--no-pictures", action="store_true", help="write the JSON files alone, no PNG"
    )


def run(args: argparse.Namespace) -> int:
    """Predicts on all images and writes what was found."""
    if not 0.0 <= args.score <= 1.0:
        raise InputError(f"--score must be in [0, 1], not {args.score}")
    files = find_images(args.images)
    unusable = [f"{path}: {problem}" for path in files if (problem := check_file(path)[0])]
    if unusable:  # before the work starts
        raise InputError.listing(f"{len(unusable)} images cannot be used:", unusable)
    pictures = name_pictures(files, args.out)
    predictor = Predictor.from_checkpoint(
        args.weights,
        config_file=args.config_file,
        device=args.device,
        short_side=args.short_side,
    )
    args.out.mkdir(parents=True, exist_ok=True)
    images, results, problems = [], [], []
    counts: Counter[str] = Counter()
    saving: Future[None] | None = None
    with ThreadPoolExecutor(1) as pool:  # compresses a picture while the next image is detected
        bar = tqdm(files, desc="predicting", unit="image", disable=None)
        for image_id, path in enumerate(bar, start=1):
            try:
                pixels = predictor.read(path)
            except InputError as error:  # its header was whole, its pixels are not
                problems.append(str(error))
                continue
            found = predictor(pixels, args.score)
            counts.update(detection.name for detection in found)
            height, width = pixels.shape[:2]
            entry = {"id": image_id, "file_name": str(path), "width": width, "height": height}
            if not args.no_pictures:
                if saving is not None:
                    saving.result()
                saving = pool.submit(save_png, _draw(pixels, found), pictures[path])
                entry["picture"] = pictures[path].name
            images.append(entry)
            results += [_result(image_id, detection) for detection in found]
        if saving is not None:
            saving.result()
    categories = [{"id": x.id, "name": x.name} for x in predictor.categories]
    write_json(args.out / "detections.json", results)
    write_json(
        args.out / "images.json",
        {"images": images, "annotations": [], "categories": categories},
    )
    print(f"{len(images)} images, {len(results)} detections of score {args.score:g} or more:")
    for name, count in counts.most_common():
        print(f"  {count:6d}  {name}")
    print(f"{args.out}: detections.json, images.json" + ", PNG" * (not args.no_pictures))
    if problems:
        raise InputError.listing(f"{len(problems)} images could not be read:", problems)
    return 0


def find_images(paths: Sequence[Path]) -> list[Path]:
    """Lists image files: those named, and those that lie in folders, in the order of names."""
    found: list[Path] = []
    problems = []
    for path in paths:
        if path.is_dir():
            inside = sorted(x for x in path.iterdir() if is_image_name(x.name))
            if not inside:
                problems.append(f"{path}: no image in this folder ({', '.join(IMAGE_ENDINGS)})")
            found += inside
        elif path.is_file():
            found.append(path)
        else:
            problems.append(f"{path}: there is no such file or folder")
    if problems:
        raise InputError.listing("these images cannot be found:", problems)
    return list(dict.fromkeys(found))


def name_pictures(files: Sequence[Path], out: Path) -> dict[Path, Path]:
    """Where each image's picture goes; never onto an image that was given."""
    given = {os.path.realpath(path) for path in files}
    names: Counter[str] = Counter()
    pictures = {}
    for path in files:
        names[path.stem] += 1
        again = f"_{names[path.stem]}" if names[path.stem] > 1 else ""
        pictures[path] = out / f"{path.stem}{again}.png"
        if os.path.realpath(pictures[path]) in given:
            raise InputError(
                f"the picture of {path} would overwrite {pictures[path]}: choose another --out"
            )
    return pictures


def _result(image_id: int, found: Detection) -> dict[str, object]:
    x0, y0, x1, y1 = found.box
    return {
        "image_id": image_id,
        "category_id": found.category_id,
        "bbox": [x0, y0, x1 - x0, y1 - y0],
        "score": found.score,
    }


def _draw(pixels: np.ndarray, found: Sequence[Detection]) -> Image.Image:
    canvas = make_canvas(pixels)
    boxes = [Box(x.box, class_color(x.label), f"{x.name} {x.score:.2f}") for x in found]
    draw_boxes(canvas, boxes)
    return canvas.image
