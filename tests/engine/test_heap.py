"""Freed memory is kept where a run computes on the CPU."""

import os
import subprocess
import sys

import pytest

# Page faults of taking, touching and freeing five blocks of 20 MB, ten times, in a fresh process.
SCRIPT = """
import ctypes, resource, sys
from cldetr.engine.heap import keep_freed_memory
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
def turn():
    blocks = [ctypes.c_void_p(libc.malloc(20 << 20)) for _ in range(5)]
    for block in blocks:
        ctypes.memset(block, 1, 20 << 20)
    for block in blocks:
        libc.free(block)
kept = keep_freed_memory() if sys.argv[1] == "keep" else None
turn()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    turn()
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def ask(word, **environment):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, word],
        env=clean | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    kept, faults = done.stdout.split()
    return kept, int(faults)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's setting")
def test_memory_that_was_freed_is_not_cleared_anew():
    kept, faults = ask("keep")
    if kept == "False":
        pytest.skip("not glibc")
    assert faults < 1000 < ask("leave")[1]  # 256,000 pages are touched


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's setting")
def test_settings_in_the_environment_are_left_alone():
    assert ask("keep", MALLOC_TRIM_THRESHOLD_="1000000")[0] == "False"
