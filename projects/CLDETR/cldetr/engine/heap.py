"""Freed memory, kept for the next step where a run computes on the CPU."""

from __future__ import annotations

import ctypes
import logging
import os

logger = logging.getLogger(__name__)

# glibc's numbers of the settings, and what they are set to, in bytes.
_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1
_LARGEST = 32 << 20  # what glibc takes at most: larger tensors are mapped and unmapped each
_KEPT = 1 << 30


def keep_freed_memory() -> bool:
    """Keeps up to 1 GB that PyTorch frees, and hands it out again; whether that could be set.

    glibc returns the end of its heap to the system as soon as some of it is free, in the middle of
    a step, and asks for it again a moment later, whereupon the system clears every page anew.
    Settings in the environment (MALLOC_…) and other C libraries are left alone.
    """
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # not glibc
        return False
    done = bool(mallopt(_MMAP_THRESHOLD, _LARGEST) and mallopt(_TRIM_THRESHOLD, _KEPT))
    logger.debug("freed memory is %s", "kept" if done else "returned to the system")
    return done
