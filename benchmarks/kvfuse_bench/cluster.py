"""kvfuse on etcd and RADOS beside ceph-fuse on the same OSDs: what is measured, in which sizes, and the targets.

Every benchmark is one function from ``ClusterSetting`` to figures. ``docs/benchmarks.md`` says what each one means.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from kvfuse.errors import KvfuseError
from kvfuse.sizes import GIB, KIB, MIB, format_size
from kvfuse_bench.cluster_blocks import BlockSet
from kvfuse_bench.cluster_mounts import (
    CEPH_FUSE,
    RELAXED,
    STRICT,
    ClusterSetting,
    Mounter,
    daemon_stats,
    make_mounters,
    mounted,
    new_volume,
)
from kvfuse_bench.measures import ask_absent_names
from kvfuse_bench.rounds import Figure, Measured, RowsSide, alternate_rows
from kvfuse_cluster.process import wait_until

COUNTS = {64 * KIB: 480, MIB: 64, 4 * MIB: 24}
"""size of a block -> how many of them a side stores or reads in a round"""
SYNCED_SIZE_MIN = 4 * MIB
"""from here on storing ends when all is written out: less would be a figure of the caches of both sides"""
RATE_SIZE_MAX = 64 * KIB
"""up to here the unit is blocks/s, beyond it MB/s"""
WRITERS = 8
ABSENT_COUNT = 2000
VISIBLE_SECONDS_MAX = 30.0

RATE, ROUND_TRIPS, OPERATIONS = "rate", "record round trips per 1,000", "RADOS operations for each of"
ABSENT = "absent names"
DISK_TIER, RADOS, ENGINE_READS = "disk tier", "RADOS", "reads of RADOS meanwhile"
TIER_SIZE = 2 * GIB
SETTLE_SECONDS_MAX = 60.0
"""for copies to be written, or found again"""

STORE_RATIOS = {(64 * KIB, 1): 3.0, (4 * MIB, 1): 1.0, (64 * KIB, WRITERS): 1.0, (4 * MIB, WRITERS): 1.0}
"""(size, writers) -> blocks stored, beside ceph-fuse's: relaxed by one writer, strict by eight"""
READ_RATIOS = {4 * MIB: 1.0}
ROUND_TRIPS_MAX = {(64 * KIB, 1): 20.0}


# -- storing ----------------------------------------------------------------------------------------


def bench_store(size: int, setting: ClusterSetting) -> list[Figure]:
    """Blocks of one size stored by one writer, then by eight; in the end all are verified through fresh mounts."""
    mounters = make_mounters(setting)
    stored: dict[str, list[BlockSet]] = {name: [] for name in mounters}
    figures: list[Figure] = []
    with mounted(setting, mounters) as points:
        for writer_count in (1, WRITERS):
            label = f"store-{size}-{writer_count}"
            sides = {
                name: _storing(BlockSet(point, label, setting.count(COUNTS[size]), size, writer_count), stored[name])
                for name, point in points.items()
            }
            if writer_count == 1 and size < SYNCED_SIZE_MIN:
                blocks = BlockSet(points[CEPH_FUSE], f"{label}-fsync", setting.count(COUNTS[size]), size)
                sides[f"{CEPH_FUSE}, fsync"] = _storing(blocks, stored[CEPH_FUSE], fsync=True)
            rows = alternate_rows(_told(setting, sides), setting.round_count)
            figures += _store_figures(size, writer_count, rows)
    with mounted(setting, mounters, "again") as points:
        for name, point in points.items():
            setting.progress(f"verifying, {name}")
            for blocks in stored[name]:
                blocks.seen_from(point).verify()
    return figures


def _storing(blocks: BlockSet, stored: list[BlockSet], *, fsync: bool = False) -> RowsSide:
    """Stores a set like ``blocks`` a round: its rate, and what it cost the engines of kvfuse.

    All is written out before the next side's turn. ``stored`` gets every set.
    """

    def side(number: int) -> dict[str, float]:
        mine = replace(blocks, label=f"{blocks.label}-{number}")
        mine.make_folders()  # what counts are blocks: a folder is stored once
        before = daemon_stats(mine.root)
        row = {RATE: mine.store(fsync=fsync, until_synced=mine.size >= SYNCED_SIZE_MIN)}
        mine.sync_last()
        after = daemon_stats(mine.root)
        mine.sync()
        stored.append(mine)
        if before is not None and after is not None:
            trips = after["records"]["round_trips"] - before["records"]["round_trips"]
            operations = after["segments"]["operations"] - before["segments"]["operations"]
            row |= {ROUND_TRIPS: 1000 * trips / mine.count, OPERATIONS: operations / mine.count}
        return row

    return side


