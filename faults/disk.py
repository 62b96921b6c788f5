"""A full disk at each write of a run: nothing good is lost, and the message says what to do.

From the n-th file operation on nothing can be written any more, for n all through a run. The limit
is the kernel's: a file size limit (EFBIG), and where a small file system can be mounted also one
that is full (ENOSPC). Then there is room again, and `--resume` must end in the same bits.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from faults import tiny
from faults.save import count_operations
from faults.tally import Options, Tally

MOUNT_MB = 320  # a run asks for 200 MB of free space when it starts


def run(options: Options) -> Tally:
    """Fills the disk at every n-th operation of a run."""
    tally = Tally("full disk")
    base = tiny.Baseline.of(options)
    stride = options.number(short=120, nightly=24, long=1)
    _fill(options, tally, base, base.work, "file size limit", _limit, _no_limit, stride)
    with _small_file_system(options.folder("mount")) as mount:
        if mount is None:
            tally.note("no small file system could be mounted: ENOSPC was not tried")
        else:
            _fill(
                *(options, tally, base, mount, "full file system"),
                *(lambda: _write_all_there_is(mount), lambda: _make_room(mount)),
                2 * stride,
            )
    return tally


def _fill(
    options: Options,
    tally: Tally,
    base: tiny.Baseline,
    work: Path,
    kind: str,
    fill: Callable[[], None],
    free: Callable[[], None],
    stride: int,
) -> None:
    number = 1 + options.seed % stride
    while not options.out_of_time:
        folder = work / f"run{number}"
        log = options.work / f"{kind.replace(' ', '_')}_{number}.txt"
        filled = log.with_suffix(".filled")

        def fill_at(n: int, at: int = number, mark: Path = filled) -> None:
            if n == at:
                mark.touch()
                fill()

        child = tiny.start(
            base.data.command(folder),
            log,
            before=lambda: count_operations(folder, fill_at),  # noqa: B023 - used at once
        )
        status = child.wait()
        free()
        if not filled.exists():
            break  # the run has fewer operations
        said = child.said().strip()
        last = said.splitlines()[-1] if said else ""
        told = status == 2 and ("cannot write" in last or "free disk space" in last)
        tally.check(
            f"{kind}: stops with a message",
            told or status == 0,
            f"operation {number}: status {status}: {said[-1500:]}",
        )
        before = tiny.finished_stages(folder)
        wrong = base.resume(folder)
        after = tiny.finished_stages(folder)
        lost = [stage for stage, record in before.items() if after.get(stage) != record]
        tally.check(
            f"{kind}: nothing lost, resumed bit-identical",
            not wrong and not lost,
            f"operation {number}: {lost} {wrong}",
        )
        shutil.rmtree(folder, ignore_errors=True)
        number += stride


def _limit() -> None:
    """No file of this process may grow any more, its console's log excepted (it is a pipe then)."""
    _quiet_console()
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def _no_limit() -> None:
    pass  # the limit ended with the process


def _quiet_console() -> None:
    """Moves the console to a pipe whose other end still reaches the log."""
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.close(writing)
        while content := os.read(reading, 1 << 16):
            os.write(1, content)
        os._exit(0)
    os.close(reading)
    os.dup2(writing, 1)
    os.dup2(writing, 2)
    os.close(writing)


def _write_all_there_is(mount: Path) -> None:
    descriptor = os.open(mount / "filler", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    size = 1 << 22
    while size:
        try:
            os.write(descriptor, b"\0" * size)
        except OSError:
            size //= 2
    os.close(descriptor)


def _make_room(mount: Path) -> None:
    (mount / "filler").unlink(missing_ok=True)


@contextmanager
def _small_file_system(place: Path) -> Iterator[Path | None]:
    command = ["mount", "-t", "tmpfs", "-o", f"size={MOUNT_MB}m", "tmpfs", str(place)]
    allowed = os.geteuid() == 0 and shutil.which("mount") is not None
    if not allowed or subprocess.run(command, capture_output=True).returncode:
        yield None
        return
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)
