"""``kvfuse bench model-load``: its table, with loaders that need no packages of others."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_loads_are_measured_on_all_sides(tmp_path: Path) -> None:
    names = ("preads", "ring", "memcpy", "runai streamer")
    command = [sys.executable, "-m", "kvfuse.cli", "bench", "model-load", "--rounds", "1", "--size", "80MiB"]
    command += ["--shards", "1", "--folder", str(tmp_path), "--output", str(tmp_path / "results")]
    for name in names:
        command += ["--only", name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert "no row 'runai streamer'" in done.stderr
    (path,) = (tmp_path / "results").iterdir()
    figures = json.loads(path.read_text())["figures"]
    assert {figure["name"] for figure in figures} == {
        *(f"{name}, {state}" for name in ("preads", "ring") for state in ("cold", "warm")),
        "memcpy, warm",
    }
    assert all(figure["value"] > 0 for figure in figures if figure["unit"] == "GB/s")
    assert list(tmp_path.iterdir()) == [tmp_path / "results"]


def test_unknown_sizes_are_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvfuse.cli", "bench", "model-load", "--size", "much", "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "--size much" in done.stderr
