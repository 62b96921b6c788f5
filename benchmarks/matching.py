"""Matching all decoder layers at once against layer by layer, with the same assignment.

    python benchmarks/matching.py                 # 6 layers × 4 images, 300 queries

The other side is Hugging Face's matcher, called for each layer as their loss does; like the
official code it computes the costs of all images against all labels and copies each layer's to the
host. Ours gathers what is needed of all layers and copies once. Medians of alternating runs, CPU
time of one thread. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch
from measure import alternate, versions  # type: ignore[import-not-found]
from transformers.loss.loss_deformable_detr import DeformableDetrHungarianMatcher

from cldetr.modeling.classification import SigmoidFocal
from cldetr.modeling.matcher import Matcher
from cldetr.modeling.structures import DetrOutput, Target


def main() -> None:
    """Runs the comparison."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--images", type=int, default=4)
    parser.add_argument("--queries", type=int, default=300)
    parser.add_argument("--classes", type=int, default=80)
    parser.add_argument("--repeat", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape = (args.layers, args.images, args.queries)
    output = DetrOutput(torch.randn(*shape, args.classes), torch.rand(*shape, 4) * 0.4 + 0.1)
    counts = torch.linspace(10, 30, args.images).int().tolist()
    targets = [
        Target(torch.randint(0, args.classes, (count,)), torch.rand(count, 4) * 0.4 + 0.1)
        for count in counts
    ]
    labels = [{"class_labels": x.labels, "boxes": x.boxes} for x in targets]
    ours = Matcher(SigmoidFocal())
    theirs = DeformableDetrHungarianMatcher(class_cost=2, bbox_cost=5, giou_cost=2)

    def match_by_layer() -> list[Any]:
        layers = zip(output.logits, output.boxes, strict=True)
        return [theirs({"logits": x, "pred_boxes": y}, labels) for x, y in layers]

    matches, by_layer = ours(output, targets), match_by_layer()
    for layer, pairs in enumerate(by_layer):
        for image, (queries, _) in enumerate(pairs):
            found = matches.queries[layer, matches.images == image].sort().values
            if not torch.equal(found, queries):
                raise SystemExit("the two sides match otherwise")
    seconds = alternate(
        {"ours": lambda: ours(output, targets), "theirs": match_by_layer}, args.repeat
    )
    a, b = seconds["ours"], seconds["theirs"]
    print(f"ours {1000 * a:.1f} ms, by layer {1000 * b:.1f} ms: {b / a:.2f} times as fast")
    report = {
        "benchmark": "matching",
        "shape": [*shape, args.classes],
        "labels": counts,
        "ms": {"ours": round(1000 * a, 2), "by_layer": round(1000 * b, 2)},
        "times_faster": round(b / a, 2),
        "same_assignment": True,
        "versions": versions("transformers"),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
