"""The twin of configs/add.yaml: new categories for a detector that works, without its data.

    python train_net.py --config-file configs/lazy/add.py train.detector=model.pth \
        "dataloader.train.dataset.names=['new.json:images']" \
        "dataloader.test.dataset.names=['test.json:images']" train.output_dir=RUN

There is no model here: it is the one that the detector's file describes.
"""

from .coco import method

__all__ = ["dataloader", "method", "scenario", "schedule", "train"]

scenario = dict(protocol="extend")
method.name = "cldetr+completion"
method.pseudo.balance = 0.5
method.unlabelled = "ignore"  # new classes, on images that were annotated before
method.pseudo.skip_annotated = True  # of the classes that exemplars and refreshed data annotate
method.calibrate = dict(complete=dict())  # beyond the paper; see docs/experiments.md
dataloader = dict(train=dict(total_batch_size=-1))  # from the number of images
schedule = dict(
    train=dict(epochs=20, drops=[16], min_steps=600), calibrate=dict(epochs=5, min_steps=60)
)
train = dict(detector="", output_dir="output/add", accumulate=-1)
