"""The twin of configs/custom.yaml: your own data in COCO format, on one small GPU.

    python train_net.py --config-file configs/lazy/custom.py \
        "dataloader.train.dataset.names=['old.json:images', 'new.json:images']" \
        "dataloader.test.dataset.names=['test.json:images']"
"""

from .coco import dataloader, method, model, train

__all__ = ["dataloader", "input", "method", "model", "optimizer", "scenario", "schedule", "train"]

model.transformer.checkpointing = True
model.num_queries = -1  # from the data, as all that is -1
dataloader.train.total_batch_size = -1
input = dict(min_size_train=[-1], min_size_test=-1)
scenario = dict(order="id")
schedule = dict(
    first=dict(min_steps=5000),
    train=dict(epochs=50, drops=[40], min_steps=2200),
    calibrate=dict(min_steps=200),
)
method = dict(name="recommended", pseudo=dict(method.pseudo, balance=0.5))  # docs/ablation.md
optimizer = dict(lr=1e-4)
train.update(
    output_dir="output/custom",
    accumulate=-1,
    amp=dict(enabled=True, dtype="bfloat16"),
    checkpointer=dict(period=500),
)
