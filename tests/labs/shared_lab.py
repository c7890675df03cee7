"""Several volumes over one disk in memory, as many hosts have it open; each with a lease, and slow in its own way."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any, TypeVar

import inside
import trio
from memory_index import MemoryIndex
from volume_lab import CALLER, MIB, Chaos, Disk, MemoryRecords, MemorySegments, check, lab_options

from kvfuse import errors
from kvfuse.kept.keeper import NO_KEEPER, Keeper
from kvfuse.options.config import Options
from kvfuse.remote.records.api import ABSENT
from kvfuse.slab.layout import KNOWN_FEATURES
from kvfuse.volume.api import ROOT_INODE
from kvfuse.volume.inodes.handle import FileHandle
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.opening.held_volume import HeldVolume, has_cut_off
from kvfuse.volume.running import run_volume
from kvfuse.volume.store import schema
from kvfuse.volume.store.member import FencedRecords, FencedSegments, Member, Standing
from kvfuse.volume.store.schema import MemberRecord
from kvfuse.volume.views.handover import Handover
from kvfuse.volume.volume import Volume

LEASE = 10.0

R = TypeVar("R")


@asynccontextmanager
async def joined(
    disk: Disk,
    options: Options,
    client: int,
    chaos: Chaos,
    keeper: Keeper = NO_KEEPER,
    *,
    handover: Handover | None = None,
    features: int = KNOWN_FEATURES,
) -> AsyncIterator[Volume]:
    """The volume as one more client has it; each time it joins anew it becomes ``client`` + 1000.

    ``keeper``: what a daemon before it left. If it is killed (`Chaos.killed`), its tasks end with the body.
    """
    records, segments = MemoryRecords(disk, chaos), MemorySegments(disk, chaos)
    members: list[Member] = []
    async with trio.open_nursery() as nursery:

        async def join() -> HeldVolume:
            member = None
            if members:
                await members[-1].leave()  # as `memberships` does
                await segments.renew()
            elif (before := Standing.take(keeper)) is not None:
                member = await Member.resume(records, "", before, keeper)
            if member is None:
                member = await join_anew()
            members.append(member)
            nursery.start_soon(member.keep)
            if member.before is not None and not await has_cut_off(member, records, segments):
                return await join()
            fenced = FencedRecords(records, member), FencedSegments(segments, member)
            index = MemoryIndex(disk.index)
            return HeldVolume(disk.superblock, *fenced, member, join, disk.change_superblock, index)

        async def join_anew() -> Member:
            number = client + 1000 * (disk.joins[client] if keeper.outlives else len(members))
            disk.joins[client] += 1
            asked = trio.current_time()
            lease = await records.lease(LEASE)
            Standing(number, lease.identity).keep(keeper)
            key = schema.member_key(number)
            said = schema.encode_member(MemberRecord("lab", number, "", features))
            version = await records.commit({key: said}, (), {key: ABSENT}, lease=lease)
            return Member(number, lease, version, asked, keeper)

        try:
            async with run_volume(options, await join(), keeper, handover) as volume:
                try:
                    yield volume
                finally:
                    if chaos.killed:
                        with trio.CancelScope(shield=True):
                            await inside.life(volume).end()
        finally:
            with trio.CancelScope(shield=True):
                for member in members[-1:]:  # there is none where joining was cancelled
                    if chaos.killed:
                        member._renewing.cancel()
                    else:
                        await member.leave()


@asynccontextmanager
async def volumes(
    disk: Disk, options: Options, count: int, rng: random.Random, chaos: list[Chaos] | None = None
) -> AsyncIterator[list[Volume]]:
    """``count`` volumes of clients 1, 2, ...; ``chaos``: how each behaves, by default slow. Checked at the end."""
    chaos = chaos or [Chaos(random.Random(rng.random()), delay=0.5) for _ in range(count)]
    async with AsyncExitStack() as stack:
        joining = [joined(disk, options, client, chaos[client - 1]) for client in range(1, count + 1)]
        all_volumes = [await stack.enter_async_context(volume) for volume in joining]
        try:
            yield all_volumes
        except BaseException:
            for one in chaos:
                one.end()  # else hosts that a test had stopped would wait for ever, and nobody see why it failed
            raise
    await check_disk(disk)


def hosts(
    rng: random.Random, count: int, chaos: list[Chaos] | None = None, **options: Any
) -> AbstractAsyncContextManager[list[Volume]]:
    """`volumes` of a new disk, for a test that looks at it through them alone; ``options`` as for `lab_options`."""
    made = lab_options(**options)
    return volumes(Disk.format(made, shared=True), made, count, rng, chaos)


async def quiet(*all_volumes: Volume) -> None:
    """Everything is stored, and the watches have told it."""
    for volume in all_volumes:
        await volume.sync()
    await trio.sleep(1)


# -- what the disk has, when nobody has it open any more ------------------------------------------------


def slots_of(disk: Disk) -> Counter[int]:
    """How many records name each slot."""
    found: Counter[int] = Counter()
    for key, row in disk.records.items():
        if key[:1] == b"d":
            entry = schema.decode_entry(row.value)
            chunks = () if isinstance(entry, int) else entry.chunks
        elif key[:1] in (b"i", b"o"):
            chunks = schema.decode_inode(row.value).chunks
        elif key[:1] == b"c":
            chunks = (schema.decode_chunk(row.value),)
        else:
            chunks = ()
        found.update(extent.addr for chunk in chunks for extent in chunk)
    return found


async def check_disk(disk: Disk) -> None:
    """Each slot is named once, and a check finds nothing."""
    assert all(count == 1 for count in slots_of(disk).values())
    report = await check(disk)
    assert report.clean, [problem.text for problem in report.problems]


# -- names --------------------------------------------------------------------------------------------


async def names_in(volume: Volume, ino: int = ROOT_INODE) -> list[bytes]:
    found: list[bytes] = []
    after = 0
    while rows := await volume.tree.list_directory(ino, after, 100):
        found += [row.name for row in rows]
        after = rows[-1].cookie
    return sorted(found)


async def as_by_path(call: Callable[[], Awaitable[R]]) -> R:
    """What a system call does: where the path turns out to lead elsewhere by now it is walked once more."""
    try:
        return await call()
    except errors.Stale:
        return await call()


async def look(volume: Volume, name: bytes, parent: int = ROOT_INODE) -> Node:
    """What stat(2) has the kernel ask: the name, and the attributes where it may not keep those that came with it."""

    async def walk() -> Node:
        node = await volume.tree.lookup(parent, name)
        return node if volume.inodes.may_keep_attributes(node.ino) else await volume.inodes.attributes(node.ino)

    return await as_by_path(walk)


async def exists(volume: Volume, name: bytes, parent: int = ROOT_INODE) -> bool:
    """As `look`."""
    try:
        await look(volume, name, parent)
    except errors.NotFound:
        return False
    return True


async def make(volume: Volume, name: bytes, parent: int = ROOT_INODE) -> int:
    """An empty file; its inode."""
    handle, node = await volume.tree.create(parent, name, 0o644, CALLER, os.O_RDWR | os.O_EXCL)
    await volume.files.release(handle)
    return node.ino


# -- bytes --------------------------------------------------------------------------------------------


async def put(volume: Volume, name: bytes, data: bytes, parent: int = ROOT_INODE) -> None:
    """Make a file, as a shell's redirection does."""
    handle, node = await volume.tree.create(parent, name, 0o644, CALLER, os.O_RDWR)
    await volume.files.write(handle, 0, data)
    await volume.files.flush(handle)
    await volume.files.release(handle)
    volume.tree.forget(node.ino, 1)


