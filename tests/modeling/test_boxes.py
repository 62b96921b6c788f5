import torch
from torchvision.ops import box_iou as reference_iou
from torchvision.ops import generalized_box_iou as reference_giou

from cldetr.layers.boxes import box_cxcywh_to_xyxy, box_iou, box_xyxy_to_cxcywh, paired_giou


def random_corners(count):
    low = torch.rand(count, 2)
    return torch.cat([low, low + torch.rand(count, 2) * 0.5 + 1e-3], dim=1)


def test_conversions_are_each_others_inverse():
    boxes = random_corners(50)
    torch.testing.assert_close(box_cxcywh_to_xyxy(box_xyxy_to_cxcywh(boxes)), boxes)
    centred = torch.tensor([[0.5, 0.25, 0.2, 0.1]])
    torch.testing.assert_close(box_cxcywh_to_xyxy(centred), torch.tensor([[0.4, 0.2, 0.6, 0.3]]))


def test_overlaps_of_all_pairs_equal_torchvision():
    a, b = random_corners(30), random_corners(20)
    iou, union = box_iou(a, b)
    torch.testing.assert_close(iou, reference_iou(a, b))
    area = lambda x: (x[:, 2:] - x[:, :2]).prod(1)  # noqa: E731
    torch.testing.assert_close(union * (1 + iou), area(a)[:, None] + area(b)[None])
    torch.testing.assert_close(paired_giou(a[:, None], b), reference_giou(a, b))


def test_generalised_overlap_of_known_boxes():
    a = torch.tensor([0.0, 0.0, 1.0, 1.0])
    touching = torch.tensor([1.0, 0.0, 2.0, 1.0])
    apart = torch.tensor([3.0, 0.0, 4.0, 1.0])
    assert paired_giou(a, a) == 1
    assert paired_giou(a, touching) == 0  # no overlap, nothing between
    assert paired_giou(a, apart) == -0.5  # half of the hull is between them


def test_empty_boxes_give_finite_overlaps_and_gradients():
    a = torch.zeros(1, 4, requires_grad=True)
    giou = paired_giou(a, torch.zeros(1, 4))
    giou.sum().backward()
    assert torch.isfinite(giou).all()
    assert torch.isfinite(a.grad).all()
