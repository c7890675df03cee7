"""Traffic replayed on real caches: figures beside simulations, a clock that follows the traffic, namespaces that go."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import click
import pytest

from kvfuse.errors import ConfigError
from kvfuse_bench import cachereplay
from kvfuse_bench.cachefolder import is_in_cache, namespace_for, namespace_of
from kvfuse_bench.cachereplay import CacheReplay, replay_on_cache
from kvfuse_bench.commands.bench import bench
from kvfuse_bench.commands.replay import replay
from kvfuse_bench.daemons import kvfuse_mount
from kvfuse_bench.replay import ReplayPlan
from kvfuse_bench.simulate import Setup, simulate
from kvfuse_bench.textplot import chart
from kvfuse_bench.traffic import Generator, Request

pytestmark = pytest.mark.ring(3)

PLAN = ReplayPlan("llama-3-8b", 512, 4096, request_max=400)


@pytest.fixture(scope="module")
def point(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A mounted volume that is no cache."""
    folder = tmp_path_factory.mktemp("replay")
    with kvfuse_mount(folder / "volume", folder / "mnt", "capacity=64MiB") as daemon:
        yield daemon.mountpoint


def replayed(point: Path, setup: Setup, requests: list[Request] | None = None) -> CacheReplay:
    with namespace_for(point, setup) as folder:
        return replay_on_cache(requests or Generator(), folder, PLAN, lambda result: None)


@pytest.mark.parametrize(("policy", "admission"), [("lru", "all"), ("chain", "adaptive")])
def test_a_volume_hits_what_the_simulation_hits(point: Path, policy: str, admission: str) -> None:
    result = replayed(point, Setup(policy, admission, 2000))
    simulated = result.simulated()
    assert result.wrong == 0
    assert len(result.requests) == 400
    assert result.evicted > 0
    assert max(sample.blocks for sample in result.samples) <= 2000
    assert result.tally.hits == pytest.approx(simulated.hits, rel=0.03)
    assert result.tally.written == pytest.approx(simulated.written, rel=0.1)
    assert not [name for name in os.listdir(point) if name.startswith("replay")], "its namespace is gone"


def test_a_fast_replay_learns_the_pace_of_the_traffic(point: Path) -> None:
    """What clients asked for counts before the clock moves on: else seconds of a replay pass for a chain's pace."""
    with namespace_for(point, Setup("chain", "adaptive", 2000)) as folder:
        result = replay_on_cache(Generator(), folder, replace(PLAN, request_max=1500), lambda result: None)
    simulated = result.simulated()
    assert result.tally.hits == pytest.approx(simulated.hits, rel=0.08)
    assert result.tally.written == pytest.approx(simulated.written, rel=0.15)
    assert result.tally.written < result.simulated_lru().written / 3


def test_the_clock_follows_the_traffic(point: Path) -> None:
    blocks = tuple(range(100))
    with namespace_for(point, Setup("lru", "all", 500)) as folder:
        requests = [Request(1000 * second, 512 * 100, blocks) for second in (0, 4000)]
        replay_on_cache(requests, folder, PLAN, lambda result: None)
        gaps = namespace_of(folder)["cache"]["reuse_gap"]
    assert gaps["sum"] / sum(gaps["counts"]) == pytest.approx(4000, rel=0.01)


def test_limits(point: Path) -> None:
    requests = [Request(0, 512 * 100, tuple(range(100 * number, 100 * number + 100))) for number in range(3)]
    with namespace_for(point, Setup("lru", "all", 500)) as folder:
        result = replay_on_cache(requests, folder, replace(PLAN, block_max=150), lambda result: None)
        assert [len(request.block_ids) for request in result.requests] == [100, 50]
        ended = replay_on_cache(requests, folder, replace(PLAN, duration=1e-6), lambda result: None)
    assert (ended.requests, ended.found_blocks) == ([], 150)
    assert not ended.begins_empty


