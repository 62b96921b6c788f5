"""Evaluation of a phase: every group of classes from one inference pass and one matching."""

from __future__ import annotations

import functools
import logging
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.evaluation import DatasetEvaluator
from detectron2.structures import BoxMode, Instances
from detectron2.utils import comm

from cldetr.data.coco import label_table
from cldetr.data.datasets import read_dataset
from cldetr.data.views import View
from cldetr.errors import InputError
from cldetr.evaluation.average_precision import (
    Detections,
    GroundTruth,
    Labels,
    Matching,
    Scores,
    match,
    mean_scores,
    summarise_precision,
)
from cldetr.evaluation.confusion import (
    MIN_SCORE,
    count_confusions,
    describe_confusions,
    summarise_confusions,
)
from cldetr.evaluation.voc import VocMatching, match_voc
from cldetr.scenario import Scenario, make_separate_scenario

logger = logging.getLogger(__name__)

# Fields of an evaluation that are too large for results.json: a run writes each to its own file.
DETAILS = ("confusion", "precision_recall")


class IncrementalEvaluator(DatasetEvaluator):
    """COCO's metrics for all seen, old and new classes, each phase's group and each class.

    Detections of classes that are not yet seen are ignored. The numbers are those of pycocotools
    with `catIds` restricted to the group, in percent; None stands for "n/a": a group without an
    object to find has no AP, and such classes do not enter the means.

    Where the phases are domains, the groups are the domains: each is judged on the images of its
    own test set, the scenario's n-th domain on the n-th data set of the truth. "all" and "old" are
    the means over the domains seen so far and over those before the last.
    """

    def __init__(
        self,
        truth: GroundTruth,
        scenario: Scenario,
        phase: int,
        *,
        restrict_images: bool = False,
        voc_metrics: bool = False,
        confusion_score: float = MIN_SCORE,
        image_ids: Sequence[Any] | None = None,
    ) -> None:
        """Prepares the evaluation of the model after a phase.

        Args:
            truth: The objects, under the scenario's labels.
            scenario: Says which classes are old and new, and their names.
            phase: The phase just learnt, from 1.
            restrict_images: Judge each group only on the images with at least one object of the
                group, as the authors' released code does. Detections on all other images then
                cost nothing, so the numbers come out higher than COCO's. A single class is judged
                on the images of all seen classes.
            voc_metrics: Add Pascal VOC's AP at an IoU of 0.5 (`cldetr.evaluation.voc`).
            confusion_score: Detections below it do not enter the confusion matrix.
            image_ids: What the inputs call the images of `truth`, where that is something else.
        """
        if not 1 <= phase <= len(scenario.phases):
            raise ValueError(f"scenario {scenario.name} has no phase {phase}")
        self._names = {k: scenario.categories[k].name for k in scenario.seen(phase)}
        twice = [name for name, count in Counter(self._names.values()).items() if count > 1]
        if twice:
            raise InputError.listing("Results go by category names; these name several:", twice)
        self._truth = truth
        self._scenario = scenario
        self._phase = phase
        self._over_domains = scenario.protocol == "domains"
        self._restrict_images = restrict_images
        self._voc_metrics = voc_metrics
        self._confusion_score = confusion_score
        names = [truth.sources[source].name for source in truth.image_sources]
        ids = truth.image_ids.tolist() if image_ids is None else image_ids
        self._index_of = {key: index for index, key in enumerate(zip(names, ids, strict=True))}
        self.reset()

    @classmethod
    def from_dataset(
        cls,
        name: str,
        *,
        restrict_images: bool = False,
        voc_metrics: bool = False,
        confusion_score: float = MIN_SCORE,
    ) -> IncrementalEvaluator:
        """Prepares the evaluation on a registered data set.

        Args:
            name: of a test view of a run, which knows its scenario and phase, or of any other data
                set: then all its classes are one group.
            restrict_images: see the constructor.
            voc_metrics: see the constructor.
            confusion_score: see the constructor.
        """
        build = functools.partial(
            cls,
            restrict_images=restrict_images,
            voc_metrics=voc_metrics,
            confusion_score=confusion_score,
        )
        metadata, data = MetadataCatalog.get(name), DatasetCatalog.get(name)
        if isinstance(data, View):
            truth = GroundTruth.from_view(data)
            return build(truth, metadata.scenario, metadata.phase)
        whole = read_dataset(name, trim=False)
        scenario = make_separate_scenario([whole])
        labels = label_table(whole, scenario.categories, scenario.seen(1))
        truth = GroundTruth.from_coco(whole, labels)
        ids = [entry["image_id"] for entry in data]  # may be texts, as Pascal VOC's are
        if not whole.json_file.is_file():  # Detectron2 sorts a file's images; the truth is sorted
            ids = [ids[index] for index in np.argsort(whole.image_ids, kind="stable")]
        return build(truth, scenario, 1, image_ids=ids)

    def reset(self) -> None:
        """Forgets all predictions."""
        self._predictions: dict[int, Detections] = {}  # by the image's index

    def process(
        self, inputs: Sequence[Mapping[str, Any]], outputs: Sequence[Mapping[str, Any]]
    ) -> None:
        """Keeps the detections of a batch of images, in the scenario's labels.

        An input has `image_id`, and `source` (the data set's name) where there are several.
        """
        sources = self._truth.sources
        for entry, output in zip(inputs, outputs, strict=True):
            source = sources[0].name if len(sources) == 1 else entry["source"]
            image = f"image {entry['image_id']} of {source}"
            index = self._index_of.get((source, entry["image_id"]))
            if index is None:
                raise InputError(
                    f"{image} is not in the ground truth: "
                    "give the test loader and the evaluator the same data sets."
                )
            prediction = _detections(index, output["instances"])
            if not all(np.isfinite(values).all() for values in vars(prediction).values()):
                raise FloatingPointError(f"{image}: a detection is not finite (NaN or infinite)")
            # A sampler may repeat images to fill a batch: the first time counts.
            self._predictions.setdefault(index, prediction)

    def evaluate(self) -> dict[str, Any]:
        """Computes the phase's entry of results.json; an empty dict on all but the main process."""
        begin = time.perf_counter()
        gathered = comm.gather(self._predictions, dst=0)
        if not comm.is_main_process():
            return {}
        # An image that two processes saw counts as the first of them saw it.
        predictions = {index: found for part in reversed(gathered) for index, found in part.items()}
        if not predictions:
            raise RuntimeError("no image was processed: there is nothing to evaluate")
        unseen = len(self._truth.image_ids) - len(predictions)
        if unseen:
            logger.warning(
                "%d of %d images got no inference: their objects count as missed",
                unseen,
                len(self._truth.image_ids),
            )

        # In the order of images, so that the result does not depend on how they were shared out.
        ordered = [vars(predictions[index]).values() for index in sorted(predictions)]
        detections = Detections(*map(np.concatenate, zip(*ordered, strict=True)))
        detections = detections.take(np.flatnonzero(np.isin(detections.labels, [*self._names])))
        entry = self._score(detections)
        logger.info(
            "phase %d: AP all %s, old %s, new %s; %d detections on %d images evaluated in %.1f s",
            self._phase,
            *(_show(entry[name]) for name in ("all", "old", "new")),
            len(detections.scores),
            len(predictions),
            time.perf_counter() - begin,
        )
        logger.info(
            "phase %d, detections of score %g and more: %s",
            self._phase,
            self._confusion_score,
            describe_confusions(entry["confusion"]["summary"], self._over_domains),
        )
        return entry

    def _score(self, detections: Detections) -> dict[str, Any]:
        matching = match(self._truth, detections)
        voc = match_voc(self._truth, detections) if self._voc_metrics else None
        if self._over_domains:
            return self._score_domains(matching, voc, detections)
        # Ascending, as pycocotools sorts its catIds: the means are then equal to the last bit.
        seen = np.sort(list(self._names))
        seen_images = self._truth.images_with(seen) if self._restrict_images else None
        table = matching.precision(seen, seen_images)  # (T, R, K, A)

        def score(labels: Labels, images: np.ndarray | None) -> Scores:
            if images is seen_images:
                scores = summarise_precision(table[:, :, np.isin(seen, labels)])
            else:
                scores = summarise_precision(matching.precision(labels, images))
            return scores if voc is None else {**scores, **voc.average(labels, images)}

        def score_group(labels: Sequence[int]) -> Scores:
            group = np.sort(labels)
            images = self._truth.images_with(group) if self._restrict_images else seen_images
            return score(group, images)

        phases = self._scenario.phases[: self._phase]
        old = self._scenario.old(self._phase)
        return {
            "phase": self._phase,
            "all": score(seen, seen_images),
            "old": score_group(old) if old else None,
            "new": score_group(phases[-1].classes),
            "groups": [score_group(phase.classes) for phase in phases],
            "per_category": {
                name: score([label], seen_images) for label, name in self._names.items()
            },
            **self._pictures(detections, seen_images, table),
        }

    def _score_domains(
        self, matching: Matching, voc: VocMatching | None, detections: Detections
    ) -> dict[str, Any]:
        truth, labels = self._truth, np.sort(list(self._names))
        counted = truth.images_with(labels) if self._restrict_images else True
        images = [(truth.image_sources == index) & counted for index in range(len(truth.sources))]
        tables = [matching.precision(labels, each) for each in images]

        def score(domain: int, wanted: Labels) -> Scores:
            scores = summarise_precision(tables[domain][:, :, np.isin(labels, wanted)])
            return scores if voc is None else {**scores, **voc.average(wanted, images[domain])}

        domains = [score(index, labels) for index in range(len(truth.sources))]
        done = self._phase
        seen_images = (truth.image_sources < done) & counted
        return {
            "phase": done,
            "all": mean_scores(domains[:done]),
            "old": mean_scores(domains[: done - 1]) if done > 1 else None,
            "new": domains[done - 1],
            "groups": domains[:done],
            "per_category": {
                name: mean_scores([score(index, [label]) for index in range(done)])
                for label, name in self._names.items()
            },
            "domains": dict(zip((x.name for x in truth.sources), domains, strict=True)),
            **self._pictures(detections, seen_images, matching.precision(labels, seen_images)),
        }

    def _pictures(
        self, detections: Detections, images: np.ndarray | None, table: np.ndarray
    ) -> dict[str, Any]:
        """What is drawn rather than summed up: confusions and precision-recall curves.

        Args:
            detections: all of them.
            images: (I,) bool, the images that count; None: all do.
            table: (T, R, K, A) precision of the seen classes, by ascending label.
        """
        rows = np.argsort(np.argsort(list(self._names)))  # where each class is in the table
        return {
            "confusion": self._confusion(detections, images),
            "precision_recall": self._precision_recall(table[:, :, rows, 0]),
        }

    def _confusion(self, detections: Detections, images: np.ndarray | None) -> dict[str, Any]:
        """Counts which class each object was detected as, on the images that count."""
        truth = self._truth
        if images is not None:
            truth = truth.take(np.flatnonzero(images[truth.images]))
            detections = detections.take(np.flatnonzero(images[detections.images]))
        counts = count_confusions(truth, detections, [*self._names], self._confusion_score)
        classes = self._classes()
        old = np.array(classes["phases"]) < self._phase
        old &= not self._over_domains  # every domain has all classes
        return {
            **classes,
            "min_score": self._confusion_score,
            "counts": counts.tolist(),
            "summary": summarise_confusions(counts, old),
        }

    def _precision_recall(self, precision: np.ndarray) -> dict[str, Any]:
        """The precision of each class at each recall; None without an object to find.

        Args:
            precision: (T, R, K) of objects of all sizes.
        """
        curves = {"AP50": precision[0], "AP": precision.mean(axis=0)}
        return self._classes() | {
            name: [None if column[0] < 0 else np.round(column, 4).tolist() for column in curve.T]
            for name, curve in curves.items()
        }

    def _classes(self) -> dict[str, Any]:
        """The seen classes and the phase that each was learnt in."""
        phase_of: dict[int, int] = {}
        for number, phase in enumerate(self._scenario.phases[: self._phase], start=1):
            for label in phase.classes:
                phase_of.setdefault(label, number)
        return {
            "phase": self._phase,
            "categories": list(self._names.values()),
            "phases": [phase_of[label] for label in self._names],
        }


