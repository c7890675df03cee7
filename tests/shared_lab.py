"""Several volumes over one disk in memory, as many hosts have it open; each with a lease, and slow in its own way."""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import trio
from volume_lab import CALLER, Chaos, Disk, MemoryRecords, MemorySegments, check

from kvfuse import errors
from kvfuse.config import Options
from kvfuse.remote.records.api import ABSENT
from kvfuse.volume import schema
from kvfuse.volume.api import ROOT_INODE
from kvfuse.volume.holding import Held
from kvfuse.volume.member import FencedRecords, FencedSegments, Member
from kvfuse.volume.schema import MemberRecord
from kvfuse.volume.volume import Volume, run_volume

LEASE = 10.0


@asynccontextmanager
async def joined(disk: Disk, options: Options, client: int, chaos: Chaos) -> AsyncIterator[Volume]:
    """The volume as one more client has it; each time it lost its lease it becomes ``client`` + 1000."""
    records, segments = MemoryRecords(disk, chaos), MemorySegments(disk, chaos)
    members: list[Member] = []
    async with trio.open_nursery() as nursery:

        async def join() -> Held:
            number = client + 1000 * len(members)
            if members:
                await segments.renew()
            asked = trio.current_time()
            lease = await records.lease(LEASE)
            key = schema.member_key(number)
            said = schema.encode_member(MemberRecord("lab", number, ""))
            member = Member(number, lease, await records.commit({key: said}, (), {key: ABSENT}, lease=lease), asked)
            members.append(member)
            nursery.start_soon(member.keep)
            fenced = FencedRecords(records, member), FencedSegments(segments, member)
            return Held(disk.superblock, *fenced, member, join)

        try:
            async with run_volume(options, *await join()) as volume:
                yield volume
        finally:
            with trio.CancelScope(shield=True):
                await members[-1].leave()


@asynccontextmanager
async def volumes(
    disk: Disk, options: Options, count: int, rng: random.Random, chaos: list[Chaos] | None = None
) -> AsyncIterator[list[Volume]]:
    """``count`` volumes of clients 1, 2, ...; ``chaos``: how each behaves, by default slow. Checked at the end."""
    chaos = chaos or [Chaos(random.Random(rng.random()), delay=0.5) for _ in range(count)]
    async with AsyncExitStack() as stack:
        joining = [joined(disk, options, client, chaos[client - 1]) for client in range(1, count + 1)]
        yield [await stack.enter_async_context(volume) for volume in joining]
    report = await check(disk)
    assert report.clean, report.problems


async def names_in(volume: Volume, ino: int = ROOT_INODE) -> list[bytes]:
    found: list[bytes] = []
    after = 0
    while rows := await volume.list_directory(ino, after, 100):
        found += [row.name for row in rows]
        after = rows[-1].cookie
    return sorted(found)


async def exists(volume: Volume, name: bytes, parent: int = ROOT_INODE) -> bool:
    try:
        await volume.lookup(parent, name)
    except errors.NotFound:
        return False
    return True


async def make(volume: Volume, name: bytes, parent: int = ROOT_INODE) -> int:
    """An empty file; its inode."""
    handle, node = await volume.create(parent, name, 0o644, CALLER, os.O_RDWR | os.O_EXCL)
    await volume.release(handle)
    return node.ino


async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait, by a clock that jumps, until what another client did is heard of here."""
    with trio.fail_after(10):
        while True:
            if await condition():
                return
            await trio.sleep(0.001)
