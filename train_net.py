#!/usr/bin/env python
"""Trains a detector through all phases of an incremental scenario.

    train_net.py --config-file configs/70_10.yaml --num-gpus 8
    train_net.py --config-file configs/70_10.yaml --num-gpus 8 --resume
    train_net.py --config-file configs/lazy/70_10.py optimizer.batch=16

The same command with --resume goes on where a run stopped. A YAML config takes overrides as
`KEY VALUE`, a LazyConfig as `key=value`.
"""

import sys

from cldetr.train import main

if __name__ == "__main__":
    sys.exit(main())
