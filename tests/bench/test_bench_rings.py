"""The ring benchmarks: what they compare is the same work, checked; a store of another environment; the command."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from mounting import KvfuseMount, wait_until

from kvfuse.errors import KvfuseError
from kvfuse.sizes import KIB, MIB
from kvfuse_bench import rings
from kvfuse_bench.batches import Cell, compare
from kvfuse_bench.daemons import cpu_seconds_of
from kvfuse_bench.mooncake import mooncake_store
from kvfuse_bench.references import Bytes, file_reads, file_writes, memcpy, memory_file
from kvfuse_bench.rings import RING_BENCHES, RingSetting, bench_idle, bench_operation
from kvfuse_bench.ringwork import OPERATIONS, Session, ring_session
from kvfuse_bench.timing import BATCHES_MIN, time_batches

pytestmark = [
    pytest.mark.engines("lmdb+file"),
    pytest.mark.ring(3),
]  # about memory that is shared with clients: below it one pair is enough

SET_SIZE = 4 * MIB


@pytest.fixture
def pattern(seed: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, SET_SIZE, np.uint8)


# -- timing -----------------------------------------------------------------------------------------


def test_every_batch_is_timed_and_there_are_a_few() -> None:
    numbers: list[int] = []
    assert len(time_batches(numbers.append, 0.0, 100)) == BATCHES_MIN
    assert len(time_batches(numbers.append, 60.0, 5)) == 5
    assert numbers == [0, 1, 2, 0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("cell", "unit", "value"),
    [
        (Cell("read", MIB, 8), "GB/s", 8 * MIB * 2 / 0.5 / 1e9),
        (Cell("read", 4 * KIB, 8), "/s", 8 * 2 / 0.5),
        (Cell("view", 4 * MIB, 8), "us each", 0.5 / 2 / 8 * 1e6),
        (Cell("exists", 4 * KIB, 1000), "/s", 1000 * 2 / 0.5),
    ],
)
def test_units(cell: Cell, unit: str, value: float) -> None:
    assert cell.unit == unit
    assert cell.value([0.2, 0.3]) == pytest.approx(value)


def test_a_figure_has_its_references_and_the_times_of_its_batches() -> None:
    cell = Cell("get", MIB, 1)
    seconds = {0: [9.0], 1: [0.001, 0.003], 2: [0.002, 0.002]}
    figure = compare(cell, seconds.__getitem__, {"memcpy": lambda _: [0.001], "other": lambda _: [0.004]}, 2)
    assert figure.measured.rounds == [pytest.approx(MIB / 0.002 / 1e9)] * 2
    assert figure.ratio == pytest.approx(0.5)
    beside = {other.name: other.rounds for other in figure.others}
    assert beside["other"] == [pytest.approx(MIB / 0.004 / 1e9)] * 2
    assert beside["batch median us"] == [pytest.approx(2000)] * 2
    assert beside["batch 99 % us"] == [pytest.approx(2980), pytest.approx(2000)]
    assert figure.to_json()["others"][-1]["name"] == "other"


# -- references -------------------------------------------------------------------------------------


def test_copies_walk_over_everything(pattern: Bytes, tmp_path: Path) -> None:
    size, depth = 64 * KIB, 8
    batch_count = SET_SIZE // size // depth
    copied, read = np.zeros_like(pattern), np.zeros_like(pattern)
    with memory_file(tmp_path, pattern) as descriptor:
        copies = [memcpy(pattern, copied, size, depth), file_reads(descriptor, read, size, depth)]
        for batch in copies:
            for number in range(batch_count, 2 * batch_count):
                batch(number)
        assert np.array_equal(copied, pattern)
        assert np.array_equal(read, pattern)
        changed = pattern[::-1].copy()
        for number in range(batch_count):
            file_writes(descriptor, changed, size, depth)(number)
        assert (tmp_path / "reference").read_bytes() == changed.tobytes()
    assert not (tmp_path / "reference").exists()


def test_a_file_that_gives_less_is_no_reference(pattern: Bytes, tmp_path: Path) -> None:
    with memory_file(tmp_path, pattern[:MIB]) as descriptor, pytest.raises(KvfuseError, match="a part"):
        file_reads(descriptor, pattern, 2 * MIB, 1)(0)


# -- a store of another environment -----------------------------------------------------------------

STAND_IN = """
import ctypes

