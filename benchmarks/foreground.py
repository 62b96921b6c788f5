r"""How good pseudo-labels are by the foreground score: precision and recall against hidden labels.

A sigmoid head has no background class, so "foreground" needs a least score
(METHOD.PSEUDO.FOREGROUND). In a benchmark the old objects that phase 2 hides are known; this
compares the first phase's model on the second phase's images with them, score by score:

    python benchmarks/foreground.py --config-file configs/shapes.yaml \
        --weights RUN/phase1/train/model.pth
"""

from __future__ import annotations

import argparse
import json

import numpy as np
import torch

from cldetr.data.mapper import Mapper
from cldetr.data.views import View
from cldetr.engine.checkpoint import load_into, load_state
from cldetr.engine.from_yaml import recipe_from_yaml
from cldetr.engine.rundata import RunData
from cldetr.layers.boxes import box_cxcywh_to_xyxy, box_iou
from cldetr.methods.learner import freeze
from cldetr.methods.pseudo import PseudoRule, drop_overlapping, make_pseudo_labels
from cldetr.modeling.structures import Target
from cldetr.scenario import Part

SCORES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config-file", required=True)
    parser.add_argument("--weights", required=True)
    parser.add_argument("--images", type=int, default=600, help="of phase 2, at most")
    parser.add_argument("opts", nargs="*", help="KEY VALUE overrides of the config")
    args = parser.parse_args()

    recipe = recipe_from_yaml(args.config_file, args.opts)
    data = RunData(recipe)
    scenario, old = data.scenario, data.scenario.old(2)
    detector = recipe.model.build(len(scenario.categories))
    load_into(detector, load_state(args.weights)["model"], args.weights)
    teacher = freeze(detector, old)
    phase = scenario.phase(2)
    # Everything that the annotation file knows about phase 2's images.
    every = Part(phase.source, phase.image_ids, scenario.seen(2), 0)
    view = View(scenario.categories, [every], data.train)
    usable = torch.zeros(1, len(scenario.categories), dtype=torch.bool)
    usable[0, list(old)] = True
    found = {score: np.zeros(3, dtype=np.int64) for score in SCORES}  # right, given, hidden
    mapper = Mapper(recipe.augmentation, training=True)
    for number in range(min(len(view), args.images)):
        entry = mapper(view[number], np.random.default_rng(number))
        (target,) = teacher.targets([entry])
        is_old = usable[0][target.labels]
        hidden = Target(target.labels[is_old], target.boxes[is_old])
        truth = Target(target.labels[~is_old], target.boxes[~is_old])
        with torch.no_grad():
            output = teacher.predict(teacher.preprocess([entry]))
        scores = teacher.scores(output.logits[-1])
        for score in SCORES:
            rule = PseudoRule(foreground=score)
            (pseudo,) = make_pseudo_labels(scores, output.boxes[-1], None, usable, rule)
            pseudo = drop_overlapping(pseudo, truth, rule)
            found[score] += [_right(pseudo, hidden), len(pseudo), len(hidden)]
    print("foreground  per image  precision  recall     F1")
    rows = []
    for score, counts in found.items():
        right, given, hidden_count = (int(count) for count in counts)
        precision, recall = right / max(given, 1), right / max(hidden_count, 1)
        f1 = 2 * precision * recall / max(precision + recall, 1e-9)
        per_image = given / min(len(view), args.images)
        print(f"{score:10.2f} {per_image:10.2f} {precision:10.3f} {recall:7.3f} {f1:6.3f}")
        rows.append({"score": score, "precision": precision, "recall": recall, "f1": f1})
    print(json.dumps({"rows": rows, "torch": torch.__version__, "weights": args.weights}))


def _right(pseudo: Target, hidden: Target) -> int:
    """Pseudo-labels that find a hidden object of their class at IoU ≥ 0.5, each object once."""
    if len(pseudo) == 0 or len(hidden) == 0:
        return 0
    iou = box_iou(box_cxcywh_to_xyxy(pseudo.boxes), box_cxcywh_to_xyxy(hidden.boxes))[0]
    iou = iou * (pseudo.labels[:, None] == hidden.labels[None])
    right = 0
    for row in iou:  # most confident first
        best = int(row.argmax())
        if row[best] >= 0.5:
            right += 1
            iou[:, best] = 0
    return right


if __name__ == "__main__":
    main()
