"""`cldetr add`: teach a trained detector new categories from their data alone."""

from __future__ import annotations

import argparse

from cldetr import train
from cldetr.config_files import find_config
from cldetr.engine.rundata import HOLD_OUT

_HELD_OUT = "0.2"  # share of the new images to evaluate on, where no test set is given


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's options."""
    parser.add_argument(
        "--detector",
        required=True,
        metavar="DETECTOR",
        help="a DETR: weights of a run or of `cldetr convert`, a folder of Hugging Face "
        "transformers or a name on their hub, or a finished run, whose exemplars are used, too",
    )
    parser.add_argument(
        "--data",
        required=True,
        nargs="+",
        metavar="DATA",
        help="the new data, such as new.json:images; several are learnt one after the other",
    )
    parser.add_argument(
        "--test",
        nargs="+",
        metavar="DATA",
        help="to evaluate on (default: a fifth of the new images, which are not trained on)",
    )
    parser.add_argument("--out", required=True, metavar="RUN", help="the run directory")
    parser.add_argument(
        "--known",
        choices=("keep", "refresh"),
        default="keep",
        help="categories that the detector knows and the new data annotate: keep them as they are "
        "(default), or train them on these annotations, too",
    )
    parser.add_argument(
        "--exemplars",
        nargs="+",
        default=[],
        metavar="DATA",
        help="labelled images of known categories, such as those that an earlier run kept",
    )
    parser.add_argument(
        "--old-images", default="", metavar="DIR", help="unlabelled images of known categories"
    )
    parser.add_argument("--num-gpus", type=int, default=1, metavar="N", help="default: 1")
    parser.add_argument("--resume", action="store_true", help="go on with the run in --out")
    parser.add_argument(
        "--plan", action="store_true", help="print what the run will do, and train nothing"
    )
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="KEY VALUE", help="more settings, KEY VALUE …"
    )


def run(args: argparse.Namespace) -> int:
    """Runs `train_net.py --config-file configs/add.yaml` with what was given."""
    keys = {
        "MODEL.DETECTOR": args.detector,
        "DATASETS.TRAIN": str(args.data),
        "DATASETS.TEST": str(args.test or [HOLD_OUT]),
        "DATASETS.EXEMPLARS": str(args.exemplars),
        "DATASETS.OLD_IMAGES": args.old_images,
        "SCENARIO.KNOWN": args.known,
        "OUTPUT_DIR": args.out,
    }
    if not args.test:
        keys["SCENARIO.HOLD_OUT"] = _HELD_OUT
    words = ["--config-file", str(find_config("add")), "--num-gpus", str(args.num_gpus)]
    words += ["--resume"] * args.resume + ["--plan"] * args.plan
    return train.run([*words, *(word for pair in keys.items() for word in pair), *args.set])
