"""A volume that runs: what goes on beside its operations, from the first commit to the last, over any number of leases.

`volume.Volume` adds the operations.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import trio

from kvfuse import errors
from kvfuse.options.config import Options
from kvfuse.volume.check.scrub import Scrubber
from kvfuse.volume.content.chunks import forget_lost
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.opening.holding import Held
from kvfuse.volume.opening.loading import load_core
from kvfuse.volume.parts import Parts
from kvfuse.volume.store import schema
from kvfuse.volume.store.joined_reads import SharedRecords
from kvfuse.volume.store.sealed import ScanPages

FINISH_ATTEMPTS = 3
FINISH_PAUSE = 1.0
"""Seconds between two of these: what fails at once may not a moment later."""
FREE_SECONDS = 5.0
"""At the end, for what was removed and has still to be freed; the next client sees to the rest."""
REJOIN_SECONDS = 0.5
"""Pause before the next attempt to join a volume again."""

log = logging.getLogger(__name__)


async def make_parts(options: Options, held: Held, former: Core | None = None) -> Parts:
    """The parts of a volume, from its records. ``former``: of the membership before."""
    records = held.records if held.member is None else SharedRecords(held.records)
    core = await load_core(options, held._replace(records=records))
    if former is not None:
        core.succeed(former)
    return Parts(core, options, held.member)


class RunningVolume:
    """The parts of a mounted volume and its background tasks. ``read_only``: nothing is ever committed."""

    def __init__(self, parts: Parts, options: Options, nursery: trio.Nursery, held: Held) -> None:
        self.read_only = parts.core.read_only
        self.sections: dict[str, Callable[[], object]] = {}
        """what doors add to `stats`, by name"""
        self.user_sections: dict[str, Callable[[int], object]] = {}
        """the same for one user, a uid"""
        self.tier = parts.core.tier
        self.reading_threads = parts.core.reads.threads
        self._options = options
        self._held = held
        self._keeping = trio.CancelScope()
        self._nursery = nursery
        self._background_count = 0
        self._background_done = trio.Event()
        self._opened = time.time()
        self._scrubber = Scrubber(self, options)
        self._take_on(parts)

    def stats_of(self, uid: int) -> dict[str, object]:
        return {name: section(uid) for name, section in self.user_sections.items()}

    def _take_on(self, parts: Parts) -> None:
        """Go on with these."""
        self.parts = parts
        self.core = parts.core
        self.flusher, self.journal = parts.flusher, parts.journal
        self.reader, self.writer, self.cutter = parts.reader, parts.writer, parts.cutter
        self.lookups, self.names = parts.lookups, parts.names
        self.blocks, self.access = parts.blocks, parts.mapper.access
        self.coherence, self.leases = parts.coherence, parts.leases
        if self.coherence is not None:
            self.sections["coherence"] = self.coherence.statistics

    # -- in the background ---------------------------------------------------------------------------

    def _background(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work`` beside the operations; `finish` waits for it."""

        async def run() -> None:
            try:
                with trio.CancelScope(shield=True):
                    await work
            finally:
                self._background_count -= 1
                self._background_done.set()
                self._background_done = trio.Event()

        self._background_count += 1
        self._nursery.start_soon(run)

    async def _reap_orphans(self) -> None:
        """Free what files had that were unlinked, but open, when the last daemon ended."""
        async for rows, _ in ScanPages(self.core.records, b"o", 100):
            for row in rows:
                try:
                    await self._reap_orphan(schema.decode_inode(row.value))
                except errors.Corrupt as error:
                    log.error("a removed file is not freed: %s", error)
            await self.journal.commit()

    async def _reap_orphan(self, record: schema.InodeRecord) -> None:
        """Corrupt, with nothing freed, where a record of the file is damaged."""
        node = self.reader.chunks.restore_chunks(Node.from_record(record), record)
        node.nlink = 0
        await self.names.nameless.load(node)
        forget_lost(node)
        if self.names.nameless.removal.is_large(node):
            await self.names.nameless.removal.take_apart(node)
        else:
            self.names.nameless.reap(node)

    async def start(self) -> None:
        """Begin to commit and to write back, and free what the last daemon could not."""
        await self._nursery.start(self.parts.run)
        if self._held.again is not None:
            self._nursery.start_soon(self._keep_membership)
        elif self._held.member is None and not self.read_only:
            await self.journal.commit()  # numbers are announced before the first is given
            await self._reap_orphans()
        if self._options.scrub.rate:
            self.sections["scrub"] = self._scrubber.statistics
            self._nursery.start_soon(self._scrubber.run)

    async def finish(self) -> None:
        """Everything that was changed reaches the engines, also when some of it fails at first; then nothing runs."""
        self._keeping.cancel()
        self._scrubber.stop()
        try:
            if not self.read_only and not self.parts.life.is_over:
                await self._store_all()
                await self._free_removed()
                await self.parts.leave()
        finally:
            self.parts.life.stop()

    # -- a lease that was lost -----------------------------------------------------------------------

    async def _keep_membership(self) -> None:
        """Go on as another client whenever the lease was lost; until `finish`."""
        with self._keeping:
            while self._held.member is not None:
                await self._held.member.lost.wait()
                await self._begin_anew()

    async def _begin_anew(self) -> None:
        """Forget everything that is not in the store. Calls meanwhile find what was known, and can change nothing."""
        former = self.parts
        await former.abandon()
        log.error("the lease of the volume was lost, and all that was not stored by then: joining again")
        core = former.core
        while self.parts is former:
            try:
                parts = await self._join_again(core)
                core = parts.core  # which has what it took over, also when it does not come to run
                await self._run_again(parts)
            except (errors.EngineError, errors.VolumeError) as error:
                log.warning("the volume cannot be joined again yet: %s", error)
                await trio.sleep(REJOIN_SECONDS)
        log.warning("joined the volume again")
        for ino, parent, name in self.core.places:
            self.lookups.refresher.news.name(parent, name)
            self.lookups.refresher.news.content(ino)

    async def _join_again(self, former: Core) -> Parts:
        assert self._held.again is not None
        self._held = held = await self._held.again()
        return await make_parts(self._options, held, former)

    async def _run_again(self, parts: Parts) -> None:
        try:
            await self._nursery.start(parts.run)
        except BaseException:
            parts.life.stop()
            raise
        self._take_on(parts)

    async def _store_all(self) -> None:
        while self._background_count:
            await self._background_done.wait()
        self.names.nameless.reap_unnamed()
        self.access.store_all()
        for _ in range(FINISH_ATTEMPTS - 1):
            try:
                await self.journal.sync()
            except errors.EngineError as error:
                log.warning("closing: %s; trying again", error)
                await trio.sleep(FINISH_PAUSE)
            else:
                return
        await self.journal.sync()

    async def _free_removed(self) -> None:
        """Leave no removed files behind, where that takes no grace."""
        if self.core.is_alone():
            with trio.move_on_after(FREE_SECONDS), suppress(errors.EngineError):
                await self.parts.space.free_removed_files()
                await self.journal.sync()
