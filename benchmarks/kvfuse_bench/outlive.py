"""A mount whose daemon is killed, again and again: for how long calls wait, and what its blocks in memory are then.

Each cell is a volume of its own, with a tier of some bytes and blocks of one size, somewhat more of them than the tier
has room for. They are put, and each is read once; then the daemon is killed, and each is read once more.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from kvfuse.errors import KvfuseError
from kvfuse.sizes import KIB, MIB, format_size
from kvfuse.usrbio.client import BlockStore
from kvfuse_bench.content import BlockContent, block_key
from kvfuse_bench.daemons import kvfuse_mount
from kvfuse_bench.ringwork import connect_when_open
from kvfuse_cluster.process import wait_until

SIZES = tuple(round(1e9 * share) for share in (0.25, 0.5, 1, 2, 4, 8))
BLOCK_SIZES = (64 * KIB, MIB, 4 * MIB)
NAMESPACE = "bench-outlive"
MORE = 1.25
"""blocks, beside those that the tier has room for"""
BATCH_SIZE, BATCH_BLOCKS = 8 * MIB, 64
DEADLINE_S = 60.0
SETTLE_SECONDS_MAX = 300.0
GOAL_SIZE, GOAL_SECONDS = 100_000_000_000, 1.0
"""of arenas, for which the adoption is to take no longer"""


class Cell(NamedTuple):
    """Bytes of the tier, and of a block."""

    size: int
    block_size: int
    standby: bool
    """a daemon waits to take over"""

    @property
    def name(self) -> str:
        return f"{self.size / 1e9:g} GB, blocks of {format_size(self.block_size)}" + ", stand-by" * self.standby


@dataclass
class Outlived:
    """What was measured of a cell. Times in seconds, of each round."""

    cell: Cell
    blocks: int
    """in the tier, when the daemon was killed first"""
    arenas: int
    arena_bytes: int
    """of memory that they took"""
    ratio_before: float
    """share of the blocks that were read which came from memory"""
    ratio_after: float
    read_before: float
    """seconds of that pass"""
    read_after: float
    """and of the first one after the kill: each block is compared with its checksums"""
    adopted: list[int] = field(default_factory=list)
    """blocks that each next daemon found"""
    adoption: list[float] = field(default_factory=list)
    """from the first look at what was left until the tier has it"""
    stalls: list[float] = field(default_factory=list)
    """from a kill to the first answer, as a caller has it"""
    upgrades: list[float] = field(default_factory=list)
    """calls waited at an upgrade"""

    def to_json(self) -> dict[str, Any]:
        fields = {name: value for name, value in vars(self).items() if name != "cell"}
        return {**self.cell._asdict(), **fields}


def cells(sizes: Sequence[int], block_sizes: Sequence[int]) -> list[Cell]:
    """All of them, and the smallest and the largest once more, with a daemon that stands by."""
    found = [Cell(size, block_size, standby=False) for block_size in block_sizes for size in sizes]
    return found + [cell._replace(standby=True) for cell in dict.fromkeys((found[0], found[len(sizes) - 1]))]


def measure(cell: Cell, folder: Path, round_count: int, progress: Callable[[str], None]) -> Outlived:
    """A new volume below ``folder``, gone afterwards. KvfuseError; wrong bytes are one."""
    place = folder / f"outlive-{cell.size}-{cell.block_size}-{cell.standby:d}"
    total = max(2, int(MORE * cell.size / cell.block_size))
    words = (
        "outlive",
        f"standby={str(cell.standby).lower()}",
        f"cache.tier_size={cell.size}",
        f"capacity={max(512 * MIB, int(1.3 * total * (cell.block_size + 4 * KIB)))}",
    )
    try:
        with kvfuse_mount(place / "volume", place / "mnt", *words) as daemon:
            progress(f"{cell.name}: storing {total:,} blocks")
            mount = _Mount(daemon.mountpoint)
            with _client(mount, cell) as client:
                client.put(total)
            mount.wait(lambda: not mount.stats()["memory"]["staged_bytes"], "bytes are stored")
            outlived = _first_kill(cell, mount, total, progress)
            for number in range(1, round_count):
                progress(f"{cell.name}: kill {number + 1} of {round_count}")
                _kill(mount, outlived)
            for number in range(round_count):
                progress(f"{cell.name}: upgrade {number + 1} of {round_count}")
                outlived.upgrades.append(mount.upgrade())
            return outlived
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _first_kill(cell: Cell, mount: _Mount, total: int, progress: Callable[[str], None]) -> Outlived:
    progress(f"{cell.name}: reading")
    before, ratio = _read(mount, cell, total)
    tier = mount.stats()["tier"]
    outlived = Outlived(cell, tier["blocks"], tier["arenas"], tier["used_bytes"], ratio, 0.0, before, 0.0)
    progress(f"{cell.name}: the first kill")
    _kill(mount, outlived)
    outlived.read_after, outlived.ratio_after = _read(mount, cell, total)
    return outlived


def _read(mount: _Mount, cell: Cell, total: int) -> tuple[float, float]:
    """The first pass of a daemon, which looks for the place of each block then: (seconds of the gets, share from
    memory)."""
    before = mount.stats()["tier"]["misses"]
    with _client(mount, cell) as client:
        seconds = client.read(total)
    return seconds, 1 - (mount.stats()["tier"]["misses"] - before) / total


def _kill(mount: _Mount, outlived: Outlived) -> None:
    if outlived.cell.standby:
        mount.wait(lambda: bool(mount.holder()["standby"]), "a daemon stands by")
    outlived.stalls.append(mount.kill())
    tier = mount.stats()["tier"]
    outlived.adopted.append(tier["adopted"])
    outlived.adoption.append(tier["adoption_seconds"])


class _Mount:
    """With a holder."""

    def __init__(self, point: Path) -> None:
        self.point = point

    def stats(self) -> dict[str, Any]:
        return dict(json.loads((self.point / ".kvfuse" / "stats").read_bytes()))

    def holder(self) -> dict[str, Any]:
        """What it says. KvfuseError where there is none."""
        said = json.loads(_kvfuse("status", str(self.point), "--json"))[0]["holder"]
        if said is None:
            raise KvfuseError(f"{self.point} has no process that keeps it: 'kvfuse doctor' tells what is missing")
        return dict(said)

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        if not wait_until(condition, SETTLE_SECONDS_MAX):
            raise KvfuseError(f"{self.point}: it takes more than {SETTLE_SECONDS_MAX:.0f} s until {what}")

    def kill(self) -> float:
        """Kill the daemon; seconds until another one has answered."""
        pid = int(self.stats()["pid"])
        began = time.perf_counter()
        os.kill(pid, signal.SIGKILL)
        os.statvfs(self.point)
        seconds = time.perf_counter() - began
        self.wait(lambda: bool(self.holder()["serves"]), "the next daemon is ready")
        if self.stats()["pid"] == pid:
            raise KvfuseError(f"{self.point}: process {pid} was killed, and answers")
        return seconds

    def upgrade(self) -> float:
        """To the same version; seconds that calls waited."""
        said = _kvfuse("upgrade", str(self.point))
        found = re.search(r"calls waited ([\d.]+) s", said)
        if found is None:
            raise KvfuseError(f"'kvfuse upgrade' said: {said}")
        return float(found[1])


def _kvfuse(*words: str) -> str:
    command = [sys.executable, "-m", "kvfuse.cli", *words]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise KvfuseError(f"'kvfuse {' '.join(words)}' failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


@contextmanager
def _client(mount: _Mount, cell: Cell) -> Iterator[_Client]:
    with connect_when_open(mount.point) as client, BlockStore(client, NAMESPACE, deadline=DEADLINE_S) as store:
        yield _Client(store, cell)


class _Client:
    """This process."""

    def __init__(self, store: BlockStore, cell: Cell) -> None:
        self._store, self._cell = store, cell
        self._batch = max(1, min(BATCH_BLOCKS, BATCH_SIZE // cell.block_size))
        memory = store.client.iov(self._batch * cell.block_size).array
        memory[:] = 0xFF
        self._rows = memory.reshape(self._batch, cell.block_size)
        self._content = BlockContent(cell.block_size)

    def _key(self, number: int) -> bytes:
        return block_key("outlive", number).hex().encode()

    def put(self, total: int) -> None:
        for start in range(0, total, self._batch):
            keys = [self._key(number) for number in range(start, min(start + self._batch, total))]
            rows = self._rows[: len(keys)]
            for row, key in zip(rows, keys, strict=True):
                row[:] = np.frombuffer(self._content.fill(bytes.fromhex(key.decode())), np.uint8)
            if not self._store.put_many(keys, list(rows)).all():
                raise KvfuseError("not all blocks are stored")

    def read(self, total: int) -> float:
        """Each block once, in an order that is always the same; seconds of the gets. One of each batch is compared."""
        numbers, seconds = list(range(total)), 0.0
        random.Random(total).shuffle(numbers)
        for start in range(0, total, self._batch):
            keys = [self._key(number) for number in numbers[start : start + self._batch]]
            began = time.perf_counter()
            sizes = self._store.get_many_into(keys, list(self._rows[: len(keys)]))
            seconds += time.perf_counter() - began
            if (sizes != self._cell.block_size).any():
                raise KvfuseError(f"blocks of {self._cell.block_size} bytes have the sizes {sizes[:8].tolist()}")
            row = start // self._batch % len(keys)
            difference = self._content.difference(bytes.fromhex(keys[row].decode()), self._rows[row].data)
            if difference is not None:
                raise KvfuseError(f"wrong bytes: {keys[row].decode()} {difference}")
        return seconds


@dataclass
class Fit:
    """Seconds as a fixed time, and for each block and each byte: of what was measured without a stand-by."""

    fixed: float
    per_block: float
    per_byte: float

    @classmethod
    def of(cls, results: Sequence[Outlived], seconds: Callable[[Outlived], Sequence[float]]) -> Fit:
        """By least squares, of the medians; what would be negative is 0."""
        rows = [one for one in results if not one.cell.standby]
        values = np.array([median(seconds(one)) for one in rows])
        columns = np.array([[1.0, one.blocks / 1e5, one.arena_bytes / 1e10] for one in rows])
        chosen = [0, 1, 2] if len(rows) > 1 else [0]
        while True:
            found, *_ = np.linalg.lstsq(columns[:, chosen], values, rcond=None)
            worst = int(np.argmin(found))
            if found[worst] >= 0 or len(chosen) == 1:
                break
            del chosen[worst]
        factors = [0.0, 0.0, 0.0]
        for place, factor in zip(chosen, found.tolist(), strict=True):
            factors[place] = max(0.0, factor)
        return cls(factors[0], factors[1] / 1e5, factors[2] / 1e10)

    def seconds(self, size: int, block_size: int) -> float:
        """For so many bytes, full of such blocks."""
        return self.fixed + self.per_block * (size / block_size) + self.per_byte * size

    def to_json(self) -> dict[str, Any]:
        return vars(self)
