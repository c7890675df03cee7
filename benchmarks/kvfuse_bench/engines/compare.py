"""Engines' patterns on kvfuse, on the disk below it and on tmpfs, in alternating rounds."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvfuse.errors import KvfuseError
from kvfuse.sizes import KIB, MIB, format_size
from kvfuse_bench.batches import Cell
from kvfuse_bench.daemons import Daemon, fresh_volume
from kvfuse_bench.engines.adapters import adapter
from kvfuse_bench.engines.blocks import CALLS, MEMCPY, RING, SINGLE, STORE, TOGETHER, BlockCalls, CallSides
from kvfuse_bench.engines.files import lmcache_fs, lmcache_native, sglang_file, vllm_fs
from kvfuse_bench.engines.kernel_queues import IoUring, LinuxAio
from kvfuse_bench.engines.measuring import OPERATIONS, PROCESSOR, RATE, Memory, Meter
from kvfuse_bench.engines.nixl import DEPTH, nixl_posix
from kvfuse_bench.engines.slots import (
    BATCH_PAGES,
    kvbm_disk,
    lmcache_hf3fs,
    require_shared_memory,
    sglang_hf3fs_files,
    sglang_hf3fs_rings,
)
from kvfuse_bench.models import MODELS
from kvfuse_bench.mountpoint import mount_of
from kvfuse_bench.ringwork import KEYS_PER_CALL, ring_session
from kvfuse_bench.rounds import Conditions, Figure, Measured, alternate_rows

FILES, RINGS, ADAPTER, TMPFS = "kvfuse files", "kvfuse rings", "kvfuse adapter", "tmpfs"
CALL_SECONDS = 0.25
"""of each side of a block call in a round"""
CALLS_SIZE_STEP = 8 * MIB

Run = Callable[[Path, Meter, Memory], None]
"""One round of a pattern in an empty folder."""


@dataclass(frozen=True)
class EngineSetting(Conditions):
    """And how many bytes each pattern moves in each direction, in one round."""

    size: int = 256 * MIB

    @property
    def bytes_moved(self) -> int:
        """Scaled."""
        return max(1, int(self.size * self.scale))

    @property
    def calls_size(self) -> int:
        """Bytes that block calls walk over: whole blocks of any size."""
        return max(1, self.bytes_moved // CALLS_SIZE_STEP) * CALLS_SIZE_STEP


class Pattern(NamedTuple):
    """One engine's way to store and load."""

    title: str
    block_size: int
    files: Run
    rings: Run | None = None
    """the same through rings, where the engine can use them"""
    adapter: Run | None = None
    """the same by the engine's adapter"""
    targets: Mapping[str, float] = {}
    """phase -> ratio to the disk that is wanted: of the adapter, or of rings, where there are any"""
    probe: Callable[[], None] = lambda: None
    """KvfuseError where this machine does not allow it"""


class Result(NamedTuple):
    """A phase of a pattern, or a call, on each side."""

    title: str
    phase: str
    sides: dict[str, dict[str, Measured]]
    """side -> metric -> rounds; ours first"""
    reference: str | None
    """the side that the ratio is to"""
    target: float | None = None
    """of that ratio"""
    least: float | None = None
    """operations/s that are wanted"""
    processor: float | None = None
    """the most processor time for each GB that is wanted, as a ratio to the reference's"""

    @property
    def ours(self) -> str:
        """The side of which something is wanted: what the engine would use."""
        return next(name for name in (ADAPTER, RINGS, SINGLE, STORE, FILES, RING) if name in self.sides)

    @property
    def metric(self) -> str:
        """Which one is compared."""
        return RATE if RATE in self.sides[self.ours] and self.least is None else OPERATIONS

    def ratio(self, side: str, reference: str, metric: str) -> float | None:
        """None where one of them has not that metric."""
        pair = [self.sides.get(name, {}).get(metric) for name in (side, reference)]
        if pair[0] is None or pair[1] is None or not pair[1].value:
            return None
        return pair[0].value / pair[1].value

    @property
    def met(self) -> bool | None:
        """All that is wanted; None: nothing is."""
        wanted = [figure.met for figure in self.to_figures() if figure.met is not None]
        return all(wanted) if wanted else None

    def to_figures(self) -> list[Figure]:
        """As the other benchmarks keep them; all else in the others of the first."""
        figures = [self._speed()]
        if self.processor is not None and self.reference is not None:
            ours, reference = (self.sides[side][PROCESSOR] for side in (self.ours, self.reference))
            name = f"{self.title}: {self.phase}: processor time"
            target = self.processor
            figures += [Figure(name, PROCESSOR, ours, reference, ratio_target=target, less_is_better=True)]
        return figures

    def _speed(self) -> Figure:
        metric = self.metric
        reference = self.sides[self.reference][metric] if self.reference else None
        others = tuple(
            found._replace(name=f"{side}: {name}")
            for side, metrics in self.sides.items()
            for name, found in metrics.items()
        )
        name = f"{self.title}: {self.phase}"
        ours = self.sides[self.ours][metric]
        return Figure(name, metric, ours, reference, self.least, self.target, note=self.ours, others=others)


