"""Namespaces come, change and go: the rules for that, and the commits.

A change is one commit, of the settings' record and of the folder's inode (`NamespaceRecords`); callers return when
it is durable. Namespaces inside each other stay so: names do not cross their borders, and only an empty folder
becomes a namespace, or ceases to be one. So the limits of a namespace are checked when it changes, never later.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import msgspec
import trio

from kvfuse import errors
from kvfuse.sizes import format_size
from kvfuse.slab.layout import FEATURE_PACKED
from kvfuse.volume.api import ROOT_INODE, Caller
from kvfuse.volume.inodes import privileges
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.names.changes import Names
from kvfuse.volume.names.folders import number_of
from kvfuse.volume.namespaces.descriptors import difference, is_newer, parse_descriptor
from kvfuse.volume.namespaces.settings import ROOT, Seconds, Settings
from kvfuse.volume.tenancy.namespace_records import NamespaceRecords, check_there

_ROOT_SETTINGS = {
    "kind": "the root's kind is set by 'kvfuse format --cache' or 'kvfuse mount -o cache', for good",
    "capacity": "the root's capacity is the volume's, and cannot be set",
    "token": "the root of a volume has no token: give one to a folder",
}
Quota = Literal["capacity", "blocks"]
CLEAR = "clear"
"""no setting: with it in the same change, a cache is cleared"""
NAMESPACES_MAX = 1000
"""of a volume: the books of each cache take some MB of the daemon's memory"""
NEWS_SECONDS = 1.0
"""for which a clear waits until the kernel was told; it may wait for an answer of ours first"""
USER_NAMESPACES_MAX = 100
"""of a user but root"""
_QUOTAS: tuple[Quota, ...] = get_args(Quota)


