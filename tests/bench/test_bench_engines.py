"""Engines' storage patterns in tiny sizes: they move the right bytes on every side, and their figures are all there."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from mounting import KvfuseMount

from kvfuse.errors import KvfuseError
from kvfuse.sizes import KIB, MIB
from kvfuse.usrbio.client.iov import new_memory
from kvfuse_bench.daemons import Daemon
from kvfuse_bench.engines import compare
from kvfuse_bench.engines.blocks import CALLS, MEMCPY, RING, STORE, TOGETHER, BlockCalls
from kvfuse_bench.engines.compare import (
    PATTERNS,
    TMPFS,
    EngineSetting,
    Pattern,
    Refused,
    Result,
    bench_engine,
    bench_pattern,
)
from kvfuse_bench.engines.files import sglang_file
from kvfuse_bench.engines.kernel_queues import IoUring, LinuxAio, Transfer
from kvfuse_bench.engines.measuring import DAEMON, OPERATIONS, PROCESSOR, RATE, Memory, Meter
from kvfuse_bench.engines.slots import require_shared_memory
from kvfuse_bench.ringwork import ring_session
from kvfuse_bench.rounds import Measured

pytestmark = [pytest.mark.engines("lmdb+file"), pytest.mark.ring(3)]  # about calls: below the mount one pair is enough

SIZE = 256 * KIB


@pytest.fixture
def setting(tmp_path: Path) -> EngineSetting:
    folders = [tmp_path / name for name in ("volumes", "memory")]
    for folder in folders:
        folder.mkdir()
    return EngineSetting(*folders, round_count=1, size=SIZE)


@pytest.fixture
def daemon(shared_mount: KvfuseMount) -> Daemon:
    return Daemon(shared_mount.point, shared_mount.pid, 0.0)


# -- patterns of files ------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", [one for some in PATTERNS.values() for one in some], ids=lambda one: one.title)
def test_a_pattern_on_every_side(setting: EngineSetting, daemon: Daemon, pattern: Pattern) -> None:
    try:
        pattern.probe()
    except KvfuseError as error:
        pytest.skip(str(error))
    results = {result.phase: result for result in bench_pattern(pattern, setting, daemon)}
    assert {"write", "read"} <= results.keys()
    assert pattern.targets.keys() <= results.keys()
    for result in results.values():
        assert all(metrics[OPERATIONS].value > 0 for metrics in result.sides.values())
    for phase in ("write", "read"):
        sides = results[phase].sides
        assert sides.keys() >= {compare.FILES, TMPFS, results[phase].reference}
        assert (compare.RINGS in sides) == (pattern.rings is not None)
        assert (compare.ADAPTER in sides) == (pattern.adapter is not None)
    figure, *more = results["write"].to_figures()
    assert [one.unit for one in more] == [PROCESSOR] * (pattern.adapter is not None)
    assert figure.unit == RATE
    assert figure.ratio is not None
    assert figure.ratio > 0
    assert list(setting.volumes.iterdir()) == list(setting.memory.iterdir()) == []
    assert list(daemon.mountpoint.glob("round-*")) == []


def test_processor_time_of_the_daemon_counts_only_where_there_is_one(setting: EngineSetting, daemon: Daemon) -> None:
    write, *_ = bench_pattern(PATTERNS["kvbm-disk"][0], replace(setting, size=16 * MIB), daemon)
    ours, tmpfs = write.sides[compare.FILES], write.sides[TMPFS]
    assert ours[PROCESSOR].value >= ours[DAEMON].value > 0
    assert tmpfs[DAEMON].value == 0


def test_wrong_bytes_are_noticed(tmp_path: Path) -> None:
    with Memory(4 * KIB, 8) as memory:
        sglang_file(tmp_path, Meter(), memory)
        memory.check()
        memory.loaded(3)[17] ^= 1
        with pytest.raises(KvfuseError, match="block 3 of 4096 bytes is not what was written"):
            memory.check()


def test_all_that_is_wanted_of_a_result_has_to_be_met() -> None:
    def side(rate: float, processor: float) -> dict[str, Measured]:
        return {RATE: Measured("", [rate]), OPERATIONS: Measured("", [1.0]), PROCESSOR: Measured("", [processor])}

    result = Result(
        "some", "read", {compare.ADAPTER: side(2.0, 1.2), "ext4": side(1.0, 1.0)}, "ext4", 1.5, processor=1.3
    )
    assert result.met
    assert not result._replace(target=2.5).met
    assert not result._replace(processor=1.1).met
    assert result._replace(target=None, processor=None).met is None


def test_what_the_kernel_refuses_is_named(setting: EngineSetting, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise KvfuseError("io_uring_setup: Operation not permitted")

    monkeypatch.setitem(PATTERNS, "nixl-posix", (PATTERNS["nixl-posix"][0]._replace(probe=refuse),))
    (refused,) = bench_engine("nixl-posix", setting)
    assert refused == Refused("NIXL POSIX, linux-aio, 1 MiB", "io_uring_setup: Operation not permitted")


def test_too_little_shared_memory_is_said_before_it_is_used() -> None:
    with pytest.raises(KvfuseError, match=r"it needs 256TiB in /dev/shm, which has "):
        require_shared_memory(1 << 40)


# -- the kernel's queues ----------------------------------------------------------------------------


@pytest.mark.parametrize("queue", [LinuxAio, IoUring])
def test_a_queue_goes_round_its_ring(tmp_path: Path, queue: type[LinuxAio] | type[IoUring]) -> None:
    (content, _), (found, _) = new_memory(48 * KIB), new_memory(48 * KIB)
    content[:] = np.arange(len(content)) % 251
    try:
        opened = queue(4)
    except KvfuseError as error:
        pytest.skip(str(error))
    with opened, (tmp_path / "file").open("w+b", buffering=0) as file:
        for memory, for_read in ((content, False), (found, True)):
            start = memory.ctypes.data
            for number in range(4):
                offsets = [(3 * number + index) * 4 * KIB for index in range(3)]
                transfers = [Transfer(start + offset, 4 * KIB, offset) for offset in offsets]
                assert opened.move(file.fileno(), transfers, for_read=for_read) == 12 * KIB
        assert (found == content).all()
        with pytest.raises(KvfuseError, match="Bad file descriptor"):
            opened.move(1 << 20, [Transfer(content.ctypes.data, 4 * KIB, 0)], for_read=True)


# -- calls ------------------------------------------------------------------------------------------


@pytest.fixture
def calls(shared_mount: KvfuseMount) -> Iterator[BlockCalls]:
    pattern = np.random.default_rng(0).integers(0, 256, 4 * MIB, np.uint8)
    with ring_session(shared_mount.point, pattern) as session:
        yield BlockCalls(session, 0.0)


@pytest.mark.parametrize("cell", CALLS, ids=lambda cell: cell.name)
def test_a_call_on_every_side(calls: BlockCalls, cell: compare.Cell) -> None:
    with calls.of(cell) as made:
        for name, run in made.sides.items():
            meter = Meter()
            run(meter)
            (phase,) = meter.phases
            assert phase.operations >= 3 or cell.operation == "put", name
            assert (RATE in phase.metrics()) == (cell.operation not in ("view", "exists"))
    assert (STORE in made.sides) == (cell.operation in ("put", "get", "exists"))
    assert RING in made.sides
    assert (MEMCPY in made.sides) == (cell.operation != "exists")


def test_readers_at_once(calls: BlockCalls) -> None:
    with calls.together(TOGETHER[1]) as made:
        for run in made.sides.values():
            meter = Meter()
            run(meter)
            (phase,) = meter.phases
            assert phase.operations == 4 * 3 * TOGETHER[1].depth
            assert phase.client_seconds > 0


@pytest.mark.parametrize("scale", [0.0, 0.1, 0.37, 1.0])
def test_calls_walk_over_whole_blocks(setting: EngineSetting, scale: float) -> None:
    size = replace(setting, size=256 * MIB, scale=scale).calls_size
    assert size > 0
    assert all(size % cell.size == 0 for cell in (*CALLS, *TOGETHER))


def test_targets_are_of_calls_that_are_measured() -> None:
    assert {*compare.CALL_TARGETS, *compare.LEAST} <= set(CALLS)


# -- the command ------------------------------------------------------------------------------------

run_bench = partial(subprocess.run, capture_output=True, text=True, timeout=200, check=False)


def test_the_command_writes_tables_and_json(tmp_path: Path) -> None:
    words = ("--quick", "--rounds", "1", "--size", "4MiB", "--only", "sglang-file", "--folder", str(tmp_path))
    command = [sys.executable, "-m", "kvfuse.cli", "bench", "engines", *words]
    done = run_bench(command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for words_of_table in ("CPU s/GB", "kvfuse files", "tmpfs", "≥ 0.5x", "96 absent"):
        assert words_of_table in done.stdout
    (path,) = (tmp_path / "bench-results").iterdir()
    figures = {figure["name"].split(": ")[1] for figure in json.loads(path.read_text())["figures"]}
    assert figures == {"96 absent", "write", "96 exist", "read", "read again"}
    done = run_bench([*command, "--size", "none"], cwd=tmp_path)
    assert done.returncode == 2
    assert "'none' is not a size" in done.stderr