class Refused(NamedTuple):
    """A pattern that this machine does not allow."""

    title: str
    reason: str


HF3FS_TARGETS = {"write": 0.8, "read": 0.8}
FILE_TARGETS = {"write": 0.5, "read": 0.7}
DIRECT_TARGETS = {"write": 1.0, "read": 1.0}
ADAPTER_TARGETS = {"write": 1.0, "read again": 1.0}
ADAPTER_PROCESSOR = 1.3


def _probe(queue: Callable[[int], LinuxAio | IoUring]) -> None:
    with queue(DEPTH):
        pass


MLA_PAGE_SIZE = MODELS["deepseek-v3"].block_size(64)
"""bytes of a page of 64 tokens, all layers together"""


def _hf3fs_pattern(title: str, page_size: int) -> Pattern:
    probe = partial(require_shared_memory, page_size)
    return Pattern(title, page_size, sglang_hf3fs_files, sglang_hf3fs_rings, targets=HF3FS_TARGETS, probe=probe)


PATTERNS: dict[str, tuple[Pattern, ...]] = {
    "sglang-hf3fs": (
        _hf3fs_pattern("SGLang hf3fs, 1 MiB pages", MIB),
        _hf3fs_pattern("SGLang hf3fs, page_first MLA", MLA_PAGE_SIZE),
    ),
    "sglang-file": (Pattern("SGLang file, 1 MiB", MIB, sglang_file, targets=FILE_TARGETS),),
    "lmcache-fs": (
        Pattern("LMCache fs, 2 MiB", 2 * MIB, lmcache_fs, targets=FILE_TARGETS),
        Pattern("LMCache fs_native, 2 MiB", 2 * MIB, lmcache_native, targets=FILE_TARGETS),
        Pattern(
            "LMCache fs_native, O_DIRECT, 32 MiB", 32 * MIB, partial(lmcache_native, direct=True),
            targets=DIRECT_TARGETS,
        ),
    ),
    "lmcache-hf3fs": (Pattern("LMCache hf3fs, 2 MiB", 2 * MIB, lmcache_fs, lmcache_hf3fs, targets=HF3FS_TARGETS),),
    "vllm-fs": (
        Pattern("vLLM fs tier, 2 MiB", 2 * MIB, vllm_fs, targets=FILE_TARGETS),
        Pattern("vLLM fs tier, 8 MiB", 8 * MIB, vllm_fs, targets=FILE_TARGETS),
    ),
    "nixl-posix": (
        Pattern(
            "NIXL POSIX, linux-aio, 1 MiB", MIB, partial(nixl_posix, queue=LinuxAio), probe=partial(_probe, LinuxAio)
        ),
        Pattern(
            "NIXL POSIX, io_uring, 1 MiB", MIB, partial(nixl_posix, queue=IoUring), probe=partial(_probe, IoUring)
        ),
    ),
    "adapters": (
        Pattern("vLLM fs tier without O_DIRECT, 2 MiB", 2 * MIB, partial(vllm_fs, direct=False),
                adapter=partial(adapter, batch=16), targets=ADAPTER_TARGETS),
        Pattern("LMCache fs_native, 2 MiB", 2 * MIB, lmcache_native,
                adapter=partial(adapter, batch=8), targets=ADAPTER_TARGETS),
        Pattern("SGLang file, 1 MiB", MIB, sglang_file,
                adapter=partial(adapter, batch=BATCH_PAGES), targets=ADAPTER_TARGETS),
    ),
    "kvbm-disk": (Pattern("KVBM disk file, 2 MiB", 2 * MIB, kvbm_disk),),
}  # fmt: skip

CALL_TARGETS = {Cell("write", MIB, 8): 0.6, Cell("get", MIB, 8): 0.95, Cell("get", 4 * MIB, 8): 0.95}
"""of memcpy"""
LEAST = {
    Cell("put", 4 * KIB, 64): 40_000.0,
    Cell("put", 64 * KIB, 64): 25_000.0,
    Cell("get", 4 * KIB, 64): 500_000.0,
    Cell("get", 4 * KIB, 1): 100_000.0,
    Cell("view", 4 * MIB, 8): 50_000.0,
    Cell("exists", 4 * KIB, KEYS_PER_CALL): 5_000_000.0,
    Cell("write", 4 * KIB, 256): 150_000.0,
}
"""blocks, ranges or keys a second"""

BLOCK_CALLS = "block-calls"
NAMES = (*PATTERNS, BLOCK_CALLS)


