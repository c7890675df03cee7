"""The core of the block store does what a plain model does, whatever is killed, loses power, or is garbage."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import blocks_fuzz
import blocks_killed
from blocks_lab import play
from blocks_threads import Threads


def test_as_the_model(seed: int) -> None:
    counts = play(seed, 2500)
    assert counts["kills"] > 5
    assert counts["cuts"] > 5


def test_daemons_that_are_killed_lose_nothing(seed: int) -> None:
    program = [sys.executable, str(Path(blocks_killed.__file__)), str(seed), "60"]
    ended = subprocess.run(program, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_threads_never_see_wrong_bytes(seed: int) -> None:
    seen = Threads(seed, 1500).run()
    assert all(seen.values())


def test_garbage_is_refused(seed: int) -> None:
    blocks_fuzz.main(seed, 10)
