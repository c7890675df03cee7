"""A disk tier in a folder of a test, below volumes that several clients have."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import inside
import msgspec
import pytest
import trio
from shared_lab import joined
from volume_lab import MIB, Chaos, Disk, lab_options

from kvfuse.options.config import Options
from kvfuse.remote.segments.api import Transfer
from kvfuse.remote.segments.file.store import FileSegments
from kvfuse.volume.disk.disk_tier import DiskTier
from kvfuse.volume.volume import Volume

PATIENCE_S = 30.0


def tier_options(
    folder: Path, size: int | None = 32 * MIB, *, compression: str = "none", keep: str = "reads"
) -> Options:
    """Of a volume with a disk tier in ``folder``, and without the tier in memory."""
    options = lab_options(strict=True, capacity=128 * MIB, chunk=MIB, tier_size=0)
    chosen = {"disk_path": folder, "disk_size": size, "disk_compression": compression, "disk_keep": keep}
    cache = msgspec.structs.replace(options.cache, **chosen)
    return msgspec.structs.replace(options, cache=cache)


@asynccontextmanager
async def with_tier(disk: Disk, options: Options, client: int = 1) -> AsyncIterator[Volume]:
    """The volume as one client has it whose tier has adopted what was there."""
    async with joined(disk, options, client, Chaos(random.Random(0))) as volume:
        await wait_for(tier_of(volume).adopted)
        yield volume


def tier_of(volume: Volume) -> DiskTier:
    tier = inside.core(volume).disk
    assert tier is not None
    return tier


async def wait_for(event: trio.Event) -> None:
    with trio.fail_after(PATIENCE_S):
        await event.wait()


async def filled(volume: Volume) -> None:
    """All that was offered is written."""
    await wait_for(tier_of(volume).filler.idle)


def engine_reads(volume: Volume) -> int:
    return inside.segments(volume).counters.reads


def segment_files(volume: Volume) -> Sequence[Path]:
    segments = tier_of(volume).folder.segments
    assert isinstance(segments, FileSegments)
    return [file.path for file in segments._files.values()]


@contextmanager
def held_disk(volume: Volume, call: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[trio.Event]:
    """Reads or writes of the tier's disk wait until the event is set, or the body ends; as an engine's threads do."""
    gate = trio.Event()
    segments = tier_of(volume).folder.segments
    perform = getattr(segments, call)

    async def wait_and_perform(batch: Sequence[Transfer]) -> None:
        with trio.CancelScope(shield=True):
            await gate.wait()
        await perform(batch)

    monkeypatch.setattr(segments, call, wait_and_perform)
    try:
        yield gate
    finally:
        gate.set()