@dataclass
class NamespaceEditor:
    """Makes, changes and removes namespaces. Each membership has one."""

    names: Names
    records: NamespaceRecords
    _turn: trio.Lock = field(default_factory=trio.Lock)
    """of whoever checks limits, and then changes what they depend on"""

    async def create(self, node: Node, changes: Mapping[str, Any], caller: Caller | None) -> None:
        """Make an empty directory a namespace. NotEmpty, InvalidArgument; NotPermitted: only its owner may."""
        self._check_allowed(node, caller)
        settings = Settings().changed(changes)

        def decide(above: int) -> Settings:
            self._check_kind(node.ino, Settings(), settings, is_cleared=False)
            self._check_limits(node.ino, above, settings)
            self._check_count(node.uid)
            return settings.begun() if settings.is_blocks else settings

        async with self._turn, self._clearing_blocks(node.ino, lambda: settings.is_blocks):
            await self.records.create(node, decide)
        await self._tell_kernel()

    async def change(self, node: Node, changes: Mapping[str, Any], caller: Caller | None) -> None:
        """Change settings of a namespace, by its folder. InvalidArgument, NotPermitted, NoAttribute."""
        number = self._check_allowed(node, caller)
        if number is None:
            raise errors.NoAttribute("the folder is no namespace, but in one")
        if number == ROOT:
            self._check_root(changes)
        await self._change(node, number, changes)

    async def describe(self, node: Node, descriptor: str, *, may_pin: bool) -> str:
        """A client says what its blocks in a directory are. The descriptor as it is kept.

        ``may_pin``: it may write there; it is the first who says so, or has a later version. Exists: another one is
        pinned. InvalidArgument: it cannot be pinned in this folder.
        """
        wanted = parse_descriptor(descriptor)
        namespace = self.names.core.namespaces.all.get(node.namespace)
        pinned = namespace.stored.descriptor if namespace is not None else ""
        number = number_of(node)
        if pinned == wanted:
            return wanted
        if pinned and (number is None or not may_pin):
            raise _refused_descriptor(pinned, wanted)
        if number is None and may_pin:
            raise errors.InvalidArgument("the folder is part of a namespace, not one of its own: it has no descriptor")
        if number is not None and may_pin:
            self._check_allowed(node, None)
            await self._change(node, number, {"descriptor": wanted})
        return wanted

    async def _change(self, node: Node, number: int, changes: Mapping[str, Any]) -> None:
        others = {name: value for name, value in changes.items() if name != CLEAR}
        is_cleared = begins = False

        def decide(above: int) -> Settings:
            nonlocal is_cleared, begins
            namespace = self.names.core.namespaces.all.get(number)  # None: its record is damaged
            former = namespace.stored if namespace is not None else Settings()
            settings = former.changed(others)
            is_cleared = self._is_cleared(number, former.descriptor, settings.descriptor, asked=CLEAR in changes)
            self._check_kind(number, former, settings, is_cleared=is_cleared)
            self._check_limits(number, above, settings)
            begins = settings.is_blocks and not former.is_blocks
            if begins:
                return settings.begun()
            return settings.cleared() if is_cleared and former.is_blocks else settings

        async with self._turn, self._clearing_blocks(number, lambda: is_cleared or begins):
            await self.records.change(node, decide)
        if is_cleared:
            await self._forget_in_kernel(node)
        else:
            await self._tell_kernel()

    @asynccontextmanager
    async def _clearing_blocks(self, number: int, is_cleared: Callable[[], bool]) -> AsyncIterator[None]:
        try:
            yield
        finally:  # after an error the next epoch is, or will be, stored
            if self.names.core.blocks is not None and is_cleared():
                self.names.core.blocks.clear(number)

    def _check_kind(self, number: int, former: Settings, settings: Settings, *, is_cleared: bool) -> None:
        """NotEmpty: blocks do not become files, nor evicted files blocks. InvalidArgument: hosts share the volume."""
        if settings.kind == former.kind or not (settings.is_blocks or former.is_blocks):
            return
        core, count, remedy = self.names.core, 0, ""
        if former.is_blocks and core.blocks is not None and not is_cleared:
            count = core.blocks.use(number)[1]
            remedy = f"'kvfuse namespace set PATH kind={settings.kind} --clear' clears them"
        if count:
            change = f"from kind={former.kind} to kind={settings.kind}"
            raise errors.NotEmpty(f"it, or a namespace in it, has {count} blocks, which do not go {change}: {remedy}")

    def _is_cleared(self, number: int, pinned: str, wanted: str, *, asked: bool) -> bool:
        """A change of the descriptor clears the namespace. Exists: it may not; InvalidArgument: it is no cache."""
        if not asked and not (pinned and is_newer(wanted, pinned)):
            if pinned not in ("", wanted):
                raise _refused_descriptor(pinned, wanted)
            return False
        if not self._may_lose(number):
            raise errors.InvalidArgument("this namespace is no cache, and loses no file: its descriptor stays")
        return True

    async def delete(self, node: Node, caller: Caller | None) -> None:
        """Make the empty folder of a namespace an ordinary one of the namespace above. NotEmpty, NotPermitted."""
        number = self._check_allowed(node, caller)
        if number is None:
            raise errors.NoAttribute("the folder is no namespace, but in one")
        if number == ROOT:
            raise errors.NotPermitted("the root of a volume is always a namespace")
        async with self._turn:
            await self.records.delete(node)

    async def clear(self, node: Node, caller: Caller | None) -> None:
        """Remove all files of a cache and of no namespace in it: at once for everybody, their room soon after.

        NotPermitted, NoAttribute, InvalidArgument: it is no cache.
        """
        number = self._check_allowed(node, caller)
        if number is None:
            raise errors.NoAttribute("the folder is no namespace, but in one")
        if not self._may_lose(number):
            raise errors.InvalidArgument("this namespace is no cache, and loses no file: remove its files")
        await self._change(node, number, {CLEAR: ""})

    def _may_lose(self, number: int) -> bool:
        """The namespace is one of blocks."""
        blocks = self.names.core.blocks
        return blocks is not None and blocks.is_block_namespace(number)

    async def _forget_in_kernel(self, folder: Node) -> None:
        """Have the kernel forget what it knows below a folder. Of the root, the sweep does so."""
        if folder.ino != ROOT_INODE:
            self.names.lookup.refresher.news.name(folder.parent, folder.name)
            await self._tell_kernel()

    async def _tell_kernel(self) -> None:
        with trio.move_on_after(NEWS_SECONDS):
            await self.names.lookup.refresher.news.told()

    def advance(self, node: Node, seconds: str, caller: Caller | None) -> None:
        """Move the clock by which a cache judges its blocks, on this host and until it is unmounted.

        NotPermitted; InvalidArgument: it is no cache, or that is no time.
        """
        number, blocks = self._check_allowed(node, caller), self.names.core.blocks
        if number is None or blocks is None or not self._may_lose(number):
            raise errors.InvalidArgument("only a namespace of blocks has a clock")
        try:
            blocks.advance(number, msgspec.convert(seconds, Seconds, strict=False))
        except msgspec.ValidationError:
            raise errors.InvalidArgument(f"a clock advances by seconds, 0 to 1e9, not {seconds!r}") from None

    # -- what is allowed -----------------------------------------------------------------------------

    def _check_allowed(self, node: Node, caller: Caller | None) -> int | None:
        """`number_of`, if the caller may change that."""
        if not node.is_directory:
            raise errors.NotADirectory(f"inode {node.ino} is no directory: a namespace is one")
        if caller is not None and not privileges.acts_as_owner(node, caller):
            raise errors.NotPermitted(f"only user {node.uid}, who owns the folder, and root may change this namespace")
        check_there(node)
        return number_of(node)

    def _check_root(self, changes: Mapping[str, Any]) -> None:
        for name in changes:
            if name in _ROOT_SETTINGS:
                raise errors.InvalidArgument(_ROOT_SETTINGS[name])
            if name in self.names.core.namespaces.overrides:
                raise errors.InvalidArgument(
                    f"the options of this mount say what the root's {name} is: change it there"
                )

    def _check_count(self, uid: int) -> None:
        """QuotaExceeded, if the volume, or the user, may have no more namespaces."""
        if len(self.names.core.namespaces.all) > NAMESPACES_MAX:
            raise errors.QuotaExceeded(f"a volume has at most {NAMESPACES_MAX} namespaces: delete some")
        if uid and self.names.folders.count_owned_by(uid) >= USER_NAMESPACES_MAX:
            raise errors.QuotaExceeded(f"user {uid} has {USER_NAMESPACES_MAX} namespaces, and may have no more")

    def _check_limits(self, number: int, above: int, settings: Settings) -> None:
        """InvalidArgument, if a namespace would have more than what it is in, or less than a namespace in it; or what
        the volume has not.
        """
        if settings.compression != "none" and not self.names.core.superblock.features & FEATURE_PACKED:
            raise errors.InvalidArgument("compression needs a later format than that of this volume: make a new one")
        for name in _QUOTAS:
            value, limit, owner = getattr(settings, name), *self._limit_in(above, name)
            if number == ROOT:
                limit = value
            if limit and value > limit:
                raise _refusal(name, value, f"more than the {owner} has: at most", limit)
            most = self._most_in(number, name)
            if 0 < (value or limit) < most:
                raise _refusal(name, value or limit, "less than a namespace in it has: at least", most)

    def _limit_in(self, number: int, quota: Quota) -> tuple[int, str]:
        """The limit of what is in a namespace (0: none), and whose it is."""
        namespaces = self.names.core.namespaces
        limit = namespaces.accounts.limit(number, quota)
        if limit:
            return limit, "namespace above"
        root = namespaces.all[ROOT].settings
        return self.names.core.geometry.capacity if quota == "capacity" else root.blocks, "volume"

    def _most_in(self, number: int, quota: Quota) -> int:
        """The largest quota of the namespaces in one."""
        namespaces = self.names.core.namespaces
        inner = namespaces.all.keys() - {ROOT, number}
        if number != ROOT:
            inner = {one for one in inner if namespaces.accounts.is_within(one, number)}
        return max([getattr(namespaces.all[one].settings, quota) for one in inner], default=0)


def _refused_descriptor(pinned: str, wanted: str) -> errors.Exists:
    return errors.Exists(f"the namespace has another descriptor: {difference(pinned, wanted)}")


def _refusal(name: str, value: int, relation: str, limit: int) -> errors.InvalidArgument:
    shown, allowed = [format_size(size) if name == "capacity" else f"{size:,}" for size in (value, limit)]
    return errors.InvalidArgument(f"{name} {shown} is {relation} {allowed}")
