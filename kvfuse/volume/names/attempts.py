"""A change of names as a transaction: planned, sent, and planned again where others were faster.

The first attempt is built from what is known here, which a watch keeps up to date: mostly the commit is the only
round trip. After a refused one, or instead of one that would fail, the store is asked: what is answered as an error was
read there.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

import trio

from kvfuse import errors
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.names.changes import Names
from kvfuse.volume.names.lookup import Found
from kvfuse.volume.names.name_change import Draft
from kvfuse.volume.names.path_beliefs import Moved
from kvfuse.volume.names.shared_lookup import SharedLookup
from kvfuse.volume.store import schema
from kvfuse.volume.views import clock

ATTEMPTS_MAX = 100
"""Of a change that others are always faster than. Each refusal means that somebody else got on."""
PAUSE_SECONDS = 0.002
"""Longest pause after the first refusals, a random part of it; it grows to sixteen times that."""


@dataclass
class Attempts(Names):
    """See the module."""

    lookup: SharedLookup

    async def _attempt(self, plan: Callable[[bool], Awaitable[Draft]], what: bytes) -> None:
        """Build a change and commit it until it is not refused. ``plan`` is told whether to ask the store."""
        for attempt in range(ATTEMPTS_MAX):
            try:
                draft = await plan(attempt > 0)
            except (errors.EngineError, Moved):
                raise
            except errors.OperationError:
                if attempt:
                    raise
                continue
            if draft.is_empty:
                return
            if not draft.is_stale and await self._commit(draft, what):
                return
            await trio.sleep(random.random() * PAUSE_SECONDS * min(1 + attempt, 16))
        raise errors.EngineError(f"{what!r}: others changed the same names {ATTEMPTS_MAX} times in a row")

    async def _commit(self, draft: Draft, what: bytes) -> bool:
        """False: it was refused. NoSpace, where there is no room for the records."""
        transaction = draft.transaction(partial(self._applied, draft))
        size = max(0, transaction.size)
        while await self.space.wait_for_records(size, f"{what!r}"):
            pass  # others may be faster meanwhile: then the commit is refused
        with self.core.metadata.held(size):
            return await self.journal.transact(transaction)

    def _applied(self, draft: Draft, version: int) -> None:
        """Names and inodes are so in the store: let everybody here know."""
        core = self.core
        for node in draft.made:
            if node.is_directory:
                node.times_version = version
            if core.nodes.get(node.ino) is None:  # else somebody looked the name up before the answer came
                core.nodes.add(node)
            core.file_count += 1
            core.counters.creates += 1
        for parent, name, meant in draft.names:
            self.journal.renaming(parent, name)
            if core.known.version(parent, name) > version:
                continue  # it was read since, as another host has changed it once more
            core.known.settle(parent, name, meant is not None)
            if meant is None:
                core.known.drop(parent, name, version)
            else:
                core.known.note(parent, name, meant.ino, version)
                core.places.set(meant.ino, parent, name)
                self.lookup.paths.moved(meant, parent, name)
                if meant.is_directory and meant not in draft.made:  # its times stand apart from its record
                    meant.ctime = clock.now()
                    self.journal.touch_times(meant)
            directory = core.nodes.get(parent)
            if directory is not None:
                self._changed(directory)
        for node in draft.removed:
            self._gone(node)

    def _gone(self, node: Node) -> None:
        """The last name of an inode went, in the store."""
        self.core.file_count -= 1
        self.core.tier.drop(node.ino)
        if node.is_directory:
            self.core.tier.retire(node.ino)
            self.core.known.removed(node.ino)
            node.reaped = True
            self.journal.withdraw_attributes(node)
            if node.flags & schema.FLAG_XATTRS:
                self.journal.free_later(node.ino)
            if not self.core.places.known(node.ino):  # or somebody here may be in it
                self.core.nodes.drop(node)
        else:
            self.journal.removed(node)

    async def _settled(self, *nodes: Node) -> None:
        """Have in the store what was changed in these inodes: a transaction is built from what is there."""
        changed = [node for node in nodes if node.nlink and (node.changed or node.committing or not node.version)]
        if changed:
            await self.journal.commit(*changed)

    async def _directory(self, ino: int, is_fresh: bool) -> Node:
        """A directory into which names may be put. NotFound where it was removed."""
        directory = await self.lookup.directory(ino)
        await self._settled(directory)
        try:
            if directory.nlink == 0:
                raise errors.NotFound(f"directory {ino} was removed")
            while is_fresh or directory.flags & schema.FLAG_LEAVING:
                await self.lookup.renew(directory)
                if not directory.flags & schema.FLAG_LEAVING or await self._mark(directory, leaving=False):
                    break
        except errors.Stale:
            raise errors.NotFound(f"directory {ino} was removed") from None
        return directory

    async def _mark(self, directory: Node, *, leaving: bool) -> int:
        """Say in its record that a directory is about to be removed, or that it is not.

        Returns the version of the record then; 0 where it has changed meanwhile, and nothing was done.
        """
        draft = Draft(self.core.client)
        change = draft.change(directory)
        flag = schema.FLAG_LEAVING
        change.set(flags=change.record.flags | flag if leaving else change.record.flags & ~flag)
        marked = [0]
        await self.journal.transact(draft.transaction(marked.append))
        return marked[-1]

    async def _find(self, parent: int, name: bytes, is_fresh: bool) -> Found:
        """What a name means in the store; where that was not asked, as far as is known. Names that wait are stored."""
        while True:
            change = self.journal.find(parent, name)
            if change is not None:
                await self.journal.commit(*[node for node in (change.node, change.moved) if node is not None])
                continue
            found = None if is_fresh else self.lookup.known(parent, name)
            if found is None and not is_fresh:
                return Found(None, False, None, self.journal.epoch)
            if found is None or (found.node is not None and not found.version):
                found = await self.lookup.find_shared(parent, name, is_fresh=True)
            if found.change is None:
                return found
