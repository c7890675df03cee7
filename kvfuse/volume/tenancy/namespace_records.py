"""How changes of namespaces are stored: with the next commit, or as transactions where other hosts change them, too.

The rules are the keeper's. It hands them in as functions that decide without waiting: where another host was faster,
they are asked again.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

import trio

from kvfuse import errors
from kvfuse.volume.api import ROOT_INODE
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.names.changes import Names
from kvfuse.volume.names.commit_first import ATTEMPTS_MAX, PAUSE_SECONDS, CommitFirst
from kvfuse.volume.names.folders import close_mode, end_access, end_namespace, has_other_token, number_of
from kvfuse.volume.names.name_change import PlanDraft
from kvfuse.volume.namespaces.settings import ROOT, Settings, encode_settings
from kvfuse.volume.store import schema
from kvfuse.volume.store.transaction import Transaction
from kvfuse.volume.tenancy.granting import Granting, first_grants
from kvfuse.volume.tenancy.namespace_news import NamespaceNews
from kvfuse.volume.views import clock

FREE_SECONDS = 3.0
"""beside a grace: for which a namespace that is to end waits until hosts have freed what was removed from it"""

LOOK_SECONDS = 0.2
"""between two looks at that"""

USES_SHARE = 4
"""Records of a namespace's use that are deleted together: one for every so many operations that a commit may have."""

TELL_SECONDS = 1.0
"""for which a clear waits until the kernel was told"""

Decide = Callable[[int], Settings]
"""the settings that a namespace gets, by the namespace that it is in; raises the errors of the change"""


class NamespaceRecords(ABC):
    """Stores changes of namespaces. The keeper has one."""

    @abstractmethod
    async def create(self, node: Node, decide: Decide) -> None:
        """Make an empty directory a namespace. NotEmpty, Stale; Exists: another host has done so just now."""

    @abstractmethod
    async def change(self, node: Node, decide: Decide) -> None:
        """Change the settings of a namespace, by its folder. Stale."""

    @abstractmethod
    async def delete(self, node: Node) -> None:
        """Make the empty folder of a namespace an ordinary one. NotEmpty, Stale."""


@dataclass
class OwnNamespaceRecords(NamespaceRecords):
    """In a volume that one host has: in memory at once, and with the next commit."""

    names: Names

    async def create(self, node: Node, decide: Decide) -> None:
        above = await self._above(node)
        settings = decide(above)
        await self._check_empty(node, "a namespace begins with an empty folder")
        node.namespace = node.ino
        self._put(node, node.ino, settings, above)
        await self.names.journal.commit(node, durable=True)

    async def change(self, node: Node, decide: Decide) -> None:
        above = await self._above(node)
        settings = decide(above)
        check_there(node)
        self._put(node, number_of(node) or ROOT, settings, above)
        await self.names.journal.commit(node, durable=True)

    async def delete(self, node: Node) -> None:
        await self._free_removed(node.ino)
        above = await self._above(node)
        await self._check_empty(node, "what is in a namespace stays in it: remove that first")
        if any(self.names.core.namespaces.accounts.use(node.ino)):
            raise still_open()
        node.namespace = above
        end_namespace(self.names.core, node)
        self._touch(node)
        await self.names.journal.commit(node, durable=True)

    def _touch(self, node: Node) -> None:
        """The folder's record is put with the next commit, with what else goes with it."""
        node.ctime = clock.now()
        self.names.journal.pending.touch(node, forced=True)
        self.names.journal.pending.touch_times(node)

    def _put(self, node: Node, number: int, settings: Settings, above: int) -> None:
        core = self.names.core
        if has_other_token(core, number, settings):
            end_access(core, node)
            node.mode = close_mode(node.mode) if settings.token else node.mode
            self.names.lookup.refresher.news.attributes(node.ino)
        core.namespaces.put(number, settings, above)
        self.names.folders.hold_path(number)
        node.extra[schema.namespace_key(number)] = encode_settings(settings)
        self._touch(node)

    async def _above(self, node: Node) -> int:
        """The namespace that a folder is in."""
        if node.ino == ROOT_INODE:
            return ROOT
        return (await self.names.lookup.find_node(node.parent or ROOT_INODE)).namespace

    async def _check_empty(self, node: Node, reason: str) -> None:
        """Nothing has changed since until the next await. NotEmpty, Stale."""
        if not await self.names.lookup.is_empty(node.ino):
            raise errors.NotEmpty(f"the folder is not empty: {reason}")
        check_there(node)

    async def _free_removed(self, number: int) -> None:
        """Free what removed files of a namespace have: nothing may be charged to one that is gone."""
        if any(self.names.core.namespaces.accounts.use(number)):
            self.names.nameless.reap_unnamed()
            await self.names.journal.commit()
            await self.names.journal.free_given_up(math.inf, number)


@dataclass
class _Change:
    """A change of one namespace, as a transaction."""

    draft: PlanDraft
    """of the folder"""
    records: dict[bytes, bytes | None]
    """key -> value of the namespace's records; None: it is deleted"""
    above: int
    """the namespace that it is in"""
    is_closing: bool = False
    """the folder gets a token"""