def to_scalars(entry: Mapping[str, Any]) -> dict[str, float]:
    """Flattens results for Detectron2's EvalHook and writers, as "all/AP"; without "n/a".

    Results of other evaluators are tasks of their own, as "bbox/AP".
    """
    groups = {k: v for k, v in entry.items() if k not in ("per_category", *DETAILS)}
    groups |= {f"group{i}": scores for i, scores in enumerate(entry.get("groups", ()), start=1)}
    return {
        f"{name}/{metric}": float(value)
        for name, scores in groups.items()
        if isinstance(scores, Mapping)
        for metric, value in scores.items()
        if isinstance(value, (int, float)) and math.isfinite(value)
    }


def split_details(entry: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Results as JSON data: the metrics, and by name the fields that have files of their own."""
    plain = to_plain(entry)
    details = {name: plain.pop(name) for name in DETAILS if name in plain}
    return plain, details


def to_plain(value: Any) -> Any:
    """Results as JSON data: numbers of NumPy as Python's, NaN (Detectron2's "n/a") as None."""
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    if isinstance(value, (np.ndarray, np.generic, torch.Tensor)):
        return to_plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)


def _detections(image: int, instances: Instances) -> Detections:
    # Subtracted in the tensor's own type and only then widened, as Detectron2's COCOEvaluator
    # writes its JSON: the numbers are to be the same.
    corners = instances.pred_boxes.tensor.detach().cpu()
    return Detections(
        np.full(len(instances), image),
        instances.pred_classes.cpu().numpy().astype(np.int64),
        BoxMode.convert(corners, BoxMode.XYXY_ABS, BoxMode.XYWH_ABS).double().numpy(),
        instances.scores.detach().cpu().double().numpy(),
    )


def _show(scores: Scores | None) -> str:
    value = None if scores is None else scores["AP"]
    return "n/a" if value is None else f"{value:.1f}"
