"""Faults of mapped files, in processes that would die of them (`faulty_pages`)."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from mounting import PATIENCE_S
from places import LABS

PROGRAM = LABS / "faulty_pages.py"


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROGRAM), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=4 * PATIENCE_S)


def test_copies_of_every_kind_survive_a_cut_file() -> None:
    done = run("threads")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("number", range(6))
def test_no_page_of_the_records_that_fails_ends_the_process(number: int, rng: random.Random, tmp_path: Path) -> None:
    seed = rng.randrange(1 << 32)
    done = run("records", seed, tmp_path)
    assert done.returncode == 0, f"seed {seed}: {done.returncode}\n{done.stderr}"


@pytest.mark.ring(3)
def test_each_page_and_level_of_the_records_trees_that_fails_is_an_error(tmp_path: Path) -> None:
    done = run("tree", tmp_path)
    assert done.returncode == 0, f"{done.returncode}\n{done.stderr[-4000:]}"


def test_faults_that_are_not_ours_kill_as_ever() -> None:
    assert run("foreign").returncode == -signal.SIGBUS
