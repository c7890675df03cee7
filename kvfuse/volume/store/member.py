"""This client among those of a shared volume: its record under a lease, and what it may no longer do without.

The record store alone judges the time: a client is alive as long as its record exists. ``alive`` is the client's own,
more careful view: the lease's time counted from *before* the last successful renewal was sent. So it ends no
later than the lease does, and whoever acts only while it holds is never overtaken.

Commands that check a volume or make it anew have it alone (``schema.MOUNTED``); mounts share it.

**A client that outlives its process.** What it takes to go on as this client is kept for the next daemon (`Standing`),
from before the client joins. That daemon renews the lease, and puts the member record anew (`Member.resume`); others
see the same client all along. The daemon before it has ended; but what it sent may still be on its way:

* *Commits* expect the member record as it was. A new version is put before anything else is read: from then on the
  store refuses them, and what is read is all that there ever will be of them. So nothing but the client's
  number and its lease has to be kept: nobody else puts this record, and it never comes again under the same number.
* *Writes* go to slots that no record names yet, or to none: a shared volume never writes in place. So slots that are
  free when the client goes on are given to nobody before such a write is over or cut off (`hosts.held_slabs`).

Killed anywhere in between, the next daemon does the same again. Where the lease has ended, or the writes cannot be cut
off though they could be (`opening.holding`), it is another client, as ever: others adopt what was this one's.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Self

import msgspec
import trio

from kvfuse import failing
from kvfuse.errors import EngineError, EngineTimeout, VolumeBusy
from kvfuse.kept.keeper import NO_KEEPER, Keeper
from kvfuse.mounttable import top_mount
from kvfuse.remote.records.api import ABSENT, Lease, RecordStore
from kvfuse.remote.records.decorators import RecordDecorator
from kvfuse.remote.segments.api import SegmentStore, Servers, Transfer
from kvfuse.remote.segments.decorators import SegmentDecorator
from kvfuse.slab.layout import KNOWN_FEATURES
from kvfuse.volume.store import peer_records, schema
from kvfuse.volume.store.schema import MemberRecord

RENEWALS = 6
"""in the time of a lease: one that fails with its member of the record store must not keep writes from beginning"""
RETRY_SECONDS = 0.5
"""after a renewal that got no answer"""
LOOK_SECONDS = 0.2
"""between two looks at a record that is about to go"""
RESUME_SECONDS = 10.0
"""for which the next daemon tries to go on as the same client, where the store does not answer"""
RESTING_MAX = 4096
FORM = 1
"""format of a `Standing`"""
KEPT = "member"
"""name of a `Standing`, see `keeper`"""


log = logging.getLogger(__name__)


class Standing(msgspec.Struct, array_like=True, frozen=True):
    """What the next daemon has to know to go on as this client. Of one that did not join yet it finds no record."""

    client: int
    lease: bytes
    """identity"""
    resting: tuple[int, ...] | None = None
    """slabs of its own in which free slots may still be written, or read by others; None: all. So it is until the
    daemon has ended well"""
    form: int = FORM

    def keep(self, keeper: Keeper) -> None:
        if self.lease:
            keeper.keep(KEPT, msgspec.msgpack.encode(self))

    @classmethod
    def take(cls, keeper: Keeper) -> Self | None:
        """What the daemon before this one left. None: nothing that makes sense."""
        kept = keeper.take(KEPT)
        for descriptor in kept.descriptors if kept is not None else ():
            os.close(descriptor)
        try:
            standing = msgspec.msgpack.decode(kept.content, type=cls) if kept is not None else None
            if standing is not None and standing.form != FORM:
                raise msgspec.ValidationError(f"it is of the form {standing.form}, not {FORM}")
        except msgspec.DecodeError as error:
            log.error("what was kept of the client before this one makes no sense: %s", error)
            return None
        return standing


class Member:
    """A client of a shared volume. Made by ``join`` or ``resume``; used from the event loop's thread alone."""

    def __init__(
        self, client: int, lease: Lease, version: int, joined: float, keeper: Keeper = NO_KEEPER,
        before: Standing | None = None,
    ) -> None:  # fmt: skip
        self.client = client
        """random u64"""
        self.lease = lease
        self.version = version
        """of the member record: a commit that expects it is refused once the lease has ended"""
        self.before = before
        """a daemon before this one was this client, and left it so"""
        self.goes_on = False
        """the end of this process is not the client's: its lease is not given back"""
        self._rests = False
        """see `let_run_out`"""
        self._keeper = keeper
        self.lost = trio.Event()
        """the store says that the lease is gone"""
        self._alive_until = joined + lease.ttl
        self._heard = trio.Event()
        """the next renewal, or the loss"""
        self.late_renewals = 0
        """renewals that got no answer"""
        self._writes: set[trio.CancelScope] = set()
        """under way: they end with the lease"""
        self._renewing = trio.CancelScope(shield=True)
        self.on_change: Callable[[float], None] = lambda seconds: None
        """called with the seconds for which the lease holds for sure from now on, when they change"""

    @classmethod
    async def join(
        cls,
        records: RecordStore,
        lease_seconds: float,
        mountpoint: str,
        title: str,
        *,
        alone: bool = True,
        keeper: Keeper = NO_KEEPER,
    ) -> Self:
        """Become a client of the volume, or its only one (``alone``). VolumeBusy says who is in the way.

        A daemon of this host that has died, or whose mount is gone, is waited for: its record goes by itself. Who is
        alone says so first and then looks for others, who look for that when they join: one of two sees the other.
        """
        said = _own_record(mountpoint)
        client = 1 + secrets.randbelow((1 << 64) - 1)  # not NOBODY
        key = schema.member_key(client)
        puts = dict.fromkeys((key, schema.MOUNTED) if alone else (key,), schema.encode_member(said))
        while True:
            if alone:
                await _wait_for_others(records, title, 2 * lease_seconds)
            asked = trio.current_time()
            lease = await records.lease(lease_seconds)
            Standing(client, lease.identity).keep(keeper)
            version = await records.commit(puts, (), dict.fromkeys((key, schema.MOUNTED), ABSENT), lease=lease)
            if version and not (alone and await others_of(records, client)):
                return cls(client, lease, version, asked, keeper)
            keeper.drop(KEPT)
            await lease.revoke()
            await _wait_for_holder(records, title, 2 * lease_seconds)

    @classmethod
    async def resume(cls, records: RecordStore, mountpoint: str, before: Standing, keeper: Keeper) -> Self | None:
        """Go on as the client that the daemon before this one was. None: it is gone. EngineError: nobody knows.

        Others do not hear where it answers until it says so anew.
        """
        key = schema.member_key(before.client)
        old = [peer_records.key_of(before.client)]
        asked = trio.current_time()
        lease = await records.resume_lease(before.lease)
        while lease is not None:
            (found,) = await records.get([key])
            if found is None:  # it had not joined, and is not to join late
                await lease.revoke()
                break
            puts, expect = {key: schema.encode_member(_own_record(mountpoint))}, {key: found.version}
            if version := await records.commit(puts, old, expect, lease=lease):
                Standing(before.client, lease.identity).keep(keeper)
                return cls(before.client, lease, version, asked, keeper, before)
        return None

    @property
    def alive(self) -> bool:
        """The lease holds for sure, whatever the way to the record store does."""
        return not self.lost.is_set() and trio.current_time() < self._alive_until

    @property
    def seconds_left(self) -> float:
        """for which the lease holds for sure"""
        return 0.0 if self.lost.is_set() else max(0.0, self._alive_until - trio.current_time())

    @property
    def fence(self) -> dict[bytes, int]:
        """The record and version that every commit of this client expects."""
        return {schema.member_key(self.client): self.version}

    def check(self, seconds: float = 0.0) -> None:
        """EngineError where the lease is lost, or is not sure to last ``seconds`` more."""
        if self.lost.is_set():
            raise EngineError("this client's lease of the volume is lost: nothing is written any more")
        if trio.current_time() + seconds >= self._alive_until:
            raise EngineError("this client's lease of the volume could not be renewed in time: nothing is written now")

    async def ready(self, seconds: float) -> None:
        """As `check`, but where the next renewal is late, it is waited for as long as the lease holds for sure."""
        while self.alive and trio.current_time() + seconds >= self._alive_until:
            with trio.move_on_at(self._alive_until):
                await self._heard.wait()
        self.check(seconds)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """A write, which the lease was ready for, is done in the body, and cut off when the lease ends.

        EngineTimeout: how far it came is unknown.
        """
        with trio.CancelScope(deadline=self._alive_until) as scope:
            self._writes.add(scope)
            try:
                yield
            finally:
                self._writes.discard(scope)
        if scope.cancelled_caught:
            raise EngineTimeout("this client's lease of the volume ended during a write: how far it came is unknown")

    def lose(self) -> None:
        """The lease is gone."""
        self.on_change(0.0)
        self.lost.set()
        self._heard.set()

    def _renewed(self, asked: float) -> None:
        """The store renewed the lease after ``asked``."""
        self._alive_until = asked + self.lease.ttl
        self.on_change(self.seconds_left)
        self._heard.set()
        self._heard = trio.Event()
        for scope in self._writes:
            scope.deadline = self._alive_until

    async def keep(self) -> None:
        """Renew until the lease is lost or ``leave`` ends it; a cancellation of the caller alone does not."""
        with self._renewing:
            delay = self.lease.ttl / RENEWALS
            while not self.lost.is_set():
                await trio.sleep(delay)
                asked = trio.current_time()
                try:
                    if await self.lease.keepalive():
                        self._renewed(asked)
                        delay = self.lease.ttl / RENEWALS
                    else:
                        log.error("this client's lease of the volume is lost: nothing is written any more")
                        self.lose()
                except EngineError as error:
                    self.late_renewals += 1
                    log.warning("the lease was not renewed: %s", error)
                    delay = min(RETRY_SECONDS, self.lease.ttl / RENEWALS)

    def stay(self) -> None:
        """The next daemon goes on as this client: the end of this one leaves the lease as it is."""
        self.goes_on = not self.lost.is_set()

    def hand_over(self, resting: Sequence[int]) -> None:
        """After `stay`, and after the last write and commit. ``resting``: as of `Standing`."""
        if self.goes_on and len(resting) <= RESTING_MAX:
            Standing(self.client, self.lease.identity, tuple(resting)).keep(self._keeper)

    def begin_to_leave(self) -> None:
        """Before slabs are given back: the next daemon, which would take them for its own, is another client."""
        self._keeper.drop(KEPT)

    def let_run_out(self) -> None:
        """Slabs are left in which a write of the daemon before this one may still happen: nobody gets them soon."""
        self._rests = True

    async def leave(self) -> None:
        """Stop renewing and give the lease back, so that nobody waits for it to run out. Not if the client stays."""
        self._renewing.cancel()
        if self.goes_on:
            return
        self._keeper.drop(KEPT)
        if self.lost.is_set():
            return
        self.lose()
        if self._rests:
            return
        try:
            await self.lease.revoke()
        except EngineError as error:
            log.warning("the lease runs out by itself in %g s: %s", self.lease.ttl, error)


