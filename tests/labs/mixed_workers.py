"""Runs `mixed_load` beside a test: a process for each kind of load, each in a folder of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from mixed_load import Report
from mounting import PATIENCE_S
from places import LABS


class Mounted(Protocol):
    """A mount of a test."""

    point: Path


class Worker:
    """One kind of load, in a process of its own."""

    def __init__(self, kind: str, seed: int, folders: Sequence[Path]) -> None:
        command = [sys.executable, str(LABS / "mixed_load.py"), kind, str(seed), *map(str, folders)]
        self.kind = kind
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def report(self) -> Report:
        """Have it end, and compare all that it knows."""
        said, _ = self._process.communicate(timeout=4 * PATIENCE_S)
        assert self._process.returncode == 0, f"the load {self.kind} ended with {self._process.returncode}"
        return Report(**json.loads(said))

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@contextmanager
def loaded(mounts: Sequence[Mounted], kinds: Sequence[str], seed: int, top: str) -> Iterator[list[Worker]]:
    """Workers of these kinds, each in a folder of its own in ``top`` that all of the mounts have; a mount after the
    other is the first one of a worker, which keeps files open there."""
    workers = []
    try:
        for number, kind in enumerate(kinds):
            name = f"{top}/{kind}-{number}"
            (mounts[0].point / name).mkdir()
            first = number % len(mounts)
            ordered = [*mounts[first:], *mounts[:first]]
            workers.append(Worker(kind, seed + number, [mount.point / name for mount in ordered]))
        yield workers
    finally:
        for worker in workers:
            worker.kill()