def bench_engine(name: str, setting: EngineSetting) -> Iterator[Result | Refused]:
    """The results of one of `NAMES`. KvfuseError."""
    if name == BLOCK_CALLS:
        yield from _bench_calls(setting)
        return
    with fresh_volume(setting.volumes / "volume") as daemon:
        for pattern in PATTERNS[name]:
            setting.progress(pattern.title)
            try:
                pattern.probe()
            except KvfuseError as error:
                yield Refused(pattern.title, str(error))
            else:
                yield from bench_pattern(pattern, setting, daemon)


def file_system(folder: Path) -> str:
    """The kind of a folder's file system, as the kernel calls it."""
    mount = str(mount_of(folder))
    rows = (line.split() for line in os.fsdecode(Path("/proc/self/mounts").read_bytes()).split("\n"))
    kinds = [row[2] for row in rows if row[1:2] == [mount]]
    return kinds[-1] if kinds else "disk"


def bench_pattern(pattern: Pattern, setting: EngineSetting, daemon: Daemon) -> Iterator[Result]:
    """Its phases, on the mount of ``daemon`` and on the others."""
    block_size = min(pattern.block_size, max(4 * KIB, setting.bytes_moved // (4 * KIB) * (4 * KIB)))
    disk = file_system(setting.volumes)
    disk = disk if disk != TMPFS else "disk"
    title = pattern.title
    if block_size != pattern.block_size:
        title += f" (blocks of {format_size(block_size)})"
    with Memory(block_size, max(1, setting.bytes_moved // block_size)) as memory:
        ours = {FILES: pattern.files, RINGS: pattern.rings, ADAPTER: pattern.adapter}
        sides = {
            name: partial(_round, run, memory, daemon.mountpoint, daemon.pid)
            for name, run in ours.items()
            if run is not None
        }
        sides[disk] = partial(_round, pattern.files, memory, setting.volumes, None)
        sides[TMPFS] = partial(_round, pattern.files, memory, setting.memory, None)
        for phase, measured in _alternate(sides, setting.round_count).items():
            target = pattern.targets.get(phase)
            processor = ADAPTER_PROCESSOR if target is not None and ADAPTER in measured else None
            yield Result(title, phase, measured, disk if disk in measured else None, target, processor=processor)


_numbers = itertools.count()


def _round(run: Run, memory: Memory, root: Path, daemon: int | None, _number: int) -> Meter:
    """One round in a folder of its own; what is left for the disk is written before the next side's turn."""
    folder = root / f"round-{next(_numbers)}"
    folder.mkdir()
    memory.forget()
    meter = Meter(daemon)
    try:
        run(folder, meter, memory)
        memory.check()
    finally:
        shutil.rmtree(folder)
        os.sync()
    return meter


def _alternate(
    sides: Mapping[str, Callable[[int], Meter]], round_count: int
) -> dict[str, dict[str, dict[str, Measured]]]:
    """phase -> side -> metric -> rounds."""

    def rows(side: Callable[[int], Meter], number: int) -> dict[tuple[str, str], float]:
        phases = side(number).phases
        return {(phase.name, metric): value for phase in phases for metric, value in phase.metrics().items()}

    found: dict[str, dict[str, dict[str, Measured]]] = {}
    of_sides = {name: partial(rows, side) for name, side in sides.items()}
    for (phase, metric), measured in alternate_rows(of_sides, round_count).items():
        for one in measured:
            found.setdefault(phase, {}).setdefault(one.name, {})[metric] = one._replace(name=f"{one.name} {metric}")
    return found


def _bench_calls(setting: EngineSetting) -> Iterator[Result]:
    pattern = np.random.default_rng(0).integers(0, 256, setting.calls_size, np.uint8)
    with fresh_volume(setting.volumes / "volume") as daemon, ring_session(daemon.mountpoint, pattern) as session:
        calls = BlockCalls(session, CALL_SECONDS * setting.scale)
        for cell in CALLS:
            with calls.of(cell) as one:
                setting.progress(one.name)
                found = _bench_call(one, daemon, setting.round_count)
                yield found._replace(target=CALL_TARGETS.get(cell), least=LEAST.get(cell))
        for cell in TOGETHER:
            with calls.together(cell) as one:
                setting.progress(one.name)
                yield _bench_call(one, daemon, setting.round_count)


def _bench_call(call: CallSides, daemon: Daemon, round_count: int) -> Result:
    def side(name: str, run: Callable[[Meter], None]) -> Callable[[int], Meter]:
        def measure(_number: int) -> Meter:
            meter = Meter(daemon.pid if name != MEMCPY else None)
            run(meter)
            return meter

        return measure

    sides = {name: side(name, run) for name, run in call.sides.items()}
    reference = MEMCPY if MEMCPY in sides else None
    ((phase, measured),) = _alternate(sides, round_count).items()
    return Result("calls", phase, measured, reference)