@dataclass
class SharedNamespaceRecords(NamespaceRecords):
    """In a shared volume: transactions, which expect the settings of all namespaces as they were looked at.

    A folder becomes a namespace, or ceases to be one, as an empty directory is removed (`CommitFirst.mark_empty`): no
    name enters meanwhile.
    """

    names: Names
    executor: CommitFirst
    news: NamespaceNews
    granting: Granting

    async def create(self, node: Node, decide: Decide) -> None:
        async def plan(version: int) -> _Change:
            if number_of(node) is not None:
                raise errors.Exists("another host has just made the folder a namespace")
            above = node.namespace
            await self.executor.mark_empty(node)
            settings = decide(above)
            change = self._change(node, node.ino, settings, above)
            change.records.update(first_grants(node.ino, settings))
            return change

        await self._carry_out(node, plan)

    async def change(self, node: Node, decide: Decide) -> None:
        async def plan(version: int) -> _Change:
            number = number_of(node)
            if number is None:
                raise errors.NoAttribute("the folder is no namespace any more")
            above = await self.news.above(number)
            settings = _offered(number, decide(above))
            is_kept = number == ROOT or await self.granting.tighten(number, settings, version)
            change = self._change(node, number, settings, above)
            records, expect = self.granting.record(number, settings)
            change.records.update(records)
            change.draft.expect_all(expect)
            change.draft.is_stale |= not is_kept
            return change

        try:
            await self._carry_out(node, plan)
        except errors.OperationError:
            await self.granting.restore(node.namespace)
            raise

    async def delete(self, node: Node) -> None:
        number, accounts = node.ino, self.names.core.namespaces.accounts
        await self._free_removed(number)

        async def plan(version: int) -> _Change:
            if number_of(node) is None:
                raise errors.NoAttribute("the folder is no namespace any more")
            above = await self.news.above(number)
            await self.executor.mark_empty(node)
            if any(accounts.use_of_hosts(number)):
                raise still_open()
            draft = self._draft(node, namespace=above)
            uses = {key: self.news.versions[key] for key in self._uses(number)[: self._uses_max]}
            draft.expect_all(uses)  # together they say nothing, as was looked at
            return _Change(draft, dict.fromkeys([*uses, *schema.namespace_keys(number)]), above)

        await self._carry_out(node, plan)
        left = self._uses(number)
        for start in range(0, len(left), self._uses_max):
            await self.names.journal.transact(Transaction({}, deletes=left[start : start + self._uses_max]))

    def _uses(self, number: int) -> list[bytes]:
        """Keys of the records of a namespace's use, those of clients that are gone first."""
        prefix = schema.use_prefix(number)
        return sorted([key for key in self.news.versions if key.startswith(prefix)])

    @property
    def _uses_max(self) -> int:
        """Most of them in one commit. Members remove their own, too, when they hear that the namespace is gone."""
        return max(1, self.names.core.records.limits.commit_operations_max // USES_SHARE)

    # -- transactions --------------------------------------------------------------------------------

    async def _carry_out(self, node: Node, plan: Callable[[int], Awaitable[_Change]]) -> None:
        """Plan a change and commit it, until it is not refused: by what is read, each time. EngineError.

        ``plan``: is given the version of the number of changes, which the commit expects.
        """
        for attempt in range(ATTEMPTS_MAX):
            count, version = await self.news.read_settings()
            await self.executor.renew_node(node)
            check_there(node)
            change = await plan(version)
            change.draft.expect_all({schema.COUNTER_NAMESPACES: version})
            change.draft.store({**change.records, schema.COUNTER_NAMESPACES: schema.encode_u64(count + 1)})
            transaction = change.draft.make_transaction(partial(self._applied, change))
            if not change.draft.is_stale and await self.names.journal.transact(transaction):
                node.ctime = clock.now()
                self.names.journal.pending.touch_times(node)
                return
            await trio.sleep(random.random() * PAUSE_SECONDS * min(1 + attempt, 16))
        raise errors.EngineError(f"namespaces were changed by others {ATTEMPTS_MAX} times in a row")

    def _change(self, node: Node, number: int, settings: Settings, above: int) -> _Change:
        """A namespace has these settings; a folder that gets another token lets in its owner alone."""
        change = _Change(self._draft(node, namespace=number), {}, above)
        change.records[schema.namespace_key(number)] = encode_settings(settings)
        if settings.token and has_other_token(self.names.core, number, settings):
            change.is_closing = True
            folder = change.draft.change_inode(node)
            folder.set_fields(mode=close_mode(folder.record.mode))
        return change

    def _draft(self, node: Node, namespace: int) -> PlanDraft:
        draft = PlanDraft(self.names.core.client, self.names.core.dentries.delegated)
        change = draft.change_inode(node)
        change.set_fields(namespace=namespace, flags=change.record.flags & ~schema.FLAG_LEAVING)
        return draft

    def _applied(self, change: _Change, version: int) -> None:
        for folder in change.draft.inodes.values() if change.is_closing else ():
            folder.node.mode = close_mode(folder.node.mode)
            self.names.lookup.refresher.news.attributes(folder.node.ino)
        for key, value in change.records.items():
            self.news.stored(key, value, version, change.above)

    async def _free_removed(self, number: int) -> None:
        """Wait until hosts have freed what removed files of a namespace had."""
        core = self.names.core
        with trio.move_on_after(FREE_SECONDS + 2 * core.grace.seconds):
            while any(core.namespaces.accounts.use_of_hosts(number)):
                self.names.nameless.reap_unnamed()
                await self.names.journal.commit()
                await self.executor.space.free_removed_files()
                await self.names.journal.free_given_up(math.inf, None)
                with trio.move_on_after(LOOK_SECONDS):
                    await self.news.heard.wait()


def _offered(number: int, settings: Settings) -> Settings:
    """Unsupported, where several hosts have the volume."""
    if number == ROOT and settings.blocks:
        raise errors.Unsupported("the root of a volume that several hosts share has no quota of blocks: folders may")
    return settings


def check_there(node: Node) -> None:
    """Stale, if the directory was removed."""
    if node.nlink == 0:
        raise errors.Stale(f"directory {node.ino} was removed")


def still_open() -> errors.NotEmpty:
    """The namespace still has something, but no names."""
    return errors.NotEmpty("files that were removed from the namespace are still open")