class MooncakeDistributedStore:
    def setup(self, *arguments):
        print("a library that prints")
        self.blocks = {}
        return 0
    def register_buffer(self, address, size):
        return 0
    def put_from(self, key, address, size):
        self.blocks[key] = ctypes.string_at(address, size)
        return 0
    def batch_put_from(self, keys, addresses, sizes):
        return [self.put_from(*row) for row in zip(keys, addresses, sizes)]
    def batch_get_into(self, keys, addresses, sizes):
        found = [self.blocks.get(key) for key in keys]
        return [-1 if data is None else len(data) for data in found]
    def batch_is_exist(self, keys):
        return [int(key in self.blocks) for key in keys]
    def batch_remove(self, keys, force):
        return [0 if self.blocks.pop(key, None) else -704 for key in keys]
    def remove_all(self, force):
        self.blocks.clear()
    def close(self):
        pass
"""
MASTER = """#!{python}
import socket, sys
(port,) = [word.partition("=")[2] for word in sys.argv if word.startswith("--rpc_port=")]
listener = socket.create_server(("127.0.0.1", int(port)))
while True:
    listener.accept()
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with a store that keeps its blocks in a dict."""
    base = tmp_path_factory.mktemp("environment")
    venv.create(base, symlinks=True)
    python = base / "bin" / "python"
    package = next(base.glob("lib/python*/site-packages")) / "mooncake"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "store.py").write_text(STAND_IN)
    master = base / "bin" / "mooncake_master"
    master.write_text(MASTER.format(python=python))
    master.chmod(0o755)
    return python


@pytest.mark.parametrize("over_tcp", [False, True])
def test_the_store_does_what_it_is_asked(environment: Path, over_tcp: bool) -> None:
    with mooncake_store(environment, 4 * SET_SIZE, SET_SIZE, over_tcp=over_tcp) as store:
        assert store.ask("load", size=4096, count=100) == []
        for operation in ("get", "exists"):
            times = store.ask(operation, size=4096, count=100, depth=50, seconds=0.0)
            assert len(times) == BATCHES_MIN
        assert len(store.timing("put", size=4096, count=20, depth=10, seconds=1.0)(1)) == 2
        with pytest.raises(KvfuseError, match=r"batch_get_into answers \[-1"):
            store.ask("get", size=8192, count=100, depth=1, seconds=0.0)
        store.ask("drop")
        with pytest.raises(KvfuseError, match="does not find"):
            store.ask("exists", size=4096, count=100, depth=10, seconds=0.0)


def test_an_environment_without_the_store(tmp_path: Path) -> None:
    venv.create(tmp_path, symlinks=True)
    python = tmp_path / "bin" / "python"
    with pytest.raises(KvfuseError, match="mooncake_master: No such file"), mooncake_store(python, MIB, MIB):
        pass
    (tmp_path / "bin" / "mooncake_master").symlink_to("/bin/true")
    with pytest.raises(KvfuseError, match="does not listen"), mooncake_store(python, MIB, MIB):
        pass


# -- rings, on a mount ------------------------------------------------------------------------------


@pytest.fixture
def session(shared_mount: KvfuseMount, pattern: Bytes) -> Iterator[Session]:
    with ring_session(shared_mount.point, pattern) as session:
        session.iov.array[:] = pattern
        yield session


@pytest.mark.parametrize(("size", "depth"), [(4 * KIB, 1), (4 * KIB, 256), (MIB, 4)])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_batches_move_the_right_bytes(session: Session, operation: str, size: int, depth: int) -> None:
    with OPERATIONS[operation](session, size) as work:
        work.check(depth)
        batch = work.batch(depth)
        for number in range(5):
            batch(number)
        work.settle()
        assert work.batch_count_max(depth) >= 1
    left = [path for path in session.mountpoint.rglob("*") if path.is_file() and ".kvfuse" not in path.parts]
    assert left == []


def test_wrong_bytes_are_noticed(session: Session) -> None:
    size = 64 * KIB
    with OPERATIONS["read"](session, size) as work:
        (session.mountpoint / f"file-{size}").write_bytes(bytes(SET_SIZE))
        with pytest.raises(KvfuseError, match="is not what was written"):
            work.check(8)
    with OPERATIONS["get"](session, size) as work:
        for path in (session.mountpoint / f"blocks-{size}").iterdir():
            path.write_bytes(bytes(size))
        with pytest.raises(KvfuseError, match="is not what was written"):
            work.check(8)


def test_a_block_that_went_is_noticed(session: Session) -> None:
    size = 64 * KIB
    with OPERATIONS["get"](session, size) as work:
        batch = work.batch(1)
        folder = session.mountpoint / f"blocks-{size}"
        stored = {path.name: path.read_bytes() for path in folder.iterdir()}
        for path in folder.iterdir():
            path.unlink()
        with pytest.raises(KvfuseError, match="No such file"):
            batch(0)
        for name, data in stored.items():
            (folder / name).write_bytes(data)


# -- the benchmarks and the command -----------------------------------------------------------------


@pytest.fixture
def setting(tmp_path: Path) -> RingSetting:
    folders = [tmp_path / name for name in ("volumes", "memory")]
    for folder in folders:
        folder.mkdir()
    return RingSetting(
        *folders, round_count=1, scale=0.02, sizes=(4 * KIB, MIB, 4 * MIB), depths=(1, 8, 256), set_size=8 * MIB
    )  # fmt: skip


def test_get_beside_everything(setting: RingSetting, environment: Path) -> None:
    figures = {figure.name: figure for figure in bench_operation("get", replace(setting, mooncake=environment))}
    assert list(figures) == [
        *(f"get 4KiB, {depth} at once" for depth in (1, 8, 256)),
        "get 1MiB, 1 at once",
        "get 1MiB, 8 at once",
        "get 1MiB, 8 at once: of Mooncake",
        "get 1MiB, 8 at once: of Mooncake TCP",
        "get 4MiB, 1 at once",
    ]
    figure = figures["get 1MiB, 8 at once"]
    assert figure.ratio_target == 0.7
    assert figure.reference is not None
    assert figure.reference.name == "memcpy"
    names = [other.name for other in figure.others]
    assert names == ["batch median us", "batch 99 % us", "tmpfs pread", "Mooncake", "Mooncake TCP"]
    assert all(other.value > 0 for other in (figure.measured, figure.reference, *figure.others))
    assert list(setting.volumes.iterdir()) == list(setting.memory.iterdir()) == []


def test_targets_are_of_cells_that_are_measured() -> None:
    setting = RingSetting(Path(), Path())
    for cell in [*rings.RATIO_TARGETS, *rings.TARGETS, *rings.MOONCAKE_CELLS]:
        assert cell.operation in RING_BENCHES
        assert cell.size in setting.sizes
        assert cell.depth in setting.depths


def test_idle_rings_are_measured(setting: RingSetting) -> None:
    (figure,) = bench_idle(replace(setting, scale=0.0))
    assert figure.reference is not None
    assert 0 <= figure.measured.value < 100


def test_cpu_time_of_a_process_grows() -> None:
    with subprocess.Popen(["sh", "-c", "while :; do :; done"]) as busy:
        before = cpu_seconds_of(busy.pid)
        wait_until(lambda: cpu_seconds_of(busy.pid) > before, "some CPU time")
        busy.kill()


def run_bench(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvfuse.cli", "bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, cwd=tmp_path)


def test_the_command_writes_a_table_and_json(tmp_path: Path) -> None:
    words = ("--quick", "--rounds", "1", "--only", "exists", "--folder", str(tmp_path))
    done = run_bench(tmp_path, "ring", *words)
    assert done.returncode == 0, done.stderr
    assert "batch median us" in done.stdout
    (path,) = (tmp_path / "bench-results").iterdir()
    figures = {figure["name"]: figure for figure in json.loads(path.read_text())["figures"]}
    assert figures["exists, 1,000 keys a call: median"]["target"] == 1000
    assert "absent, 1,000 keys a call" in figures


def test_an_option_before_the_command_is_refused(tmp_path: Path) -> None:
    done = run_bench(tmp_path, "--quick", "ring")
    assert done.returncode == 2
    assert "stand behind it" in done.stderr
