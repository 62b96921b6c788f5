"""One of two processes that evaluate half of the images each; started by test_evaluation.py."""

import json
import pickle
import sys
from pathlib import Path

import torch

from cldetr.evaluation.evaluator import IncrementalEvaluator


def evaluate_share(directory: Path, rank: int) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=2
    )
    truth, scenario, batch = pickle.loads((directory / "problem.pkl").read_bytes())
    # One image goes to both, as samplers do that pad to equal lengths.
    half = len(batch) // 2
    share = batch[: half + 1] if rank == 0 else batch[half:]
    evaluator = IncrementalEvaluator(truth, scenario, 3)
    evaluator.process(*zip(*share, strict=True))
    (directory / f"rank{rank}.json").write_text(json.dumps(evaluator.evaluate()))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    evaluate_share(Path(sys.argv[1]), int(sys.argv[2]))
