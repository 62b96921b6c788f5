"""The twin of configs/custom_small.yaml: your own data without a GPU.

    python train_net.py --config-file configs/lazy/custom_small.py scenario.name=3+1 \
        "dataloader.train.dataset.names=['train.json:images']" \
        "dataloader.test.dataset.names=['test.json:images']"
"""

from .shapes import dataloader, input, method, model, optimizer, scenario, schedule, train

__all__ = ["dataloader", "input", "method", "model", "optimizer", "scenario", "schedule", "train"]

model.num_queries = -1  # from the data, as all that is -1
dataloader.train.total_batch_size = -1
input.update(min_size_train=[-1], max_size_train=333, min_size_test=-1, max_size_test=333)
schedule.first = dict(epochs=26, drops=[22], min_steps=1500)
schedule.train = dict(epochs=16, drops=[13], min_steps=600)
schedule.calibrate.min_steps = 60
method = dict(name="recommended", pseudo=dict(method.pseudo, balance=0.5))  # docs/ablation.md
train.output_dir = "output/custom_small"
