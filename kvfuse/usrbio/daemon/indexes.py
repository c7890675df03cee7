"""Opens indexes of blocks, and arenas, for a connection that maps them.

Indexes of resident blocks of files are the tier's (`volume/tier/resident_indexes`), tables of blocks that are rows the
block store's (`volume/blocks/shown_tables`). A client sees by the first bytes which it has got.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import trio

from kvfuse import errors, failing
from kvfuse.usrbio.daemon.namespace_access import NamespaceAccess
from kvfuse.usrbio.daemon.registered_things import NamespaceHandle
from kvfuse.usrbio.daemon.row_calls import RowCalls
from kvfuse.usrbio.daemon.user_accounts import UserAccount
from kvfuse.volume.api import RingApi, RowApi, RowTable
from kvfuse.volume.tier.resident_indexes import Touches
from kvfuse.volume.tier.shared_tier import ReadClass

INDEXES_MAX = 64
"""indexes of one connection"""
HANDLES_MAX = 16
"""newest handles of one folder, which may give a right to an arena"""


@dataclass
class Indexes:
    """The block indexes of one connection. Event loop only."""

    volume: RingApi
    admission: NamespaceAccess
    nursery: trio.Nursery
    _opened: dict[ReadClass, Touches] = field(default_factory=dict)
    _tables: list[tuple[RowTable, Any]] = field(default_factory=list)
    """with the pages for their touches"""

    def __post_init__(self) -> None:
        self.peer = self.admission.peer
        self._rows = RowCalls(self.volume, self.peer)

    async def open(
        self, namespace: NamespaceHandle, number: int, account: UserAccount
    ) -> tuple[tuple[int, ...], list[int]]:
        """Open an index: (size), and descriptors of it and of its page for touches.

        ``number`` 0: the index of blocks that this client puts; from 1 on those of other owners and modes. NotFound: no
        more exist. PermissionDenied: the client may not list the folder. Unsupported: the daemon has to count what is
        read, or could not take memory back. QuotaExceeded: the user has its share of the daemon's indexes; ``account``
        has those of the connection, also at its end.
        """
        if not self.volume.tier.may_show(is_unlimited=self.peer.is_unlimited):
            raise errors.Unsupported("this daemon could not take shared memory back: it lacks CAP_SYS_ADMIN")
        await self._check(namespace)
        if namespace.measures.limiters:
            raise errors.Unsupported("the speed of this namespace is limited: its blocks are got through rings")
        if self.volume.rows is not None and await self.volume.blocks.block_namespace(namespace.ino) is not None:
            return await self._open_table(self.volume.rows, namespace, number, account)
        readers = self._find_read_class(namespace, number)
        for former in [own for own, touches in self._opened.items() if own == readers or touches.index.has_ended]:
            self.volume.tier.residents.leave(self._opened.pop(former))
            account.give("user_indexes")
        self._check_count()
        with account.taking("user_indexes"):
            touches = self.volume.search.open(readers, namespace.ancestors)
            if touches is None:
                raise errors.InvalidArgument("the daemon has as many indexes of blocks as it may have")
        self._opened[readers] = touches
        self.nursery.start_soon(failing.once, "names of an index", self.volume.search.read_names, readers)
        return (touches.index.size,), [touches.index.descriptor(), os.dup(touches.descriptor)]

    async def _open_table(
        self, store: RowApi, namespace: NamespaceHandle, number: int, account: UserAccount
    ) -> tuple[tuple[int, ...], list[int]]:
        """As `open`, of a directory whose blocks are rows."""
        await self._rows.settle(namespace)
        if not namespace.is_checked:
            await self._check(namespace)
        door = namespace.blocks
        tables = [
            table
            for table in (door.readable if door is not None else ())
            if not table.has_ended and (namespace.has_token or self.peer.may_access(table.readers, 4))
        ]
        tables.sort(key=lambda table: door is None or table is not door.own)
        if number >= len(tables):
            raise errors.NotFound("the folder has no more tables of blocks")
        self._leave_tables(tables[number], account)
        self._check_count()
        with account.taking("user_indexes"):
            touches = store.shown.open(tables[number], namespace.ancestors, is_unlimited=self.peer.is_unlimited)
        self._tables.append((tables[number], touches))
        return (tables[number].size,), [tables[number].descriptor(), os.dup(touches.descriptor)]

    def _leave_tables(self, again: RowTable, account: UserAccount) -> None:
        """Those that have ended, and the one that is opened again."""
        store = self.volume.rows
        for row in [row for row in self._tables if row[0] is again or row[0].has_ended]:
            self._tables.remove(row)
            if store is not None:
                store.shown.leave(row[1])
            account.give("user_indexes")

    def _check_count(self) -> None:
        if len(self._opened) + len(self._tables) >= INDEXES_MAX:
            raise errors.InvalidArgument(f"a connection has at most {INDEXES_MAX} indexes of blocks")

    async def map_arena(self, arena: int, namespaces: Iterable[NamespaceHandle], *, is_viewed: bool) -> int:
        """A descriptor of an arena that has blocks of which the client has a live index, or (``is_viewed``) a view.

        ``namespaces``: what the client has registered: one of them has to be the arena's directory, and to let the
        client list it now. PermissionDenied, also where there is no such arena.
        """
        tier = self.volume.tier
        found = tier.readers_of(arena)
        own = [namespace for namespace in namespaces if found is not None and namespace.ino == found[0].directory]
        for namespace in own[-HANDLES_MAX:]:
            with suppress(errors.PermissionDenied, errors.Stale, errors.NotFound):
                await self._check(namespace)
                found = tier.readers_of(arena)
                if found is not None and self._may_map(namespace, *found, is_viewed=is_viewed):
                    return tier.arena_descriptor(arena, namespace.ancestors)
        if found is None and self.volume.rows is not None:
            return await self._map_arena_of_rows(self.volume.rows, arena, list(namespaces), is_viewed=is_viewed)
        raise errors.PermissionDenied(f"the client has neither a view in arena {arena} nor an index of it, or may not")

    def _may_map(self, namespace: NamespaceHandle, readers: ReadClass, is_retired: bool, *, is_viewed: bool) -> bool:
        touches = self._opened.get(readers)
        has_index = touches is not None and not touches.index.has_ended and not is_retired
        return (is_viewed or has_index) and (namespace.has_token or self.peer.may_access(readers, 4))

    async def _map_arena_of_rows(
        self, store: RowApi, arena: int, namespaces: list[NamespaceHandle], *, is_viewed: bool
    ) -> int:
        """As `map_arena`. Whoever may have the table now may have its arenas, whether or not it has mapped it."""
        may_show = self.volume.tier.may_show(is_unlimited=self.peer.is_unlimited)
        table = store.shown.table_of(arena) if may_show else None
        own = [namespace for namespace in namespaces if table is not None and namespace.ino == table.readers.directory]
        for namespace in own[-HANDLES_MAX:]:
            with suppress(errors.PermissionDenied, errors.Stale, errors.NotFound):
                await self._check(namespace)
                table = store.shown.table_of(arena)
                if table is None or (table.has_ended and not is_viewed):
                    break
                if namespace.has_token or self.peer.may_access(table.readers, 4):
                    is_unlimited = self.peer.is_unlimited
                    return store.shown.arena_descriptor(arena, namespace.ancestors, is_unlimited=is_unlimited)
        raise errors.PermissionDenied(f"the client may not read the blocks in arena {arena}, or it is no more")

    def close(self) -> None:
        if self.volume.rows is not None:
            for _, touches in self._tables:
                self.volume.rows.shown.leave(touches)
        self._tables.clear()
        for touches in self._opened.values():
            self.volume.tier.residents.leave(touches)
        self._opened.clear()

    async def _check(self, namespace: NamespaceHandle) -> None:
        directory = await self.admission.read_directory(namespace)
        namespace.may_put = namespace.has_token or self.peer.may_access(directory, 3)
        if namespace.is_absent or not (namespace.has_token or self.peer.may_access(directory, 5)):
            raise errors.PermissionDenied("the client's user may not list this folder")

    def _find_read_class(self, namespace: NamespaceHandle, number: int) -> ReadClass:
        own = ReadClass(namespace.ino, self.peer.uid, namespace.group.gid, namespace.mode & 0o444)
        if not number:
            readers = [own]
        else:
            found = dict.fromkeys(self.volume.tier.read_classes().values())
            readers = [own, *(other for other in found if other.directory == namespace.ino and other != own)]
        readers = [other for other in readers if namespace.has_token or self.peer.may_access(other, 4)]
        if number >= len(readers):
            raise errors.NotFound("the folder has no more indexes of blocks")
        return readers[number]