def test_a_request_that_the_end_cuts_off_counts_as_far_on_both_sides(
    point: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the cache and for simulations, wherever in it that was: its blocks are there, or not, with gaps."""
    requests = [
        Request(0, 0, tuple(range(0, 200, 2))),
        Request(1, 0, tuple(range(100))),
        Request(2, 0, (*range(90), *range(1000, 1300))),
    ]
    setup = Setup("lru", "all", 5000)
    with namespace_for(point, setup) as folder:
        for number_of_looks in range(1, 20):
            looks = iter([True] * number_of_looks)
            monkeypatch.setattr(cachereplay, "_has_time", lambda plan, start, looks=looks: next(looks, False))
            os.setxattr(folder, "user.kvfuse.clear", b"now")
            result = replay_on_cache(requests, folder, PLAN, lambda result: None)
            assert result.requests[:-1] == requests[: len(result.requests) - 1]
            for asked, request in zip(result.requests, requests, strict=False):
                assert asked.block_ids == request.block_ids[: len(asked.block_ids)]
            assert result.tally.asked == sum(len(request.block_ids) for request in result.requests)
            same = simulate(result.requests, setup)
            assert (result.tally.hits, result.tally.written) == (same.hits, same.written)
    assert len(result.requests) == 3


def test_progress_is_told_before_a_long_request_is_done(point: Path) -> None:
    """With large blocks one request takes many seconds."""
    told: list[int] = []
    request = next(iter(Generator()))
    with namespace_for(point, Setup("lru", "all", 2000)) as folder:
        result = replay_on_cache([request], folder, PLAN, lambda result: told.append(len(result.requests)))
    assert len(result.requests) == 1
    assert 0 in told


def test_which_folders_are_in_caches(point: Path, tmp_path: Path) -> None:
    assert not is_in_cache(tmp_path)
    assert not is_in_cache(point)
    with namespace_for(point, Setup("lru", "all", 10)) as folder:
        (folder / "inner").mkdir()
        assert is_in_cache(folder / "inner")
        (folder / "inner").rmdir()
    with pytest.raises(ConfigError, match="no kvfuse mount"):
        namespace_of(tmp_path)


def test_the_command_compares_policies(point: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvfuse.cli", "replay", str(point), "--requests", "60", "--block-size", "4096"]
    command += ["--tokens-per-block", "512", "--policy", "lru", "--policy", "chain", "--admission", "all"]
    page = tmp_path / "run.html"
    done = subprocess.run(
        [*command, "--capacity-blocks", "200,400", "--html", str(page)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if " + " in line and "requests" not in line]
    assert [(row[0], row[3]) for row in rows] == [("lru", "200"), ("lru", "400"), ("chain", "200"), ("chain", "400")]
    assert done.stderr.splitlines()[0] == f"replaying on {point}, for 60 requests"
    assert "GB/s on this machine" in done.stderr
    assert "chain + all, simulated" in page.read_text()
    stats = json.loads((point / ".kvfuse" / "stats").read_bytes())
    assert len(stats["namespaces"]) == 1


def test_policies_are_for_caches(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvfuse.cli", "replay", str(tmp_path), "--policy", "lru"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "caches of kvfuse" in done.stderr


def test_a_chart() -> None:
    assert chart("title", [0, 0.5, 1], 1.0, "100 %") == [
        "title",
        "    100 % ┤  █",
        "          ┤  █",
        "          ┤ ▄█",
        "          ┤ ██",
        "        0 ┤ ██",
    ]


FOLDERS = {"target", "folder", "mounts", "mount"}


def test_folders_of_commands_that_measure_are_whole_paths() -> None:
    """A relative one is below the mount, for rings, and below the caller's folder, for files."""

    def commands(command: click.Command) -> Iterator[click.Command]:
        yield command
        for inner in command.commands.values() if isinstance(command, click.Group) else ():
            yield from commands(inner)

    found = [option for command in (*commands(bench), replay) for option in command.params if option.name in FOLDERS]
    assert len(found) > 6
    assert all(isinstance(option.type, click.Path) and option.type.resolve_path for option in found)


def test_a_relative_folder_is_the_callers(point: Path) -> None:
    words = "--requests 30 --tokens-per-block 512 --block-size 4096 --capacity-blocks 500 --policy lru --admission all"
    shown = []
    for target in (str(point), point.name):
        command = [sys.executable, "-m", "kvfuse.cli", "replay", target, *words.split()]
        done = subprocess.run(command, cwd=point.parent, capture_output=True, text=True, timeout=200, check=True)
        shown.append([line.split() for line in done.stdout.splitlines() if "blocks written" in line])
        assert os.listdir(point) == [], "nothing is left, and nothing was beside its namespace"
    assert shown[0] == shown[1] != []
