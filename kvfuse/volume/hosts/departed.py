"""Adopt what departed clients left behind: their writes in flight, removed files, and records.

* *Writes*: a client's sequence record holds its identity at the segment engine. The client that takes its slabs has the
  engine refuse the writes that it may still have in flight (`fence`); where the engine cannot, a grace passes instead.
* *Removed files*: the heir makes each orphan record its own, by a commit that expects it unchanged and the remover
  gone. So one client alone ever frees it.
* *Sequence records* go last, when the client holds no slab any more. One that left in order says there whether anything
  is under way in the slabs that it could not give back (`HeldSlabs.last_words`).

A client that goes on after its daemon ended (`store.member`) finds its own orphan records, which are not to be claimed.

A client looks at its start, and whenever another one departs, until nothing is left of those whose heir it is.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import trio

from kvfuse.errors import EngineError
from kvfuse.remote.records.api import ABSENT, Record
from kvfuse.volume.hosts.freed_slots import JournalPart
from kvfuse.volume.hosts.slab_view import SlabView
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.namespaces.grants import moved_part
from kvfuse.volume.store import schema
from kvfuse.volume.store.schema import NOBODY
from kvfuse.volume.store.sealed import ScanPages, get_sound
from kvfuse.volume.store.transaction import Transaction

CLAIMS_MAX = 32
"""Orphan records that are claimed at the same time."""
SCAN_ROWS = 1000
FENCE_PAUSE_SECONDS = 10.0
"""Before a client is cut off that could not be: others wait meanwhile, and a grace does as well."""

log = logging.getLogger(__name__)


@dataclass
class Inheritance:
    """Adopts what departed clients left; one membership's parts own it. ``heir``: who adopts from whom."""

    core: Core
    journal: JournalPart
    view: SlabView
    heir: Callable[[int], int]
    free_later: Callable[[int], None]
    """called with inodes whose orphan records are this client's now"""

    def __post_init__(self) -> None:
        self.is_behind = True
        """there may be something of clients that are gone"""
        self._turn = trio.Lock()
        self._knows_own = not self.core.left.is_resumed
        """the orphan records that the daemon before this one left are known"""
        self._fenced: dict[int, bool] = {}
        self._not_fenced: dict[int, float] = {}
        """clients that could not be cut off -> when that is tried again"""

    # -- writes --------------------------------------------------------------------------------------

    async def fence(self, client: int) -> bool:
        """Have the segment engine cut off a client, if that is gone; once each. False: its writes may still happen.

        At once, where that was tried lately. EngineError where the record store does not answer.
        """
        if client not in self._fenced:
            if trio.current_time() < self._not_fenced.get(client, 0.0):
                return False
            keys = [schema.member_key(client), schema.sequence_key(client)]
            member, sequence = await get_sound(self.core.records, keys)
            if member is not None or sequence is None:
                return False
            if sequence.value == schema.NOBODY_TO_CUT_OFF:
                return True
            try:
                self._fenced[client] = await self.core.segments.fence(sequence.value)
            except EngineError as error:
                log.warning("a client that is gone could not be cut off, its slabs rest for a while: %s", error)
                self._not_fenced[client] = trio.current_time() + FENCE_PAUSE_SECONDS
                return False
        return self._fenced[client]

    async def fence_all(self, clients: Iterable[int]) -> None:
        """As `fence`, side by side: they wait for the engine together, and nobody for them."""
        await _side_by_side([partial(self.fence, client) for client in clients])

    # -- records -------------------------------------------------------------------------------------

    async def settle(self) -> bool:
        """Take over what is there now; True if there were removed files. EngineError: the rest is done again."""
        async with self._turn:
            self.is_behind = False
            try:
                count = await self._claim_orphans()
                await self._drop_sequences()
            except EngineError:
                self.is_behind = True
                raise
        return count > 0

    def _is_ours(self, client: int) -> bool:
        return client not in self.view.members and self.heir(client) == self.core.client

    async def _rows(self, kind: bytes) -> list[Record]:
        return [row async for rows, _ in ScanPages(self.core.records, kind, SCAN_ROWS) for row in rows]

    async def _claim_orphans(self) -> int:
        rows = []
        for row in await self._rows(b"o"):
            remover = schema.decode_orphan(row.value).remover
            if self._is_ours(remover):
                rows.append(row)
            elif remover == self.core.client and not self._knows_own and row.version < self.core.left.version:
                self.free_later(schema.key_inode(row.key))
        self._knows_own = True
        for start in range(0, len(rows), CLAIMS_MAX):
            await _side_by_side([partial(self._claim, row) for row in rows[start : start + CLAIMS_MAX]])
        return len(rows)

    async def _claim(self, row: Record) -> None:
        """Make an orphan record this client's. One that moved meanwhile is somebody else's business."""
        record = schema.decode_orphan(row.value)
        expect = {row.key: row.version}
        if record.remover != NOBODY:
            expect[schema.member_key(record.remover)] = ABSENT
        puts = {row.key: schema.encode_orphan(record, self.core.client)}
        await self.journal.transact(Transaction(expect, puts, applied=lambda _: self.free_later(record.ino)))

    async def _drop_sequences(self) -> None:
        """Those whose slabs and files are still to be taken over are left for later."""
        for row in await self._rows(b"k"):
            client = schema.key_client(row.key)
            if not self._is_ours(client):
                continue
            has_use = client in self.core.namespaces.accounts.elsewhere.clients()
            if client in self.view.held_counts or client in self.view.counts or has_use:
                self.is_behind = True
                continue
            expect = {row.key: row.version, schema.member_key(client): ABSENT}
            await self.journal.transact(Transaction(expect, deletes=[row.key]))
            self._fenced.pop(client, None)
            self._not_fenced.pop(client, None)

    async def take_over_counts(self, client: int) -> None:
        """Add the counts of a client that is gone, or leaves, to the common ones. The first client to do so wins.

        Any may be below 0: who removed what another client made that is still here.
        """
        keys = [schema.COUNTER_FILES, schema.files_key(client)]
        common, own = await get_sound(self.core.records, keys)
        if common is None or own is None:
            return
        total = schema.decode_counts(common.value).add(schema.decode_counts(own.value))
        expect = {keys[0]: common.version, keys[1]: own.version}
        if client != self.core.client:
            expect[schema.member_key(client)] = ABSENT
        await self.journal.transact(Transaction(expect, {keys[0]: schema.encode_counts(*total)}, [keys[1]]))

    async def take_over_uses(self, client: int, spaces: Iterable[int]) -> None:
        """Likewise its use of namespaces, which is added to the records of client 0, with as much of what it may use.

        One of a namespace that was not heard of yet is left for later.
        """
        chain = self.core.namespaces.accounts.chain
        for number in spaces:
            keys = [schema.use_key(number, schema.NOBODY), schema.use_key(number, client)]
            quotas = [schema.grants_key(one) for one in chain(number)]
            rows = await get_sound(self.core.records, [schema.namespace_key(number), *keys, *quotas])
            settings, common, own, *grants = rows
            if own is None or (settings is not None and number not in self.core.namespaces.all):
                continue
            expect = {keys[0]: common.version if common is not None else ABSENT, keys[1]: own.version}
            if client != self.core.client:
                expect[schema.member_key(client)] = ABSENT
            total = schema.decode_counts(own.value)
            if common is not None:
                total = total.add(schema.decode_counts(common.value))
            puts = {keys[0]: schema.encode_counts(*total)} if settings is not None else {}
            for key, row in zip(quotas, grants, strict=True):
                expect[key] = row.version if row is not None else ABSENT
                if row is not None:
                    puts[key] = moved_part(row.value, client, schema.decode_counts(own.value))
            await self.journal.transact(Transaction(expect, puts, [keys[1]]))


async def _side_by_side(calls: Sequence[Callable[[], Awaitable[object]]]) -> None:
    """They share round trips and commits. The first error is raised when all have ended."""
    errors: list[EngineError] = []

    async def run(call: Callable[[], Awaitable[object]]) -> None:
        try:
            await call()
        except EngineError as error:
            errors.append(error)

    async with trio.open_nursery() as nursery:
        for call in calls:
            nursery.start_soon(run, call)
    if errors:
        raise errors[0]
