"""`cldetr demo`: the main job on the embedded data set, with fine-tuning for contrast."""

from __future__ import annotations

import argparse
import logging
import time
from pathlib import Path

from detectron2.utils.logger import setup_logger

from cldetr.data.shapes import ensure_shapes
from cldetr.engine.from_yaml import recipe_from_yaml
from cldetr.engine.results import format_table
from cldetr.engine.run import IncrementalRun

_CONFIGS = Path(__file__).parents[4] / "configs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument("--out", default="output/demo", metavar="DIR", help="default: %(default)s")


def run(args: argparse.Namespace) -> int:
    """Generates the data, trains both methods from the same first phase and shows the tables."""
    begin = time.monotonic()
    setup_logger(name="cldetr")
    setup_logger(name="detectron2").setLevel(logging.WARNING)
    out = Path(args.out)
    ensure_shapes("datasets/shapes")
    tables = []
    first_phase = out / "cldetr/phase1/train/model.pth"
    for name, config, overrides in (
        ("cldetr", "shapes.yaml", []),
        ("finetune", "shapes_finetune.yaml", ["MODEL.DETECTOR", str(first_phase)]),
    ):
        folder = out / name
        recipe = recipe_from_yaml(
            str(_CONFIGS / config), ["OUTPUT_DIR", str(folder), "MODEL.DEVICE", "cpu", *overrides]
        )
        results = IncrementalRun(recipe, resume=(folder / "recipe.json").exists()).run()
        tables.append(format_table(results))
    print("\n" + "\n\n".join(tables))
    print(
        f"\nOld classes after phase 2 are what fine-tuning forgets and CL-DETR keeps.\n"
        f"Runs: {out}/cldetr and {out}/finetune (log.txt, results.json, phase*/, tensorboard/); "
        f"{(time.monotonic() - begin) / 60:.1f} minutes."
    )
    return 0