async def get(volume: Volume, name: bytes, parent: int = ROOT_INODE) -> bytes | None:
    """What a file has, by the first walk of its path; None: absent."""
    try:
        node = await volume.tree.lookup(parent, name)
    except errors.NotFound:
        return None
    try:
        handle = await volume.files.open(node.ino, os.O_RDONLY, CALLER)
        try:
            return bytes(await volume.files.read(handle, 0, 64 * MIB))
        finally:
            await volume.files.release(handle)
    finally:
        volume.tree.forget(node.ino, 1)


async def open_path(volume: Volume, *path: bytes) -> FileHandle:
    """As open(2), to read."""

    async def walk() -> FileHandle:
        ino = ROOT_INODE
        for name in path:
            ino = (await volume.tree.lookup(ino, name)).ino
        return await volume.files.open(ino, os.O_RDONLY, CALLER)

    return await as_by_path(walk)


async def read(volume: Volume, *path: bytes) -> bytes:
    """As a program reads a file, whose path is walked twice if need be."""
    handle = await open_path(volume, *path)
    data = bytes(await volume.files.read(handle, 0, 64 * MIB))
    await volume.files.release(handle)
    return data


async def write_at(volume: Volume, name: bytes, offset: int, data: bytes, flags: int = os.O_RDWR) -> None:
    node = await volume.tree.lookup(ROOT_INODE, name)
    handle = await volume.files.open(node.ino, flags, CALLER)
    await volume.files.write(handle, offset, data)
    await volume.files.flush(handle)
    await volume.files.fsync(handle)
    await volume.files.release(handle)
    volume.tree.forget(node.ino, 1)


# -- what is waited for -------------------------------------------------------------------------------


async def until(is_so: Callable[[], bool], seconds: float = 3 * LEASE) -> None:
    """Wait, by a clock that jumps, for what clients do by and by."""
    with trio.fail_after(seconds):
        while True:
            if is_so():
                return
            await trio.sleep(0.001)


async def eventually(condition: Callable[[], Awaitable[bool]], *, seconds: float = 10.0, pause: float = 0.001) -> None:
    """Wait, by a clock that jumps, until what another client did is heard of here. ``pause``: between two looks."""
    with trio.fail_after(seconds):
        while True:
            if await condition():
                return
            await trio.sleep(pause)


async def until_node(volume: Volume, ino: int, is_so: Callable[[Node], bool]) -> None:
    """Wait for news of an inode that need not have been looked up by a name."""

    async def has_come() -> bool:
        return is_so(await volume.inodes.attributes(ino))

    await eventually(has_come)
