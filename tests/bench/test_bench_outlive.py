"""A daemon that is killed again and again: what is measured of it, and the command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvfuse.sizes import KIB, MIB
from kvfuse_bench.outlive import Cell, Fit, Outlived, cells, measure
from kvfuse_bench.plot import plot_outlived

pytestmark = pytest.mark.ring(3)

SIZE, BLOCK = 64 * MIB, 64 * KIB


def test_what_the_next_daemon_finds(tmp_path: Path) -> None:
    outlived = measure(Cell(SIZE, BLOCK, standby=False), tmp_path, 1, lambda _: None)
    assert outlived.adopted == [outlived.blocks] == [SIZE // BLOCK]
    assert outlived.ratio_before == pytest.approx(0.8, abs=0.01), "there is room for four of five blocks"
    assert abs(outlived.ratio_after - outlived.ratio_before) < 0.01
    assert 0 < outlived.adoption[0] < outlived.stalls[0]
    assert outlived.upgrades[0] > 0
    assert list(tmp_path.iterdir()) == []


def outlived(size: int, block_size: int, *, standby: bool = False) -> Outlived:
    """As if each GB took 1 ms, 10,000 blocks 3 ms, and all of it 5 ms."""
    blocks = size // block_size
    one = Outlived(Cell(size, block_size, standby), blocks, 1, size, 0.8, 0.8, 1.0, 1.0, [blocks])
    one.adoption = [0.005 + 0.001 * size / 1e9 + 0.003 * blocks / 1e4] * 3
    one.stalls, one.upgrades = [0.4], [0.2]
    return one


def test_a_fit_tells_blocks_from_bytes(tmp_path: Path) -> None:
    chosen = cells((10**9, 4 * 10**9), (BLOCK, MIB))
    assert [cell.standby for cell in chosen] == [False] * 4 + [True] * 2
    results = [outlived(cell.size, cell.block_size, standby=cell.standby) for cell in chosen]
    fit = Fit.of(results, lambda one: one.adoption)
    assert fit.fixed == pytest.approx(0.005, rel=0.01)
    assert fit.per_block == pytest.approx(3e-7, rel=0.01)
    assert fit.per_byte == pytest.approx(1e-12, rel=0.01)
    assert fit.seconds(10**11, MIB) == pytest.approx(0.105 + 0.0286, rel=0.01)
    plot_outlived(results, fit, tmp_path / "outlive.png")
    assert (tmp_path / "outlive.png").read_bytes().startswith(b"\x89PNG")


def test_the_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvfuse.cli", "bench", "outlive", "--size", "4MiB", "--block-size", "64KiB"]
    command += ["--rounds", "1", "--folder", str(tmp_path), "--output", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "stand-by" in done.stdout
    assert "100 GB" in done.stdout
    (result,) = (tmp_path / "out").iterdir()
    assert [cell["standby"] for cell in json.loads(result.read_text())["cells"]] == [False, True]
    done = subprocess.run([*command, "--size", "much"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "'much' is not a size" in done.stderr
