"""Opens tables of blocks (`volume/blocks/shown_tables`), and arenas, for a connection that maps them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from kvfuse import errors
from kvfuse.access.namespace_access import NamespaceAccess
from kvfuse.access.namespace_handle import NamespaceHandle
from kvfuse.usrbio.daemon.row_calls import RowCalls
from kvfuse.usrbio.daemon.user_accounts import UserAccount
from kvfuse.volume.api import RingApi, RowApi, RowTable

TABLES_MAX = 64
"""tables of one connection"""
HANDLES_MAX = 16
"""newest handles of one folder, which may give a right to an arena"""


@dataclass
class Indexes:
    """The tables of one connection. Event loop only."""

    volume: RingApi
    admission: NamespaceAccess
    _tables: list[tuple[RowTable, Any]] = field(default_factory=list)
    """with the pages for their touches"""

    def __post_init__(self) -> None:
        self.peer = self.admission.peer
        self._rows = RowCalls(self.volume, self.peer)

    async def open(
        self, namespace: NamespaceHandle, number: int, account: UserAccount
    ) -> tuple[tuple[int, ...], list[int]]:
        """Open a table: (size), and descriptors of it and of its page for touches.

        ``number`` 0: that of blocks that this client puts; from 1 on those of other owners and modes. NotFound: no
        more exist. PermissionDenied: the client may not list the folder. Unsupported: the daemon has to count what is
        read, could not take memory back, or the blocks are files. QuotaExceeded: the user has its share of tables;
        ``account`` has those of the connection, also at its end.
        """
        if not self.volume.tier.may_show(is_unlimited=self.peer.is_unlimited):
            raise errors.Unsupported("this daemon could not take shared memory back: it lacks CAP_SYS_ADMIN")
        await self._check(namespace)
        if namespace.measures.limiters:
            raise errors.Unsupported("the speed of this namespace is limited: its blocks are got through rings")
        store = self.volume.rows
        if store is None or await self.volume.blocks.block_namespace(namespace.ino) is None:
            raise errors.Unsupported("blocks of this folder are files: they are got through rings")
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
            touches.pid = self.peer.pid
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
        if len(self._tables) >= TABLES_MAX:
            raise errors.InvalidArgument(f"a connection has at most {TABLES_MAX} tables of blocks")

    async def map_arena(self, arena: int, namespaces: Iterable[NamespaceHandle], *, is_viewed: bool) -> int:
        """A descriptor of an arena that has blocks of which the client has a live table, or (``is_viewed``) a view.

        ``namespaces``: what the client has registered: one of them has to be the arena's directory, and to let the
        client list it now. PermissionDenied, also where there is no such arena.
        """
        tier = self.volume.tier
        found = tier.readers_of(arena)
        own = [namespace for namespace in namespaces if found is not None and namespace.ino == found[0].directory]
        for namespace in own[-HANDLES_MAX:] if is_viewed else ():
            with suppress(errors.PermissionDenied, errors.Stale, errors.NotFound):
                await self._check(namespace)
                found = tier.readers_of(arena)
                if found is not None and (namespace.has_token or self.peer.may_access(found[0], 4)):
                    return tier.arena_descriptor(arena, namespace.ancestors)
        if found is None and self.volume.rows is not None:
            return await self._map_arena_of_rows(self.volume.rows, arena, list(namespaces), is_viewed=is_viewed)
        raise errors.PermissionDenied(f"the client has neither a view in arena {arena} nor a table of it, or may not")

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

    async def _check(self, namespace: NamespaceHandle) -> None:
        directory = await self.admission.read_directory(namespace)
        namespace.may_put = namespace.has_token or self.peer.may_access(directory, 3)
        if namespace.is_absent or not (namespace.has_token or self.peer.may_access(directory, 5)):
            raise errors.PermissionDenied("the client's user may not list this folder")
