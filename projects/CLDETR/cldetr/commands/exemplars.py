"""`cldetr exemplars`: choose the exemplars of an annotation file, without training anything."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace

import numpy as np
from tqdm import tqdm

from cldetr.data.coco_writer import write_subset
from cldetr.data.datasets import read_dataset
from cldetr.data.exemplars import (
    STRATEGIES,
    Context,
    Selection,
    find_strategy,
    resolve_budget,
    select_random,
)
from cldetr.data.memory import (
    ExemplarMemory,
    PhaseExemplars,
    objects_per_image,
    phase_counts,
)
from cldetr.errors import InputError
from cldetr.scenario import make_scenario


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument(
        "--annotations",
        required=True,
        metavar="DATA",
        help="COCO instances file, or voc:DIR/trainval, yolo:data.yaml/train, a registered name",
    )
    parser.add_argument(
        "--budget",
        type=number,
        default=0.1,
        help="up to 1 a share of the images, above 1 a number of images (default: 0.1)",
    )
    parser.add_argument(
        "--strategy",
        default="kl",
        help=f"{', '.join(STRATEGIES)} (default: kl, the paper's Eq. 6; herding needs a detector's "
        "features, so it works in training only)",
    )
    parser.add_argument("--out", required=True, metavar="FILE", help="where to write the memory")
    parser.add_argument("--coco", metavar="FILE", help="write the exemplars as a COCO file, too")
    parser.add_argument(
        "--classes", nargs="+", metavar="CLASS", help="names or ids of the classes (default: all)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of random and balanced (default: 0)")
    parser.add_argument(
        "--image-root",
        metavar="DIR",
        help="image folder of a COCO file, not read here (default: the file's folder)",
    )


def run(args: argparse.Namespace) -> int:
    """Chooses, prints how well the choice matches the data, and writes it."""
    strategy = find_strategy(args.strategy)
    root = args.image_root or os.path.dirname(args.annotations)
    data = read_dataset(args.annotations, image_root=root)
    classes = args.classes or [category.id for category in data.categories]
    known = {str(category.id) for category in data.categories}
    scenario = make_scenario(
        [[int(word) if str(word) in known else word for word in classes]], data, partial=True
    )
    # One phase of all images. In the file's order: nothing here has to be shuffled.
    phase = replace(scenario.phases[0], image_ids=tuple(data.image_ids.tolist()))
    scenario = replace(scenario, phases=(phase,), data_seed=None)
    counts = phase_counts(scenario, 1, data)

    wanted = min(resolve_budget(args.budget, counts.shape[0]), counts.shape[0])
    with tqdm(total=wanted, desc="choosing", unit=" images", disable=None) as bar:
        selection = strategy.choose(
            counts, args.budget, Context(seed=args.seed, progress=bar.update)
        )
    exemplars = PhaseExemplars.of(
        scenario,
        1,
        counts,
        selection,
        strategy=args.strategy,
        budget=args.budget,
        seed=args.seed,
    )
    memory = ExemplarMemory.empty(scenario).add(exemplars)
    by_chance = select_random(counts, args.budget, Context(seed=args.seed))
    _print_summary(exemplars, selection, by_chance)
    try:
        memory.write(args.out)
        if args.coco:
            write_subset(args.coco, exemplars.subset(), data, scenario.categories)
    except OSError as error:
        raise InputError(f"{error.filename} cannot be written: {error.strerror}") from None
    print("\nwritten:", *filter(None, (args.out, args.coco)))
    return 0


def number(text: str) -> int | float:
    """Reads a budget; argparse names this function where it cannot."""
    return int(text) if text.isdecimal() else float(text)


def _print_summary(exemplars: PhaseExemplars, selection: Selection, by_chance: Selection) -> None:
    """Prints the shares of each class in the data and in the exemplars, and the divergences."""
    in_data = sum(record.objects_in_data for record in exemplars.classes)
    kept = sum(record.objects_in_exemplars for record in exemplars.classes)
    width = max(len(record.name) for record in exemplars.classes)
    print(f"{'class':{width}}  {'objects':>9} {'share':>8}  {'exemplars':>9} {'share':>8}")
    for record in sorted(exemplars.classes, key=lambda record: -record.objects_in_data):
        print(
            f"{record.name:{width}}  {record.objects_in_data:9,} "
            f"{record.objects_in_data / max(in_data, 1):8.3%}  {record.objects_in_exemplars:9,} "
            f"{record.objects_in_exemplars / max(kept, 1):8.3%}"
        )
    means = [objects_per_image(i) or 0 for i in (exemplars.data_images, exemplars.exemplar_images)]
    print(
        f"\n{len(selection.indices):,} of {sum(exemplars.data_images):,} images chosen "
        f"({exemplars.strategy}: {exemplars.note}), {exemplars.shortfall:,} fewer than asked for"
    )
    print(f"objects per labelled image: {means[0]:.2f} in the data, {means[1]:.2f} in exemplars")
    print(f"KL(data ‖ exemplars): {_last(selection)}; of a random choice: {_last(by_chance)}")


def _last(selection: Selection) -> str:
    if not len(selection.kl):
        return "no image"
    if np.isfinite(selection.kl[-1]):
        return f"{selection.kl[-1]:.3g}"
    return "infinite (a class has no exemplar)"
