"""``kvfuse replay --simulate``: the counts of a simulation, the table, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

from kvfuse.errors import ConfigError
from kvfuse.policy import POLICIES
from kvfuse_bench.plot import require_matplotlib
from kvfuse_bench.simulate import Setup, limited, make_setups, simulate
from kvfuse_bench.traffic import Generator, Request

REQUESTS = [
    Request(0, 1500, (0, 1, 2)),
    Request(3_000, 1500, (0, 3, 4)),
    Request(6_000, 1500, (0, 1, 2)),
    Request(200_000, 2000, (0, 1, 2, 5)),
]


def run_simulation(*arguments: str, python: tuple[str, ...] = ("-m", "kvfuse.cli")) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *python, "replay", "--simulate", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_counts() -> None:
    done: list[int] = []
    result = simulate(REQUESTS, Setup("lru", "all", 100), done.append)
    assert (result.asked, result.hits, result.written) == (13, 1 + 3 + 3, 6)
    assert sum(done) == len(REQUESTS)
    assert result.hit_ratios(2) == [(100.0, pytest.approx(4 / 9)), (200.0, pytest.approx(3 / 4))]


def test_a_gap_ends_the_hits() -> None:
    """Of four blocks the deepest of the first prompt made room: its others are hits."""
    result = simulate(REQUESTS[:3], Setup("lru", "all", 4))
    assert (result.hits, result.written) == (1 + 2, 3 + 2 + 1)


def test_water_marks() -> None:
    """Beyond nine of ten blocks, victims leave five."""
    requests = [Request(1000 * number, 512, (number,)) for number in range(20)]
    marks = Setup("lru", "all", 10, low_water=0.5, high_water=0.9)
    for block in range(14, 20):
        result = simulate([*requests, Request(30_000, 512, (block,))], marks)
        assert result.hits == (block > 14)


def test_a_prompt_larger_than_the_cache() -> None:
    result = simulate([Request(0, 5000, tuple(range(10)))] * 2, Setup("lru", "all", 4))
    assert result.hits == 4


@pytest.mark.parametrize("name", list(POLICIES))
@pytest.mark.parametrize("admission", ["adaptive", "all"])
def test_policies_of_columns_hit_as_often(name: str, admission: str) -> None:
    """At two sizes: nearly the hits of the policy of that name, and its writes."""
    requests = list(islice(Generator(7), 2_000))
    for capacity in (1_500, 5_000):
        setup = Setup(name, admission, capacity)
        exact, found = simulate(requests, setup), simulate(requests, setup._replace(in_rows=True))
        assert found.hits == pytest.approx(exact.hits, rel=0.03), capacity
        assert found.written == pytest.approx(exact.written, rel=0.03), capacity


def test_limits() -> None:
    assert len(limited(REQUESTS, 2, None, None)) == 2
    assert len(limited(REQUESTS, None, 6, None)) == 2
    assert len(limited(REQUESTS, None, None, 6.0)) == 2
    with pytest.raises(ConfigError):
        limited(REQUESTS, None, 1, None)


def test_setups_are_all_combinations_once() -> None:
    setups = make_setups(["lru", "chain", "lru"], ["all"], [5, 10])
    assert [(setup.name, setup.capacity) for setup in setups] == [
        ("lru + all", 5), ("lru + all", 10), ("chain + all", 5), ("chain + all", 10),
    ]  # fmt: skip


def test_without_matplotlib_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match="pip install 'matplotlib>="):
        require_matplotlib()


def test_the_command() -> None:
    done = run_simulation(
        *("--policy", "lru", "--policy", "chain", "--admission", "all", "--admission", "adaptive"),
        *("--capacity-blocks", "100,1000", "--requests", "300"),
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if " + " in line]
    assert [row[:3] for row in rows] == [[p, "+", a] for p in ("lru", "chain") for a in ("all", "adaptive")]
    assert all(0 < float(row[3]) <= float(row[6]) < 1 for row in rows)


def test_the_command_takes_a_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 1024, "hash_ids": [0, 1]}\n' * 4)
    done = run_simulation("--trace", str(trace), "--policy", "lru", "--admission", "all", "--capacity-blocks", "10")
    assert done.returncode == 0, done.stderr
    assert "0.750 / 2" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--capacity-blocks", "100,x"), "100,x"),
        (("--capacity-blocks", "0"), "'0'"),
        (("--policy", "least"), "least"),
        (("--blocks", "1"), "no request"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: tuple[str, ...], message: str) -> None:
    done = run_simulation(*arguments)
    assert done.returncode == 2
    assert message in done.stderr


def test_a_folder_is_needed_for_what_is_no_simulation(tmp_path: Path) -> None:
    for arguments in ([], [str(tmp_path), "--capacity-blocks", "1,2"]):
        done = subprocess.run(
            [sys.executable, "-m", "kvfuse.cli", "replay", *arguments], capture_output=True, text=True
        )
        assert done.returncode == 2, done.stderr
