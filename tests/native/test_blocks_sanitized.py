"""The same programs, with a module that ends at the first byte outside of its memory, and at what C does not define."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import sanitized
from places import LABS

pytestmark = pytest.mark.ring(2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sanitized")
    if reason := sanitized.reason_against() or sanitized.build(folder, ["_blocks", "_peers"]):
        pytest.skip(reason)
    return folder


@pytest.mark.parametrize(
    ("program", "count"),
    [("blocks_lab", 400), ("blocks_threads", 300), ("blocks_fuzz", 20), ("peers_lab", 150)],
    ids=lambda word: f"{word}",
)
def test_sanitized(folder: Path, seed: int, program: str, count: int) -> None:
    words = [seed, count] if program != "blocks_lab" else [seed, seed + 1, count]
    command = sanitized.command(folder, LABS / f"{program}.py", *map(str, words))
    environment = {**os.environ, "PYTHONPATH": str(LABS)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-6000:] + sanitized.reports(folder)
