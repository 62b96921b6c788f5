"""Fault campaigns: what a run survives, shown by breaking it, with counts.

    python -m faults                       every campaign, in under an hour on one core
    python -m faults kill --count 300      one of them, with bounds of your own
    python -m faults --size short          the form that the tests run
    python -m faults damage --stock        the same faults against stock Detectron2

Each campaign prints how many faults it tried and how many were handled as docs/reliability.md
promises, and the command fails when one was not. Linux only.
"""
