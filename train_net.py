#!/usr/bin/env python
"""Trains a detector through all phases of an incremental scenario.

    python train_net.py --config-file configs/70_10.yaml --num-gpus 8
    python train_net.py --config-file configs/70_10.yaml --num-gpus 8 --resume
    python train_net.py --config-file configs/lazy/70_10.py dataloader.train.total_batch_size=16

The same command with --resume goes on where a run stopped. Copy this script to bring a loader, an
optimizer, a hook or an evaluator of your own: see docs/extending.md. An installed package has it as
`python -m cldetr.train`.
"""

import argparse
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from detectron2.config import CfgNode

from cldetr.config import load_config
from cldetr.engine import IncrementalTrainer, default_argument_parser, default_setup, launch
from cldetr.engine.plan import print_plan
from cldetr.report.after_run import show_run


class Trainer(IncrementalTrainer):
    """Override any `build_*` method here, as with Detectron2's trainers."""


def setup(args: argparse.Namespace) -> CfgNode:
    """Reads the config with its overrides and sets the process up."""
    cfg = load_config(args.config_file, args.opts)
    default_setup(cfg, args)
    return cfg


def main(args: argparse.Namespace) -> dict[str, Any]:
    """Trains, evaluates or plans; what each process does."""
    cfg = setup(args)
    if args.plan:
        return print_plan(cfg, Trainer.build_model, args.num_gpus * args.num_machines)
    trainer = Trainer(cfg)
    if args.eval_only:
        return trainer.evaluate()
    trainer.resume_or_load(resume=args.resume)
    results = trainer.train()
    show_run(cfg.OUTPUT_DIR, enabled=cfg.REPORT)  # pictures and a page of the run
    return results


def run(argv: Sequence[str] | None = None) -> int:
    """Runs a command line in one or several processes; returns the exit status."""
    args = default_argument_parser().parse_args(argv)
    return launch(
        main,
        1 if args.plan else args.num_gpus,
        num_machines=1 if args.plan else args.num_machines,
        machine_rank=args.machine_rank,
        dist_url=args.dist_url,
        args=(args,),
        timeout=timedelta(minutes=args.timeout),
    )


if __name__ == "__main__":
    sys.exit(run())
