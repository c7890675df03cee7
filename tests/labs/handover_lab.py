"""Daemons of one mount, one after the other, in one process: without a kernel, over a volume in memory.

A killed daemon leaves what its engines had and what its keeper has, as they are at that moment: `Mount.kill` goes on
with copies of both, so the former daemon may end in peace afterwards.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec
from kept_memory import after_kill
from pyfuse3 import FUSEError
from shared_lab import joined
from volume_lab import Chaos, Disk, MemoryRecords, MemorySegments, check, count_inodes, lab_options

from kvfuse.fs.door_handover import KeptHandover
from kvfuse.fs.ops import KvfuseOperations
from kvfuse.fs.virtual import VirtualFolder
from kvfuse.kept.keeper import MemoryKeeper
from kvfuse.native.fusewire import DIRECT, NO_FLUSH
from kvfuse.options.options import Options
from kvfuse.volume.opening.held_volume import HeldVolume
from kvfuse.volume.running import run_volume
from kvfuse.volume.store import schema
from kvfuse.volume.volume import Volume

ROOT = 1
WHO: Any = SimpleNamespace(uid=1000, gid=1000, pid=1, umask=0o022)
RW_CREAT = os.O_RDWR | os.O_CREAT | os.O_EXCL


@dataclass
class Daemon:
    """One of them. Requests are numbered as the kernel numbers them, over all daemons of a mount."""

    mount: Mount
    volume: Volume
    operations: KvfuseOperations
    handover: KeptHandover

    async def ask(self, kind: str, *args: Any, again: int | None = None) -> Any:
        """Answer a request, or (its number) one that a former daemon began to answer. FUSEError."""
        if again is None:
            self.mount.unique += 2
        number = self.mount.unique if again is None else again
        is_resent = again is not None
        self.operations.number_of_request = lambda: (number, is_resent)
        return await getattr(self.operations, kind)(*args)

    async def create(self, name: bytes, flags: int = RW_CREAT, parent: int = ROOT, **again: int) -> tuple[int, int]:
        """(fh, inode)"""
        info, entry = await self.ask("create", parent, name, 0o644, flags, WHO, **again)
        return fh_of(info), entry.st_ino

    async def open(self, ino: int, flags: int = os.O_RDWR, **again: int) -> int:
        return fh_of(await self.ask("open", ino, flags, WHO, **again))

    async def lookup(self, name: bytes, parent: int = ROOT) -> int:
        """The inode; 0 for none."""
        try:
            return int((await self.ask("lookup", parent, name, WHO)).st_ino)
        except FUSEError as error:  # where the kernel is not to remember that there is none
            assert error.errno == errno.ENOENT
            return 0


def fh_of(info: Any) -> int:
    """As the kernel gets it."""
    return int(info.fh) & ~(NO_FLUSH | DIRECT)


@dataclass
class Mount:
    """What outlives the daemons."""

    options: Options = field(default_factory=lab_options)
    keeper: MemoryKeeper = field(default_factory=MemoryKeeper)
    shared: bool = False
    """other hosts may have the volume, too: each daemon is another client of it"""
    keeps: bool = True
    """what is not stored outlives a daemon, where that can be done"""
    unique: int = 100
    client: int = 0
    disk: Disk = field(init=False)

    def __post_init__(self) -> None:
        if not self.keeps:
            settings = msgspec.structs.replace(self.options.mount, outlive_size=0)
            self.options = msgspec.structs.replace(self.options, mount=settings)
        self.disk = Disk.format(self.options, shared=self.shared)

    def kill(self) -> None:
        """The daemon is dead from here on, whatever it still does."""
        self.disk, self.keeper = self.disk.copy(), after_kill(self.keeper)
        for key in list(self.disk.records):  # what goes with the lease of a client
            if key == schema.member_key(self.client) or (
                key[:1] == b"h" and schema.split_open_key(key)[1] == self.client
            ):
                del self.disk.records[key]

    @asynccontextmanager
    async def daemon(self, chaos: Chaos | None = None) -> AsyncIterator[Daemon]:
        chaos = chaos or Chaos(random.Random(0))
        handover = KeptHandover(self.keeper)
        try:
            async with self._volume(self.disk, chaos, handover) as volume:
                folder = VirtualFolder({b"stats": lambda reader: b"stats for %d\n" % reader.uid})
                operations = KvfuseOperations(
                    volume, folder, entry_timeout=1, attr_timeout=1, negative_timeout=1, handover=handover
                )
                yield Daemon(self, volume, operations, handover)
        finally:
            handover.close()

    def _volume(self, disk: Disk, chaos: Chaos, handover: KeptHandover) -> AbstractAsyncContextManager[Volume]:
        if self.shared:
            self.client += 1
            return joined(disk, self.options, self.client, chaos, handover=handover)
        count_inodes(disk)
        held = HeldVolume(disk.superblock, MemoryRecords(disk, chaos), MemorySegments(disk, chaos))
        return run_volume(self.options, held, self.keeper, handover)

    async def check(self) -> None:
        """fsck finds nothing wrong with what there is now, with nobody who has it."""
        report = await check(self.disk.copy())
        assert report.clean, report
