"""The cluster benchmark: block sets notice any mistake, both file systems are mounted, all rows come, all is ended."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from mounting import mount_rows

from kvfuse.bench.cluster import ABSENT, CLUSTER_BENCHES, COUNTS, ENGINE_READS, OPERATIONS, ROUND_TRIPS, WRITERS
from kvfuse.bench.cluster_blocks import BlockSet
from kvfuse.bench.cluster_mounts import ClusterServers, ClusterSetting, cluster_servers, daemon_stats, mounted
from kvfuse.bench.daemons import READ_AHEAD, ceph_fuse_mount
from kvfuse.bench.rounds import Measured, alternate_rows
from kvfuse.cluster.ceph import PROGRAMS
from kvfuse.cluster.process import wait_until
from kvfuse.errors import KvfuseError, MountError
from kvfuse.sizes import KIB, format_size

START_SECONDS_MAX = 120.0
"""of the servers and the first mount"""
NEEDED = (*PROGRAMS, "ceph-mds", "ceph-fuse", "etcd")


def left_behind(folder: Path) -> list[str]:
    """Processes whose command line names something in ``folder``, and what is mounted there."""
    found = [row for row in mount_rows() if f" {folder}/" in row]
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if os.fsencode(folder) + b"/" in words:
            found.append(f"{process.name} {words!r}")
    return found


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder whose name leaves room for the servers' sockets. Nothing may run in it at the end."""
    with tempfile.TemporaryDirectory(prefix="kvfuse-bench-") as folder:
        yield Path(folder)
        assert left_behind(Path(folder)) == []


# -- parts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("writer_count", [1, 3])
def test_a_set_of_blocks_is_stored_read_and_verified(tmp_path: Path, writer_count: int) -> None:
    blocks = BlockSet(tmp_path, "some", 6, 4096, writer_count)
    assert blocks.store(fsync=True, until_synced=True) > 0
    stored = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    assert len({path.read_bytes() for path in stored}) == 6
    assert len({path.parent for path in stored}) == writer_count
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "some").rename(elsewhere / "some")
    seen = blocks.seen_from(elsewhere)
    seen.wait_for_last(1.0)
    assert seen.read() > 0
    seen.verify()
    with pytest.raises(FileNotFoundError):
        blocks.verify()


@pytest.mark.parametrize("content", [b"", bytes(4096), bytes(4097), b"\xff" * 4096])
def test_a_wrong_block_is_named(tmp_path: Path, content: bytes) -> None:
    blocks = BlockSet(tmp_path, "some", 3, 4096)
    blocks.store()
    path = max(blocks.folder.iterdir())
    path.write_bytes(content)
    for check in (blocks.read, blocks.verify):
        with pytest.raises(KvfuseError, match=path.name):
            check()
    with pytest.raises(KvfuseError, match="is not there after 0 s"):
        replace(blocks, label="other").wait_for_last(0.0)


def test_rows_of_several_sides_alternate() -> None:
    calls: list[tuple[str, int]] = []

    def fast(number: int) -> dict[str, float]:
        calls.append(("fast", number))
        return {"rate": 10.0 * number, "cost": 1.0}

    def slow(number: int) -> dict[str, float]:
        calls.append(("slow", number))
        return {"rate": number}

    rows = alternate_rows({"fast": fast, "slow": slow}, 2)
    assert calls == [("slow", 0), ("fast", 0), ("fast", 1), ("slow", 1), ("slow", 2), ("fast", 2)]
    assert rows == {
        "rate": [Measured("fast", [10, 20]), Measured("slow", [1, 2])],
        "cost": [Measured("fast", [1, 1])],
    }


# -- on servers -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def servers() -> Iterator[ClusterServers]:
    """etcd, and Ceph with a CephFS, as the command starts them."""
    missing = [program for program in NEEDED if shutil.which(program) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}: scripts/test installs them")
    steps: list[str] = []
    with tempfile.TemporaryDirectory(prefix="kvfuse-bench-") as folder:
        with cluster_servers(Path(folder), steps.append) as servers:
            yield servers
        assert left_behind(Path(folder)) == []
    assert steps[-1] == "starting Ceph: making a CephFS"


@pytest.fixture
def setting(servers: ClusterServers, short_path: Path) -> ClusterSetting:
    """Eight operations of each kind."""
    return ClusterSetting(short_path, short_path, round_count=1, scale=0.0, servers=servers)