@asynccontextmanager
async def membership(
    records: RecordStore, lease_seconds: float, title: str, mountpoint: str = "", *, alone: bool = True
) -> AsyncIterator[Member]:
    """Be a client of a shared volume in the body, see `Member.join`. Errors of the body come out as they are."""
    async with memberships(records, lease_seconds, title, mountpoint, alone=alone) as join:
        yield await join()


@asynccontextmanager
async def memberships(
    records: RecordStore,
    lease_seconds: float,
    title: str,
    mountpoint: str = "",
    *,
    alone: bool = True,
    keeper: Keeper = NO_KEEPER,
) -> AsyncIterator[Callable[[], Awaitable[Member]]]:
    """Makes this process a client, and another client when the lease was lost or the work could not begin.

    The one before leaves then, the last one at the end: nobody renews the lease of a client that does nothing.
    The first one may be that of a daemon before this one, which the ``keeper`` tells of.
    """
    last: Member | None = None
    try:
        async with trio.open_nursery() as nursery:

            async def join() -> Member:
                nonlocal last
                if last is not None:
                    await last.leave()
                    last = None
                elif (before := Standing.take(keeper)) is not None:
                    last = await _resumed(records, mountpoint, before, keeper)
                if last is None:
                    last = await Member.join(records, lease_seconds, mountpoint, title, alone=alone, keeper=keeper)
                nursery.start_soon(failing.vital_task, last.keep)
                return last

            try:
                with failing.vital():
                    yield join
            finally:
                if last is not None:
                    with trio.CancelScope(shield=True):
                        await last.leave()
    except BaseExceptionGroup as group:
        if len(group.exceptions) > 1:
            raise
        raise group.exceptions[0] from group.exceptions[0].__cause__


