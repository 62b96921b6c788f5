"""A step on a GPU must not make the host wait for it: shown on the meta device, without a GPU.

The meta device has no numbers: an operator that hands a number or a size to the host raises there.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cldetr.layers.ragged import row_indices
from cldetr.modeling.structures import ImageBatch, Target

META = torch.device("meta")


class Transfers(TorchDispatchMode):
    """Copies from the CPU to another device, of which `blocking` ones wait."""

    def __init__(self):
        super().__init__()
        self.count = 0
        self.blocking = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func._schema.name == "aten::_to_copy":
            target = torch.device(kwargs.get("device") or args[0].device)
            if args[0].device.type == "cpu" and target.type != "cpu":
                self.count += 1
                if not kwargs.get("non_blocking"):
                    self.blocking.append(tuple(args[0].shape))
        return func(*args, **kwargs)


@pytest.mark.parametrize("sizes", [[(96, 128), (96, 128)], [(96, 128), (64, 90), (96, 128)]])
@pytest.mark.parametrize(
    ("arch", "settings"),
    [
        ("DeformableDETR", {}),
        ("DeformableDETR", {"WITH_BOX_REFINE": True, "TWO_STAGE": True}),
        ("DETR", {"IN_FEATURES": ["res5"]}),
    ],
    ids=["deformable", "two-stage", "detr"],
)
def test_a_forward_pass_copies_to_the_device_without_waiting(
    build, monkeypatch, arch, settings, sizes
):
    # It does not know the meta device.
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *device: False)
    model = build(randomised=False, arch=arch, **settings).to(META).train()
    images = ImageBatch(torch.empty(len(sizes), 3, 96, 128, device=META), sizes)
    with Transfers() as transfers:
        output = model.predict(images)
    assert output.boxes.device == META
    assert transfers.count > 0
    assert transfers.blocking == []


def test_labels_and_their_indices_are_copied_without_waiting():
    with Transfers() as transfers:
        flags = torch.tensor([False, True])
        Target(torch.tensor([1, 2]), torch.rand(2, 4), torch.rand(2, 7), flags).to(META)
        row_indices([2, 0, 3], META)
    assert transfers.count == 6
    assert transfers.blocking == []