@pytest.mark.needs("ceph")
@pytest.mark.root
def test_a_ceph_file_system_is_shared_by_its_mounts(servers: ClusterServers, short_path: Path) -> None:
    conf_file = servers.ceph.conf_file
    with ceph_fuse_mount(conf_file, short_path / "a") as a, ceph_fuse_mount(conf_file, short_path / "b") as b:
        blocks = BlockSet(a.mountpoint, "shared", 8, 64 * KIB)
        blocks.store(until_synced=True)
        seen = blocks.seen_from(b.mountpoint)
        seen.wait_for_last(30.0)
        seen.verify()
        assert daemon_stats(a.mountpoint) is None
        device = os.stat(b.mountpoint).st_dev
        knob = Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb")
        assert int(knob.read_text()) == READ_AHEAD // KIB


@pytest.mark.needs("ceph")
@pytest.mark.root
@pytest.mark.parametrize("name", CLUSTER_BENCHES)
def test_all_rows_are_measured(name: str, setting: ClusterSetting) -> None:
    figures = {figure.name: figure for figure in CLUSTER_BENCHES[name](setting)}
    sizes = [format_size(size) for size in COUNTS]
    match name.split("-", 1):
        case ["store", size]:
            ways = ("1 writer, relaxed", f"{WRITERS} writers, strict")
            what = ("store", ROUND_TRIPS, OPERATIONS)
            assert list(figures) == [f"{row} {size} blocks, {way}" for way in ways for row in what]
            others = [{other.name for other in figure.others} for figure in figures.values()]
            cached = {"ceph-fuse, fsync"} if size != sizes[-1] else set()
            assert others == [{"strict"} | cached, *[{"strict"}] * 2, *[{"relaxed"}] * 3]
            assert all((figure.reference is not None) == row.startswith("store ") for row, figure in figures.items())
        case ["absent"]:
            assert list(figures) == [f"{ABSENT}, in a folder of its own"]
        case ["disk", "tier"]:
            assert list(figures) == [*(f"read {size} blocks again" for size in sizes), ENGINE_READS]
            assert figures[ENGINE_READS].met
            assert figures[ENGINE_READS].reference is not None
            assert figures[ENGINE_READS].reference.value > 0
        case _:
            how = {"cold-read": "cold: a fresh mount", "other-host": "written by another host"}[name]
            assert list(figures) == [*(f"read {size} blocks, {how}" for size in sizes), f"{ABSENT}, {how}"]
            assert [figure.ratio_target for figure in figures.values()] == [None, None, 1.0, None]
    for figure in figures.values():
        assert all(value.value >= 0 and len(value.rounds) == 1 for value in (figure.measured, *figure.others))


@pytest.mark.needs("ceph")
@pytest.mark.root
def test_a_side_that_cannot_be_mounted_says_why(setting: ClusterSetting) -> None:
    setting.volumes.joinpath("wrong.conf").write_text("fsid = nothing\n")
    with (
        pytest.raises(MountError, match=r"ceph-fuse .* ended with status \d+"),
        mounted(setting, {"wrong": lambda point: ceph_fuse_mount(setting.volumes / "wrong.conf", point)}),
    ):
        pass


# -- the command ------------------------------------------------------------------------------------


@pytest.mark.needs("ceph")
@pytest.mark.root
@pytest.mark.parametrize(("number", "begun"), [(signal.SIGINT, "/relaxed-a "), (signal.SIGTERM, "ceph-osd")])
def test_a_signal_ends_everything(number: int, begun: str, servers: ClusterServers, short_path: Path) -> None:
    """While it measures, and while it starts servers. ``servers`` say that all is installed."""
    words = ["bench", "cluster", "--only", "cold-read", "--folder", str(short_path), "--output", str(short_path)]
    # where this run is a shell's background job, SIGINT is ignored, and would be by the command
    command = ["env", "--default-signal=INT", sys.executable, "-m", "kvfuse.cli", *words]
    with subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL) as process:
        has_begun = wait_until(lambda: any(begun in row for row in left_behind(short_path)), START_SECONDS_MAX)
        process.send_signal(number)
        assert process.wait(60) != 0
    assert has_begun, f"{begun} was not to be seen"
    assert left_behind(short_path) == []


@pytest.mark.needs("ceph")
@pytest.mark.root
def test_the_command_writes_a_table_and_json(servers: ClusterServers, short_path: Path) -> None:
    words = ["--quick", "--rounds", "1", "--only", "absent", "--folder", str(short_path), "--output", str(short_path)]
    command = [sys.executable, "-m", "kvfuse.cli", "bench", "cluster", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert "ceph-fuse" in done.stdout
    (path,) = short_path.glob("*.json")
    (figure,) = json.loads(path.read_text())["figures"]
    assert (figure["name"], figure["reference"]["name"]) == (f"{ABSENT}, in a folder of its own", "ceph-fuse")
