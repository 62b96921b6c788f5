"""The run directory is the state of a run.

    RUN/config.yaml                               the whole configuration, to start it again
    RUN/identity.json  manifest.json  audit.json  what is run and on what
    RUN/starts.json  lock                         when, with which versions, by whom
    RUN/phase1/train/      model.pth  stage.json  (checkpoints/ while it trains)
    RUN/phase2/train/      predictions/ too, with METHOD.PSEUDO.CACHE
    RUN/phase1/select/     memory.json  exemplars_phase1.json  stage.json
    RUN/phase2/calibrate/  model.pth  stage.json
    RUN/phase2/evaluate/   metrics.json  confusion.json  precision_recall.json  stage.json
    RUN/results.json  results.csv  metrics.json  log.txt  (wandb.json)

A stage writes its outputs, then `stage.json` with their digests, last and atomically. A stage
without it did not happen; a stage with it never runs again.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import shutil
import socket
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from detectron2.config import CfgNode
from detectron2.utils import comm

from cldetr.config import differing, identity
from cldetr.engine.environment import environment
from cldetr.errors import InputError
from cldetr.files import atomic_path, remove_partials, sha256_file, sha256_json, write_json

logger = logging.getLogger(__name__)

STAGES = ("train", "select", "calibrate", "evaluate")
_LEAST_FREE = 200 << 20  # bytes; a start below this would fail at the first checkpoint


class Ledger:
    """Reads and writes what a run directory says."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)
        self._lock_file: Any = None
        self._log: logging.FileHandler | None = None

    def folder(self, phase: int, stage: str) -> Path:
        """Where a stage writes."""
        assert stage in STAGES
        return self.root / f"phase{phase}" / stage

    def open(self, cfg: CfgNode, resume: bool) -> None:
        """Takes the directory for this process and checks that the run may start or go on."""
        self._check_writable()
        self._lock()
        stored = self.root / "identity.json"
        if stored.exists() and not resume:
            self._forget_failed_start()
        if not stored.exists() and resume:
            raise InputError(
                f"--resume continues a run, but {self.root} holds none: start one without --resume"
            )
        if resume:
            check_identity(read_identity(stored), identity(cfg))
            remove_partials(self.root)

    def begin(self, cfg: CfgNode) -> None:
        """Writes what the run is, once its data has been found sound, and notes the start."""
        with atomic_path(self.root / "config.yaml") as partial:
            partial.write_text(cfg.dump(), encoding="utf-8")
        stored = self.root / "identity.json"
        if not stored.exists():
            content = identity(cfg)
            write_json(stored, {"identity": content, "digest": sha256_json(content)})
        self._note_start(cfg.MODEL.DEVICE)

    def start_log(self) -> None:
        """Writes the log to the directory too; Detectron2's helper would double the console."""
        self._log = logging.FileHandler(self.root / "log.txt", encoding="utf-8")
        self._log.setFormatter(
            logging.Formatter("[%(asctime)s] %(name)s %(levelname)s: %(message)s")
        )
        logging.getLogger("cldetr").addHandler(self._log)

    def close(self) -> None:
        """Releases the directory."""
        if self._log is not None:
            logging.getLogger("cldetr").removeHandler(self._log)
            self._log.close()
            self._log = None
        if self._lock_file is not None:
            self._lock_file.close()
            self._lock_file = None

    def finished(
        self, phase: int, stage: str, inputs: Mapping[str, str] | None = None
    ) -> dict[str, Any] | None:
        """The record of a finished stage whose outputs are all as it left them, else None.

        Args:
            phase: its phase.
            stage: its name.
            inputs: digests of what it would be made from now; other ones are refused.
        """
        folder = self.folder(phase, stage)
        if not (folder / "stage.json").exists():
            return None
        record = _read_record(folder / "stage.json")
        problems = [
            f"{key} was {record['inputs'].get(key, 'absent')[:12]}…, is now {digest[:12]}…"
            for key, digest in (inputs or {}).items()
            if record["inputs"].get(key) != digest
        ]
        if problems:
            raise InputError.listing(
                f"phase {phase}, {stage} was made from something else than the run holds now "
                f"(restore it, or delete {folder} and all later stages to do them again):",
                problems,
            )
        for name, digest in record["outputs"].items():
            path = folder / name
            if not path.is_file():
                problems.append(f"{path} is missing")
            elif sha256_file(path) != digest:
                problems.append(f"{path} is damaged: its checksum differs")
        if problems:
            raise InputError.listing(
                f"phase {phase}, {stage} was finished, but its results are not whole any more "
                f"(restore them, or delete {folder} and all later stages to do them again):",
                problems,
            )
        return record

    def finish(
        self,
        phase: int,
        stage: str,
        outputs: Sequence[str],
        inputs: Mapping[str, str],
        facts: Mapping[str, Any],
    ) -> None:
        """Declares a stage finished; from here on it never runs again.

        Args:
            phase: its phase.
            stage: its name.
            outputs: files in its folder.
            inputs: digests of what it was made from.
            facts: steps, seconds, memory and the like.
        """
        folder = self.folder(phase, stage)
        record = {
            "phase": phase,
            "stage": stage,
            "inputs": dict(inputs),
            "outputs": {name: sha256_file(folder / name) for name in outputs},
            "facts": dict(facts),
        }
        write_json(folder / "stage.json", {**record, "hash": sha256_json(record)})
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)

    def _forget_failed_start(self) -> None:
        """Removes what a start left that failed before it saved anything; refuses to lose a run."""
        remove_partials(self.root)
        if any(path.is_file() for path in self.root.glob("phase*/**/*")):
            raise InputError(
                f"{self.root} already holds a run: add --resume to go on with it, "
                "or choose another OUTPUT_DIR"
            )
        files = ("manifest.json", "audit.json", "starts.json", "metrics.json", "wandb.json")
        for name in (*files, "identity.json"):
            (self.root / name).unlink(missing_ok=True)  # the identity last: it marks a run

    def _note_start(self, device: str) -> None:
        path = self.root / "starts.json"
        starts = read_json(path)["starts"] if path.exists() else []
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        start = {"time": now, "processes": comm.get_world_size(), **environment(device)}
        write_json(path, {"starts": [*starts, start]})

    def _check_writable(self) -> None:
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            probe = self.root / f".probe.{os.getpid()}"
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as error:
            raise InputError(f"cannot write to {self.root}: {error.strerror}") from error
        free = shutil.disk_usage(self.root).free
        if free < _LEAST_FREE:
            raise InputError(
                f"{self.root} has {free >> 20} MB of free disk space, "
                f"a run needs {_LEAST_FREE >> 20} MB at least"
            )

    def _lock(self) -> None:
        path = self.root / "lock"
        self._lock_file = open(path, "a+")  # noqa: SIM115 - held while the run lasts
        try:
            # A record lock, which loader processes do not inherit: they may outlive a killed run.
            fcntl.lockf(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                logger.warning(
                    "%s is on a file system without locks (%s): nothing prevents a second run here",
                    self.root,
                    error.strerror,
                )
                return
            self._lock_file.seek(0)
            owner = self._lock_file.read().strip() or "another process"
            self._lock_file.close()
            self._lock_file = None
            raise InputError(f"{self.root} is in use by {owner}") from None
        self._lock_file.truncate(0)
        self._lock_file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        self._lock_file.flush()


def read_identity(path: Path) -> dict[str, Any]:
    """Reads the identity of a run from its identity.json."""
    content = read_json(path)
    found = content.get("identity")
    if not isinstance(found, dict) or content.get("digest") != sha256_json(found):
        raise InputError(
            f"{path} is damaged: its checksum differs. Restore it, or start in a new OUTPUT_DIR"
        )
    return found


def check_identity(stored: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Refuses to go on with a run under another identity, showing what differs."""
    differences = differing(stored, current)
    if differences:
        raise InputError.listing(
            "this directory holds another run; these settings differ from it "
            "(start in a new OUTPUT_DIR, or undo the changes):",
            [f"{key}: was {old!r}, now {new!r}" for key, old, new in differences],
        )


def _read_record(path: Path) -> dict[str, Any]:
    record = read_json(path)
    if record.pop("hash", None) != sha256_json(record):
        raise InputError(
            f"{path} is damaged: its checksum differs. Restore it, or delete its folder and all "
            "later stages to do them again"
        )
    return record


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object that the run wrote."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise InputError(f"{path} does not hold a JSON object")
    return content
