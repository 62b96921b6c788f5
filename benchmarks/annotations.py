"""Reading a train2017-sized annotation file: our loader against Detectron2's `load_coco_json`.

    python benchmarks/annotations.py              # 118,287 images, about 450 MB
    python benchmarks/annotations.py --scale 0.1  # a tenth of it

Writes a file with COCO train2017's numbers of images, objects and polygon points, then reads it in
fresh processes, one reader after the other, again and again. Time is the processor's, of the call
alone (both readers have one thread); memory is the peak of the whole process, beside what its
imports alone took. The two do not do the same work: Detectron2's loader keeps the polygons, ours
keeps boxes. Linux only.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

IMAGES, OBJECTS, CATEGORIES = 118_287, 860_001, 80
POINTS = 24  # mean number of polygon corners in train2017


def main() -> None:
    """Prints a table and, on the last line, the same as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale", type=float, default=1.0, help="share of train2017's size")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each reader")
    parser.add_argument("--reader", choices=READERS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.reader:
        print(json.dumps(measure(args.reader, args.folder)))
        return
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "instances_like_train2017.json"
        write_annotations(file, args.scale)
        size = file.stat().st_size
        print(f"{file.name}: {size / 1e6:,.0f} MB")
        run_reader("cached", folder)  # writes the cache
        runs: dict[str, list[dict[str, float]]] = {reader: [] for reader in READERS}
        for _ in range(args.repeats):
            for reader in READERS:
                runs[reader].append(run_reader(reader, folder))
    medians = {
        reader: {key: statistics.median(run[key] for run in done) for key in done[0]}
        for reader, done in runs.items()
    }
    report(medians, size)


def run_reader(reader: str, folder: str) -> dict[str, float]:
    """Measures one reader in a process of its own."""
    command = [sys.executable, __file__, "--reader", reader, "--folder", folder]
    answer = subprocess.run(command, check=True, capture_output=True, text=True)
    return dict(json.loads(answer.stdout.splitlines()[-1]))


def report(medians: dict[str, dict[str, float]], size: int) -> None:
    """Prints the medians, and the ratios that they make."""
    print(f"\n{'':42}{'time':>10}{'peak memory':>14}{'after imports':>15}")
    for reader, title in READERS.items():
        row = medians[reader]
        print(f"{title:42}{row['seconds']:8.2f} s{row['peak']:11,.0f} MB{row['imports']:12,.0f} MB")
    base, ours = medians["detectron2"], medians["cldetr"]
    ratios = {
        "faster": base["seconds"] / ours["seconds"],
        "less_memory": base["peak"] / ours["peak"],
        "less_growth": (base["peak"] - base["imports"]) / (ours["peak"] - ours["imports"]),
        "views_over_load": medians["views"]["seconds"] / ours["seconds"],
    }
    print(
        f"\nagainst Detectron2: {ratios['faster']:.1f}× faster, "
        f"{ratios['less_memory']:.1f}× lower peak ({ratios['less_growth']:.1f}× above imports)\n"
        f"load, split 40+10x4, build all views: {ratios['views_over_load']:.2f}× the load alone\n"
        f"what a spawned worker receives: {medians['views']['pickle']:,.0f} bytes"
    )
    print(json.dumps({"bytes": size, "medians": medians, "ratios": ratios}))


def read_with_detectron2(file: Path) -> dict[str, float]:
    """Detectron2's loader."""
    from detectron2.data.datasets.coco import load_coco_json

    return _timed(lambda: load_coco_json(str(file), "images", "train2017_like"))


def read_with_cldetr(file: Path) -> dict[str, float]:
    """Our loader, checks included."""
    from cldetr.data.coco import load_coco

    return _timed(lambda: load_coco(file, "images"))


def read_cached(file: Path) -> dict[str, float]:
    """Our loader where the arrays of the same content are cached."""
    from cldetr.data.coco import load_coco

    folder = file.parent / "cache"
    return _timed(lambda: load_coco(file, "images", cache_dir=folder))


def make_views(file: Path) -> dict[str, float]:
    """Loading, splitting into five phases, registering all views, and building each of them."""
    from detectron2.data import DatasetCatalog

    from cldetr.data.coco import load_coco
    from cldetr.data.datasets import register_views
    from cldetr.scenario import BASE, make_scenario

    def build() -> Any:
        data = load_coco(file, "images")
        scenario = make_scenario("40+10x4", data, order="seed")
        names = register_views(scenario, {BASE: data}, {BASE: data}, "bench")
        return [DatasetCatalog.get(name) for name in names]

    found = _timed(build)
    views = build()
    buffer = multiprocessing.reduction.ForkingPickler.dumps(views[-1])
    assert isinstance(pickle.loads(buffer)[0], dict)
    return {**found, "pickle": len(buffer)}


READERS = {
    "detectron2": "Detectron2 load_coco_json",
    "cldetr": "cldetr load_coco",
    "cached": "cldetr load_coco, cached",
    "views": "cldetr load_coco, split, all views",
}
_FUNCTIONS = {
    "detectron2": read_with_detectron2,
    "cldetr": read_with_cldetr,
    "cached": read_cached,
    "views": make_views,
}


def measure(reader: str, folder: Path) -> dict[str, float]:
    """Runs one reader in this process."""
    logging.disable(logging.CRITICAL)
    [file] = folder.glob("*.json")
    return {**_FUNCTIONS[reader](file), "peak": _peak()}


def _timed(call: Any) -> dict[str, float]:
    imports, begun = _peak(), time.process_time()
    kept = call()
    seconds = time.process_time() - begun
    assert len(kept if isinstance(kept, list) else kept.image_ids)
    return {"seconds": seconds, "imports": imports}


def _peak() -> float:
    """Peak resident memory of this process so far, in MB.

    From /proc: `getrusage` would begin with the memory of the process that started this one.
    """
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024 / 1e6


def write_annotations(file: Path, scale: float) -> None:
    """Writes a file with the numbers of train2017, polygons included, one entry a line."""
    rng = np.random.default_rng(0)
    images, objects = int(IMAGES * scale), int(OBJECTS * scale)
    ids = rng.permutation(600_000)[:images] + 1
    owners = ids[rng.integers(images, size=objects)].tolist()
    labels = rng.integers(1, CATEGORIES + 1, objects).tolist()
    corner = rng.uniform(0, 300, (objects, 2)).round(2)
    boxes = np.concatenate([corner, rng.uniform(1, 100, (objects, 2)).round(2)], axis=1).tolist()
    crowd = (rng.random(objects) < 0.0116).astype(int).tolist()
    # Polygons are read past, so it is their length that matters: a few thousand will do.
    polygons = [
        json.dumps([rng.uniform(0, 400, 2 * max(int(points), 3)).round(2).tolist()])
        for points in rng.gamma(1.5, POINTS / 1.5, 4000)
    ]
    with file.open("w") as out:
        out.write('{"info": {"year": 2017}, "licenses": [], "images": [\n')
        out.write(",\n".join(_image(int(image)) for image in ids))
        out.write('\n], "annotations": [\n')
        for i in range(objects):
            out.write(
                f'{{"segmentation": {polygons[i % len(polygons)]}, "area": {corner[i, 0] + 1}, '
                f'"iscrowd": {crowd[i]}, "image_id": {owners[i]}, "bbox": {boxes[i]}, '
                f'"category_id": {labels[i]}, "id": {i + 1}}}{"," if i + 1 < objects else ""}\n'
            )
        out.write('], "categories": [\n')
        names = (f'{{"id": {i}, "name": "class {i}"}}' for i in range(1, CATEGORIES + 1))
        out.write(",\n".join(names) + "\n]}\n")


def _image(image: int) -> str:
    return (
        f'{{"license": 3, "file_name": "{image:012d}.jpg", "height": 480, "width": 640, '
        f'"coco_url": "http://images.cocodataset.org/train2017/{image:012d}.jpg", '
        f'"date_captured": "2013-11-14 17:02:52", "id": {image}, '
        f'"flickr_url": "http://farm9.staticflickr.com/8186/8119368305_4e622c8349_z.jpg"}}'
    )


if __name__ == "__main__":
    main()
