"""Clients that do things at random in one small tree, at the same time, and agree on it in the end."""

from __future__ import annotations

import os
import random
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial

import inside
import trio
from namespace_lab import count_uses, recorded_uses, with_inner
from records_audit import Audit
from shared_lab import eventually, volumes
from volume_lab import CALLER, MIB, Chaos, Disk, lab_options

from kvfuse import errors
from kvfuse.volume.api import RENAME_EXCHANGE, RENAME_NOREPLACE, ROOT_INODE, Changes
from kvfuse.volume.inodes.handle import FileHandle
from kvfuse.volume.namespaces.namespace_uses import NamespaceUse
from kvfuse.volume.tenancy.namespace_attributes import NAMESPACE
from kvfuse.volume.volume import Volume

NAMES = (b"a", b"b", b"c", b"d")
OF_NAMES = ("make", "make", "mkdir", "link", "symlink", "unlink", "rmdir", "rename", "rename", "list")
OF_FILES = ("set", "set", "unset", "chmod", "write", "forget", "forget")
"""what is done to something by its name"""
OF_HANDLES = ("hold", "hold", "write_held", "write_held", "append_held", "cut_held", "fsync_held", "drop", "drop")
"""to files that stay open for a while"""

OF_NAMESPACES = ("enspace", "enspace", "unspace", "resize")
"""to directories"""

TTL = NAMESPACE + b".ttl"
EVERY_TIME = 1 << 30