def _store_figures(size: int, writer_count: int, rows: Mapping[str, list[Measured]]) -> Iterator[Figure]:
    """``rows`` have relaxed, strict and, for the rate, ceph-fuse. One writer: relaxed is what counts; eight: strict."""
    first = RELAXED if writer_count == 1 else STRICT
    blocks = f"{format_size(size)} blocks, {writer_count} writer{'s' * (writer_count > 1)}, {first}"
    note = "until all is written out" if size >= SYNCED_SIZE_MIN else "as the writer sees it: both sides cache"
    rates = [_in_unit(value, size) for value in rows[RATE]]
    ratio = STORE_RATIOS.get((size, writer_count))
    yield _figure(f"store {blocks}", _unit(size), first, rates, ratio_target=ratio, note=note)
    target = ROUND_TRIPS_MAX.get((size, writer_count))
    yield _figure(f"{ROUND_TRIPS} {blocks}", "", first, rows[ROUND_TRIPS], target=target, less_is_better=True)
    yield _figure(f"{OPERATIONS} {blocks}", "", first, rows[OPERATIONS], less_is_better=True)


# -- reading and asking -----------------------------------------------------------------------------


def bench_absent(setting: ClusterSetting) -> list[Figure]:
    """stat of names that are not there, each asked once, in a new folder of this host's own."""
    count = setting.count(ABSENT_COUNT)

    def asking(point: Path) -> RowsSide:
        def side(number: int) -> dict[str, float]:
            folder = point / f"absent-{number}"
            folder.mkdir()
            return {RATE: ask_absent_names(folder, count)}

        return side

    with mounted(setting, make_mounters(setting)) as points:
        sides = {name: asking(point) for name, point in points.items()}
        rows = alternate_rows(_told(setting, sides), setting.round_count)
    return [_figure(f"{ABSENT}, in a folder of its own", "names/s", RELAXED, rows[RATE])]


def bench_cold_read(setting: ClusterSetting) -> list[Figure]:
    """Blocks read, and absent names asked for, through a mount that was just made: its caches are empty."""
    mounters = make_mounters(setting)
    with mounted(setting, mounters) as points:
        stored = {name: _store_to_read(setting, point, "cold") for name, point in points.items()}

    def reading(name: str, mount: Mounter) -> RowsSide:
        def side(number: int) -> dict[str, float]:
            with mount(setting.volumes / f"{name}-{number}") as daemon:
                return _read_all(setting, [blocks.seen_from(daemon.mountpoint) for blocks in stored[name]])

        return side

    sides = {name: reading(name, mount) for name, mount in mounters.items()}
    return [*_read_figures(alternate_rows(_told(setting, sides), setting.round_count), "cold: a fresh mount")]


def bench_other_host(setting: ClusterSetting) -> list[Figure]:
    """The same for blocks that another mount has just stored. Needs two mounts of one volume at once."""
    mounters = make_mounters(setting)

    def reading(writer: Path, reader: Path) -> RowsSide:
        def side(number: int) -> dict[str, float]:
            stored = _store_to_read(setting, writer, f"other-{number}")
            seen = [blocks.seen_from(reader) for blocks in stored]
            for blocks in seen:
                blocks.wait_for_last(VISIBLE_SECONDS_MAX)
            return _read_all(setting, seen)

        return side

    with mounted(setting, mounters, "a") as writers, mounted(setting, mounters, "b") as readers:
        sides = {name: reading(writers[name], readers[name]) for name in mounters}
        rows = alternate_rows(_told(setting, sides), setting.round_count)
    return [*_read_figures(rows, "written by another host")]


def _store_to_read(setting: ClusterSetting, root: Path, label: str) -> list[BlockSet]:
    """A set of each size, written out."""
    sets = [BlockSet(root, f"{label}-{size}", setting.count(full), size) for size, full in COUNTS.items()]
    for blocks in sets:
        blocks.store(until_synced=True)
    return sets


def _read_all(setting: ClusterSetting, sets: Sequence[BlockSet]) -> dict[str, float]:
    """Rates: absent names beside the first set's blocks, then each set read and verified."""
    absent = ask_absent_names(sets[0].folder, setting.count(ABSENT_COUNT))
    return {ABSENT: absent, **{format_size(blocks.size): blocks.read() for blocks in sets}}


def _read_figures(rows: Mapping[str, list[Measured]], how: str) -> Iterator[Figure]:
    for size in COUNTS:
        rates = [_in_unit(value, size) for value in rows[format_size(size)]]
        what, ratio = f"read {format_size(size)} blocks, {how}", READ_RATIOS.get(size)
        yield _figure(what, _unit(size), RELAXED, rates, ratio_target=ratio, note="the OSDs have them in their caches")
    yield _figure(f"{ABSENT}, {how}", "names/s", RELAXED, rows[ABSENT], note="in a folder of blocks")