async def _resumed(records: RecordStore, mountpoint: str, before: Standing, keeper: Keeper) -> Member | None:
    """The client of the daemon before this one. None: it is gone, or the store said nothing of it."""
    deadline = trio.current_time() + RESUME_SECONDS
    while True:
        try:
            member = await Member.resume(records, mountpoint, before, keeper)
        except EngineError as error:
            log.warning("nobody knows yet whether this is the client that it was: %s", error)
            if trio.current_time() > deadline:
                return None
            await trio.sleep(RETRY_SECONDS)
        else:
            log.info("client %x goes on" if member else "client %x is gone: joining anew", before.client)
            return member


def _own_record(mountpoint: str) -> MemberRecord:
    return MemberRecord(socket.gethostname(), os.getpid(), mountpoint, KNOWN_FEATURES)


async def others_of(records: RecordStore, client: int = schema.NOBODY) -> list[MemberRecord]:
    """The clients that are alive, as far as the store knows, but for ``client``."""
    rows = await records.scan(schema.MEMBER_PREFIX)
    return [_said(row.value) for row in rows if schema.key_client(row.key) != client]


async def _wait_for_others(records: RecordStore, title: str, seconds: float) -> None:
    """Return when nobody has the volume, if that is to be expected within ``seconds``. VolumeBusy otherwise."""
    deadline = trio.current_time() + seconds
    while others := await others_of(records):
        living = [said for said in others if not _is_ending(said)]
        if living or trio.current_time() > deadline:
            raise VolumeBusy(f"the volume {title} is in use by {describe((living or others)[0])}")
        await trio.sleep(LOOK_SECONDS)