class Walk:
    """One client. ``kinds``: what it does, as often as each is named. ``data_max``: a write has fewer bytes."""

    def __init__(self, volume: Volume, rng: random.Random, kinds: tuple[str, ...], data_max: int) -> None:
        self.volume = volume
        self.rng = rng
        self.kinds = kinds
        self.data_max = data_max
        self.handles: list[FileHandle] = []
        self.done = 0

    async def somewhere(self) -> int:
        """A directory, up to three levels down."""
        ino = ROOT_INODE
        for _ in range(self.rng.randrange(4)):
            node = await self.volume.tree.lookup(ino, self.rng.choice(NAMES))
            if not node.is_directory:
                break
            ino = node.ino
        return ino

    async def run(self, steps: int, *, may_fail: bool = False) -> None:
        """``may_fail``: the engines do at times."""
        for _ in range(steps):
            try:
                parent, name = await self.somewhere(), self.rng.choice(NAMES)
                step: Callable[[int, bytes], Awaitable[None]] = getattr(self, self.rng.choice(self.kinds))
                await step(parent, name)
                self.done += 1
            except errors.EngineError:
                if not may_fail:
                    raise
            except errors.OperationError:
                pass  # others were faster, or it made no sense
        for handle in self.handles:
            await self.volume.files.release(handle)

    # -- names ---------------------------------------------------------------------------------------

    async def make(self, parent: int, name: bytes) -> None:
        handle, _ = await self.volume.tree.create(parent, name, 0o644, CALLER, os.O_RDWR)
        await self.volume.files.write(handle, 0, self.data(name))
        await self.volume.files.flush(handle)
        await self.volume.files.release(handle)

    async def mkdir(self, parent: int, name: bytes) -> None:
        await self.volume.tree.make_directory(parent, name, 0o755, CALLER)

    async def symlink(self, parent: int, name: bytes) -> None:
        await self.volume.tree.make_symlink(parent, name, b"target", CALLER)

    async def link(self, parent: int, name: bytes) -> None:
        node = await self.volume.tree.lookup(await self.somewhere(), self.rng.choice(NAMES))
        await self.volume.tree.link(node.ino, parent, name)

    async def unlink(self, parent: int, name: bytes) -> None:
        await self.volume.tree.unlink(parent, name)

    async def rmdir(self, parent: int, name: bytes) -> None:
        await self.volume.tree.remove_directory(parent, name)

    async def rename(self, parent: int, name: bytes) -> None:
        flags = self.rng.choice((0, 0, RENAME_NOREPLACE, RENAME_EXCHANGE))
        await self.volume.tree.rename(parent, name, await self.somewhere(), self.rng.choice(NAMES), flags)

    async def list(self, parent: int, name: bytes) -> None:
        await self.volume.tree.list_directory(parent, 0, 100)

    async def enspace(self, parent: int, name: bytes) -> None:
        """A new folder becomes a namespace."""
        with suppress(errors.Exists):
            await self.mkdir(parent, name)
        node = await self.volume.tree.lookup(parent, name)
        await self.volume.inodes.set_xattr(node.ino, NAMESPACE, b"kind=" + b"files")

    async def unspace(self, parent: int, name: bytes) -> None:
        node = await self.volume.tree.lookup(parent, name)
        await self.volume.inodes.remove_xattr(node.ino, NAMESPACE)

    async def resize(self, parent: int, name: bytes) -> None:
        """A namespace has other quotas."""
        node = await self.volume.tree.lookup(parent, name)
        await self.volume.inodes.set_xattr(node.ino, TTL, b"%d" % self.rng.randrange(1, 9))

    # -- what has a name -----------------------------------------------------------------------------

    async def set(self, parent: int, name: bytes) -> None:
        node = await self.volume.tree.lookup(parent, name)
        await self.volume.inodes.set_xattr(node.ino, b"user." + self.rng.choice(NAMES), name)

    async def unset(self, parent: int, name: bytes) -> None:
        node = await self.volume.tree.lookup(parent, name)
        await self.volume.inodes.remove_xattr(node.ino, b"user." + self.rng.choice(NAMES))

    async def chmod(self, parent: int, name: bytes) -> None:
        node = await self.volume.tree.lookup(parent, name)
        await self.volume.inodes.set_attributes(node.ino, Changes(mode=self.rng.choice((0o600, 0o640, 0o755))), CALLER)

    async def write(self, parent: int, name: bytes) -> None:
        handle = await self.open(parent, name)
        await self.volume.files.write(handle, self.rng.randrange(3000), self.data(name))
        await self.volume.files.release(handle)

    async def forget(self, parent: int, name: bytes) -> None:
        """As a kernel that is short of memory."""
        held = {handle.node.ino for handle in self.handles}
        for ino, _, _ in list(inside.core(self.volume).places):
            if ino not in held and self.rng.random() < 0.8:
                self.volume.tree.forget(ino, EVERY_TIME)

    # -- what is open --------------------------------------------------------------------------------

    async def hold(self, parent: int, name: bytes) -> None:
        self.handles.append(await self.open(parent, name))

    async def write_held(self, parent: int, name: bytes) -> None:
        await self.volume.files.write(self.held(), self.rng.randrange(9000), self.data(name))

    async def append_held(self, parent: int, name: bytes) -> None:
        handle = self.held()
        await self.volume.files.write(handle, handle.node.size, self.data(name))

    async def cut_held(self, parent: int, name: bytes) -> None:
        await self.volume.inodes.set_attributes(self.held().node.ino, Changes(size=self.rng.randrange(9000)), CALLER)

    async def fsync_held(self, parent: int, name: bytes) -> None:
        await self.volume.files.fsync(self.held())

    async def drop(self, parent: int, name: bytes) -> None:
        handle = self.held()
        self.handles.remove(handle)
        await self.volume.files.release(handle)

    async def open(self, parent: int, name: bytes) -> FileHandle:
        """A regular file: of others the kernel opens none here."""
        node = await self.volume.tree.lookup(parent, name)
        if not node.is_file:
            raise errors.InvalidArgument("no regular file")
        return await self.volume.files.open(node.ino, os.O_RDWR, CALLER)

    def held(self) -> FileHandle:
        if not self.handles:
            raise errors.InvalidArgument("nothing is open")
        return self.rng.choice(self.handles)

    def data(self, name: bytes) -> bytes:
        return name * self.rng.randrange(1, self.data_max)