# -- the disk tier ------------------------------------------------------------------------------------


def bench_disk_tier(setting: ClusterSetting) -> list[Figure]:
    """Blocks read again, through a mount that was just made, from a disk of this host and from RADOS. Verified."""
    mount = new_volume(setting, RELAXED)
    words = f"disk_path={setting.volumes / 'disk-tier'}", f"disk_size={TIER_SIZE}"
    with mount(setting.volumes / "disk-tier-a", *words) as daemon:
        stored = _store_to_read(setting, daemon.mountpoint, "tier")
    with mount(setting.volumes / "disk-tier-b", *words) as daemon:
        _read_sets(stored, daemon.mountpoint)
        _wait_for_disk(daemon.mountpoint, "is_adopted", 1)
        _wait_for_disk(daemon.mountpoint, "queued_bytes", 0)

    def reading(name: str) -> RowsSide:
        def side(number: int) -> dict[str, float]:
            chosen = words if name == DISK_TIER else ()
            with mount(setting.volumes / f"{name.replace(' ', '-')}-{number}", *chosen) as daemon:
                if chosen:
                    _wait_for_disk(daemon.mountpoint, "is_adopted", 1)
                return _read_sets(stored, daemon.mountpoint)

        return side

    rows = alternate_rows(_told(setting, {name: reading(name) for name in (DISK_TIER, RADOS)}), setting.round_count)
    note = "in caches: of this host, of the OSDs"
    figures = [
        Figure(f"read {format_size(size)} blocks again", _unit(size), *_rates(rows[format_size(size)], size), note=note)
        for size in COUNTS
    ]
    tier, rados = rows[ENGINE_READS]
    return [*figures, Figure(ENGINE_READS, "", tier, rados, target=0.0, less_is_better=True)]


def _wait_for_disk(point: Path, name: str, value: int) -> None:
    """Return when the daemon says so of its disk tier. KvfuseError where that takes too long."""

    def is_so() -> bool:
        stats = daemon_stats(point)
        return stats is not None and stats["disk"][name] == value

    if not wait_until(is_so, SETTLE_SECONDS_MAX):
        raise KvfuseError(f"{point}: {name} of the disk tier is not {value} after {SETTLE_SECONDS_MAX:g} s")


def _read_sets(stored: Sequence[BlockSet], root: Path) -> dict[str, float]:
    """Rates, and how often the daemon read from RADOS meanwhile."""
    before = daemon_stats(root)
    row = {format_size(blocks.size): blocks.seen_from(root).read() for blocks in stored}
    after = daemon_stats(root)
    assert before is not None
    assert after is not None
    return row | {ENGINE_READS: after["segments"]["reads"] - before["segments"]["reads"]}


def _rates(values: Sequence[Measured], size: int) -> tuple[Measured, Measured]:
    """Of the first side and the second."""
    return _in_unit(values[0], size), _in_unit(values[1], size)


# -- figures ----------------------------------------------------------------------------------------


def _unit(size: int) -> str:
    return "blocks/s" if size <= RATE_SIZE_MAX else "MB/s"


def _in_unit(value: Measured, size: int) -> Measured:
    """Blocks a second, in the unit that blocks of ``size`` have."""
    factor = 1.0 if size <= RATE_SIZE_MAX else size / 1e6
    return Measured(value.name, [factor * rate for rate in value.rounds])


def _figure(name: str, unit: str, first: str, values: Iterable[Measured], **more: Any) -> Figure:
    """The figure of the side ``first`` beside ceph-fuse's, if that has one, and all others."""
    named = {value.name: value for value in values}
    measured, reference = named.pop(first), named.pop(CEPH_FUSE, None)
    return Figure(name, unit, measured, reference, others=tuple(named.values()), **more)


def _told(setting: ClusterSetting, sides: Mapping[str, RowsSide]) -> dict[str, RowsSide]:
    """The sides; each round of each is shown."""

    def telling(name: str, side: RowsSide) -> RowsSide:
        def tell(number: int) -> Mapping[str, float]:
            setting.progress(f"round {number} of {setting.round_count}, {name}" if number else f"warm-up, {name}")
            return side(number)

        return tell

    return {name: telling(name, side) for name, side in sides.items()}


CLUSTER_BENCHES: dict[str, Callable[[ClusterSetting], list[Figure]]] = {
    **{f"store-{format_size(size)}": partial(bench_store, size) for size in COUNTS},
    "absent": bench_absent,
    "cold-read": bench_cold_read,
    "other-host": bench_other_host,
    "disk-tier": bench_disk_tier,
}