async def _wait_for_holder(records: RecordStore, title: str, seconds: float) -> None:
    """Return when the holder's record is gone, if that is to be expected within ``seconds``. VolumeBusy otherwise."""
    deadline = trio.current_time() + seconds
    while True:
        (found,) = await records.get([schema.MOUNTED])
        if found is None:
            return
        said = _said(found.value)
        if not _is_ending(said) or trio.current_time() > deadline:
            raise VolumeBusy(f"the volume {title} is in use by {describe(said)}")
        await trio.sleep(LOOK_SECONDS)


def _said(value: bytes) -> MemberRecord:
    """Of a client that is alive, also where its record is damaged."""
    try:
        return schema.decode_member(value)
    except schema.Malformed:
        return MemberRecord("an unknown host (its record is damaged)", 0, "")


def describe(said: MemberRecord) -> str:
    where = f", mounted on {said.mountpoint}" if said.mountpoint else ""
    return f"process {said.pid} on {said.host}{where}"


def _is_ending(said: MemberRecord) -> bool:
    """The holder is of this host and has died, or its mount is gone."""
    if said.host != socket.gethostname():
        return False
    if not Path(f"/proc/{said.pid}").exists():
        return True
    return bool(said.mountpoint) and top_mount(Path(said.mountpoint)) is None


class FencedRecords(RecordDecorator):
    """Refuses commits of a client that lost its lease: each expects the client's own record."""

    def __init__(self, inner: RecordStore, member: Member) -> None:
        super().__init__(inner)
        self.member = member

    async def commit(
        self,
        puts: Mapping[bytes, bytes],
        deletes: Collection[bytes] = (),
        expect: Mapping[bytes, int] | None = None,
        *,
        durable: bool = False,
        lease: Lease | None = None,
    ) -> int:
        if self.member.lost.is_set():
            self.member.check()
        fence = self.member.fence
        version = await self.inner.commit(puts, deletes, {**(expect or {}), **fence}, durable=durable, lease=lease)
        if not version:
            (found,) = await self.inner.get(list(fence))
            if found is None or found.version != self.member.version:
                self.member.lose()
                self.member.check()
        return version


class FencedSegments(SegmentDecorator):
    """Refuses writes that may outlive this client's lease: the slots may be another's by then."""

    def __init__(self, inner: SegmentStore, member: Member) -> None:
        super().__init__(inner)
        self.member = member
        self.servers = FencedServers(inner, member)

    async def _fenced(self, call: Callable[[], Awaitable[None]]) -> None:
        await self.member.ready(self.limits.deadline)
        with self.member.writing():
            await call()

    async def create(self, segment: int, size: int) -> None:
        await self._fenced(lambda: self.inner.create(segment, size))

    async def remove(self, segment: int) -> None:
        await self._fenced(lambda: self.inner.remove(segment))

    async def write(self, batch: Sequence[Transfer]) -> None:
        await self._fenced(lambda: self.inner.write(batch))

    async def sync(self) -> None:
        await self._fenced(self.inner.sync)


class FencedServers(Servers):
    """Refuses what `FencedSegments` refuses."""

    def __init__(self, inner: SegmentStore, member: Member) -> None:
        super().__init__(inner)
        self._inner, self._member = inner.servers, member

    def answers(self, segment: int, offset: int, length: int) -> bool | None:
        return self._inner.answers(segment, offset, length)

    async def write_some(self, batch: Sequence[Transfer]) -> set[int]:
        await self._member.ready(self.store.limits.deadline)
        with self._member.writing():
            return await self._inner.write_some(batch)

    async def probe(self, places: Sequence[tuple[int, int, int]]) -> None:
        await self._member.ready(self.store.limits.deadline)
        with self._member.writing():
            await self._inner.probe(places)