async def tree_of(volume: Volume, ino: int = ROOT_INODE) -> dict[bytes, object]:
    """name -> tree of a directory, or (inode, number of names, mode, size), and the bytes of a file"""
    found: dict[bytes, object] = {}
    for row in await volume.tree.list_directory(ino, 0, 100):
        node = await volume.tree.lookup(ino, row.name)
        if node.is_directory:
            found[row.name] = await tree_of(volume, node.ino)
        elif node.is_file:
            handle = await volume.files.open(node.ino, os.O_RDONLY, CALLER)
            try:
                data = bytes(await volume.files.read(handle, 0, 1 << 20))
            finally:
                await volume.files.release(handle)
            found[row.name] = node.ino, node.nlink, node.mode, node.size, data
        else:
            found[row.name] = node.ino, node.nlink, node.mode
    return found


async def sync(volume: Volume) -> None:
    """What is left of the last failures is told once."""
    for _ in range(10):
        with suppress(errors.EngineError):
            await volume.sync()
        await trio.sleep(0.2)
    await volume.sync()


def _look_at_uses(disk: Disk, audit: Audit, puts: Mapping[bytes, bytes], deletes: Collection[bytes]) -> None:
    """What clients recorded of the use of namespaces is together what there is."""
    audit.look(puts, deletes)
    counted, recorded = count_uses(disk), recorded_uses(disk)
    assert counted == recorded, (disk.version, counted, recorded, sorted(puts), sorted(deletes))


async def _know_their_uses(disk: Disk, all_volumes: Sequence[Volume]) -> bool:
    """What each host has in memory of namespaces is what is there."""
    for volume in all_volumes:
        inside.names(volume).nameless.reap_unnamed()  # slots of files that others removed, as who has no room does
        await volume.sync()
    whole = with_inner(disk, count_uses(disk))
    for volume in all_volumes:
        accounts = inside.namespaces(volume).accounts
        found = {number: accounts.use_of_hosts(number) for number in accounts.all}
        if {number: use for number, use in found.items() if any(use)} != {
            number: NamespaceUse(use.size, use.files) for number, use in whole.items()
        }:
            return False
    return True


async def walk_at_random(
    rng: random.Random,
    kinds: tuple[str, ...] = OF_NAMES,
    *,
    strict: bool,
    step_count: int = 150,
    chunk: int = MIB,
    faults: float = 0.0,
    capacity: int = 64 * MIB,
    data_max: int = 3000,
) -> None:
    """Three clients change a tree; what the records say is looked at after each commit, and by a check at the end.

    ``faults``: probability of a call of an engine to fail; half of the commits that do are done all the same.
    """
    options = lab_options(strict=strict, capacity=capacity, chunk=chunk)
    disk = Disk.format(options, shared=True)
    audit = Audit.attach(disk)
    if OF_NAMESPACES[0] in kinds:
        disk.audit = partial(_look_at_uses, disk, audit)
    chaos = [Chaos(random.Random(rng.random()), delay=0.5) for _ in range(3)]
    async with volumes(disk, options, 3, rng, chaos) as all_volumes:
        walks = [Walk(volume, random.Random(rng.random()), kinds, data_max) for volume in all_volumes]
        for one in chaos:
            one.commit_error = one.write_error = one.read_error = faults
        async with trio.open_nursery() as nursery:
            for walk in walks:
                nursery.start_soon(partial(walk.run, step_count, may_fail=faults > 0))
        assert sum(walk.done for walk in walks) > step_count / 10
        for one in chaos:
            one.commit_error = one.write_error = one.read_error = 0.0
        for volume in all_volumes:
            await sync(volume)

        async def agree() -> bool:
            try:
                trees = [await tree_of(volume) for volume in all_volumes]
            except (errors.NotFound, errors.Stale):
                return False  # the news of a change came between two questions
            return trees[0] == trees[1] == trees[2]

        await eventually(agree)
        if OF_NAMESPACES[0] in kinds:
            # what was removed is counted out after some graces, one after the other
            await eventually(partial(_know_their_uses, disk, all_volumes), seconds=60.0, pause=0.2)
    assert audit.commit_count > 20
