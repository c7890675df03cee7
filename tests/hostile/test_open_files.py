"""Files that are open for writing, and were never stored, cost the others nothing, however many they are."""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path

import pytest
from hostile_lab import attacker
from mounting import KvfuseMount, temporary_mount

pytestmark = [pytest.mark.root, pytest.mark.alone]

WORDS = ("allow_other", "volume.capacity=512MiB", "volume.segment_size=64MiB")
OPEN_FILES = 20_000
ROUNDS = 20
CREATES = 40


def prepare(mount: KvfuseMount) -> None:
    (mount.point / "mine").mkdir()
    (mount.point / "theirs").mkdir()
    (mount.point / "theirs").chmod(0o777)


def create_seconds(folder: Path, number: int) -> list[float]:
    """How long each of some creations took. The files are written and closed, so that commits have work."""
    took = []
    for index in range(CREATES):
        started = time.perf_counter()
        descriptor = os.open(folder / f"{number}-{index}", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        took.append(time.perf_counter() - started)
        os.write(descriptor, bytes(4096))
        os.close(descriptor)
    return took


def test_creations_beside_many_open_files_are_as_fast() -> None:
    """Of which there are more than changes at which operations wait for a commit, where commits can take them."""
    with temporary_mount(WORDS) as idle, temporary_mount(WORDS) as busy:
        prepare(idle)
        prepare(busy)
        with attacker("attack_open_files.py", busy, busy.point / "theirs", OPEN_FILES) as attack:
            attack.hear(120)
            alone: list[float] = []
            beside: list[float] = []
            for number in range(ROUNDS):
                alone += create_seconds(idle.point / "mine", number)
                beside += create_seconds(busy.point / "mine", number)
            attack.tell("end")
        half, half_alone = statistics.median(beside), statistics.median(alone)
        print(f"create p50 beside {OPEN_FILES} open files: {half * 1e3:.2f} ms, beside none {half_alone * 1e3:.2f} ms")
        assert half < 1.5 * half_alone
        theirs = list((busy.point / "theirs").iterdir())
        assert len(theirs) == OPEN_FILES, "files that were open and are closed have their names"
        assert all(path.stat().st_size == 1 for path in theirs[:: OPEN_FILES // 50])
