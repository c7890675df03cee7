"""One client at a time changes the segments of a shared volume: its devices, or which segments there are.

A record says which. It stays when that client dies; who follows waits until nothing that it had under way can happen
any more.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import trio

from kvfuse.errors import EngineError, VolumeBusy
from kvfuse.remote.records.api import ABSENT, RecordStore
from kvfuse.volume.store import schema
from kvfuse.volume.store.member import Member

log = logging.getLogger(__name__)


@dataclass
class SoleChanger:
    """One per membership. ``records``: of the volume, as they are then; ``quarantine``: seconds after which nothing is
    under way of a client that died.

    ``member``: this client; None: no other client has the volume, or comes to have it.
    """

    records: Callable[[], RecordStore]
    quarantine: Callable[[], float]
    member: Member | None
    lock: trio.Lock = field(default_factory=trio.Lock)
    """of this client's own changes"""

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """No other change is made in the body. VolumeBusy, EngineError."""
        async with self.lock:
            if self.member is None:
                yield
                return
            version = await self._claim(self.member)
            try:
                yield
            finally:
                with trio.move_on_after(self.records().limits.deadline, shield=True):
                    try:
                        await self.records().commit({}, [schema.CHANGER], {schema.CHANGER: version}, durable=True)
                    except EngineError as error:
                        log.warning("that this host changes the segments stays in the records: %s", error)

    async def _claim(self, member: Member) -> int:
        """The version of the record that says that this client changes the segments."""
        records, value = self.records(), schema.encode_u64(member.client)
        while True:
            (found,) = await records.get([schema.CHANGER])
            if found is not None:
                client = schema.decode_u64(found.value)
                (other,) = await records.get([schema.member_key(client)])
                if other is not None and client != member.client:
                    raise VolumeBusy("another host changes the volume's segments: try again")
                if client != member.client:
                    await trio.sleep(self.quarantine())  # its last writes are over then
            expect = {schema.CHANGER: found.version if found is not None else ABSENT}
            if version := await records.commit({schema.CHANGER: value}, (), expect, durable=True):
                return version
