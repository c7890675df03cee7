"""Looks for blocks that are rows, and decides who may use which, for one caller at a door other than the kernel's."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from stat import S_ISDIR, S_ISVTX

import numpy as np
import numpy.typing as npt

from kvfuse import errors
from kvfuse.access.client_process import ClientProcess
from kvfuse.access.namespace_access import NamespaceAccess
from kvfuse.access.namespace_handle import BlockDoor, NamespaceHandle
from kvfuse.credentials import Capability
from kvfuse.native.blockforms import name_columns
from kvfuse.volume.api import Attributes, RingApi, RowTerms


@dataclass
class RowAccess:
    """The rows of a volume, for one caller. Event loop only."""

    volume: RingApi
    peer: ClientProcess

    async def check(
        self, admission: NamespaceAccess, namespace: NamespaceHandle, wanted: int, names: Sequence[bytes] = ()
    ) -> bool:
        """Whether the caller may know of a directory, which it may use so: 1 search, 2 write (replaces ``names``).

        PermissionDenied, ReadOnly. What it may do with the directory's blocks is known afterwards.
        """
        directory = await admission.read_directory(namespace)
        if namespace.is_absent:
            namespace.may_list, namespace.may_put = False, False
            return False
        namespace.may_list = admission.may_access(namespace, directory, 4)
        namespace.may_put = admission.may_access(namespace, directory, 3)
        namespace.waits = self.volume.blocks.waits(namespace.ino)
        if not admission.may_access(namespace, directory, 1):
            namespace.blocks = None
        elif namespace.blocks is None or not namespace.blocks.is_current:
            await self.settle(namespace)
        if not admission.may_access(namespace, directory, wanted):
            raise errors.PermissionDenied("the mode of the namespace's directory does not allow the client's user this")
        if wanted & 2 and namespace.read_only:
            raise errors.ReadOnly("the namespace was opened through a read-only bind mount")
        if wanted & 2 and not namespace.has_token:
            await self._check_sticky(directory, names)
        return True

    async def _check_sticky(self, directory: Attributes, names: Sequence[bytes]) -> None:
        """PermissionDenied for replacing or removing another user's files in a directory with the sticky bit."""
        if not directory.mode & S_ISVTX or self.peer.powers.has(Capability.FOWNER):
            return
        for name in names:
            old = await self.volume.blocks.find(directory.ino, name)
            if old is not None and not self.peer.may_take_name(directory, old):
                raise errors.PermissionDenied(f"{os.fsdecode(name)} is another user's, and the directory sticky")

    async def settle(self, namespace: NamespaceHandle) -> None:
        """Note what the client's threads may do with the blocks of a directory, as of now. Its rights were checked."""
        store = self.volume.rows
        number = await self.volume.blocks.block_namespace(namespace.ino) if store is not None else None
        if store is None or number is None or namespace.is_absent:
            namespace.blocks = None
            return
        own = None
        if namespace.may_put and not namespace.read_only:
            with suppress(errors.NoSpace):  # too many tables: its blocks become files
                own = store.table(namespace.ino, number, self.peer.uid, namespace.group.gid, namespace.mode)
        store.shown.begin_look(namespace.ino)
        has_files = await self.volume.blocks.has_files(namespace.ino)
        knows_all = store.knows_all and not store.is_shared
        if store.shown.end_look(namespace.ino, has_files=has_files, knows_all=knows_all):
            store.with_files.discard(namespace.ino)
        tables = store.tables_of(namespace.ino)
        readable = tuple([table for table in tables if namespace.has_token or self.peer.may_access(table.readers, 4)])
        is_strict = self.volume.blocks.waits(namespace.ino)
        asks_first = is_strict and store.is_shared
        namespace.blocks = BlockDoor(
            store, namespace.ino, number, own, tables, () if asks_first else readable, has_files=has_files,
            reads_all=len(readable) == len(tables), asks_first=asks_first, terms=RowTerms(is_strict=is_strict),
        )  # fmt: skip

    async def refuse_directory(self, namespace: NamespaceHandle, door: BlockDoor, name: bytes) -> None:
        """IsADirectory: the name means one, which a block would hide."""
        if door.has_files or name in door.store.directories.get(namespace.ino, ()):
            node = await self.volume.blocks.find(namespace.ino, name)
            if node is not None and S_ISDIR(node.mode):
                raise errors.IsADirectory(f"{os.fsdecode(name)} is a directory of the namespace's directory: no block")

    async def exists(self, namespace: NamespaceHandle, door: BlockDoor, names: Sequence[bytes]) -> bytes:
        """A byte for each name: 0, it is absent, or sooner computed than read."""
        tiers, _ = await self.look_up(namespace, door, names, is_timed=False)
        found: bytes = (tiers != 0).tobytes()
        return found

    async def look_up(
        self, namespace: NamespaceHandle, door: BlockDoor, names: Sequence[bytes], *, is_timed: bool
    ) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32] | None]:
        """(`speeds.Tier`, seconds until it is there, if ``is_timed``) of each."""
        began = time.perf_counter()
        await self.renew(door, names)
        answers = door.store.look_up(door.directory, door.namespace, name_columns(names), is_timed=is_timed)
        namespace.measures.seconds["exists"].add(time.perf_counter() - began)
        return answers

    async def renew(self, door: BlockDoor, names: Sequence[bytes]) -> None:
        """Look for blocks of other hosts, where that may find more of these."""
        if door.store.is_shared and (door.terms.is_strict or not door.find(names).all()):
            await door.store.renew(is_strict=door.terms.is_strict, directory=door.directory, names=names)

    async def are_there(self, door: BlockDoor, names: Sequence[bytes]) -> list[bool]:
        """Which blocks exist, whatever they are worth."""
        await self.renew(door, names)
        found = door.find(names)
        if (cold := door.store.find_cold(door.directory, name_columns(names))) is not None:
            found |= cold
        answers: list[bool] = found.tolist()
        return answers

    async def prefetch(self, door: BlockDoor, namespace: NamespaceHandle, names: Sequence[bytes]) -> list[bool]:
        """Bring blocks into memory. Which are there then."""
        loaded = np.zeros(len(names), np.bool_)
        await self.renew(door, names)
        await door.store.warm(door.directory, names)
        for table in door.store.tables_of(door.directory):
            if not (namespace.has_token or self.peer.may_access(table.readers, 4)):
                continue
            rows, sequences = table.find(names, door.store.now(table.namespace))
            here = np.flatnonzero(rows >= 0)
            if not len(here):
                continue
            loaded[here] |= table.rows["arena"][rows[here]] != 0
            wanted = here[~loaded[here]]
            if len(wanted):
                some = [names[number] for number in wanted.tolist()]
                loaded[wanted] = (
                    await door.store.fetch(table, some, rows[wanted], sequences[wanted], is_ahead=True) == 1
                )
        answers: list[bool] = loaded.tolist()
        return answers
