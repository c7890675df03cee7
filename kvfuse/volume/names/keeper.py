"""Namespaces come, change and go: the rules for that, and the commits.

A change is one commit, of the settings' record and of the folder's inode; callers return when it is durable. In memory
it holds at once. Namespaces inside each other stay so: names do not cross their borders, and only an empty folder
becomes a namespace, or ceases to be one. So the limits of a namespace are checked when it changes, never later.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import trio

from kvfuse import errors
from kvfuse.sizes import format_size
from kvfuse.volume.api import ROOT_INODE, Caller
from kvfuse.volume.commit.journal import Journal
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.names.folders import Folders
from kvfuse.volume.names.lookup import Lookup
from kvfuse.volume.namespaces.settings import ROOT, Settings, encode_settings
from kvfuse.volume.store import schema
from kvfuse.volume.views import clock

_ROOT_SETTINGS = {
    "kind": "the root's kind is set by 'kvfuse format --cache', or for one mount by 'mount -o cache'",
    "capacity": "the root's capacity is the volume's, and cannot be set",
}


def number_of(node: Node) -> int | None:
    """The namespace whose folder this is; None for every other inode."""
    if node.ino == ROOT_INODE:
        return ROOT
    return node.ino if node.namespace == node.ino else None


def end_namespace(core: Core, node: Node) -> None:
    """The folder is no namespace any more, from its next commit on."""
    core.namespaces.remove(node.ino)
    node.extra[schema.namespace_key(node.ino)] = node.extra[schema.use_key(node.ino, 0)] = None


@dataclass
class Keeper:
    """Makes, changes and removes namespaces. Each membership has one."""

    core: Core
    journal: Journal
    lookups: Lookup
    folders: Folders
    is_shared: bool
    """other hosts have the volume, too"""
    _turn: trio.Lock = field(default_factory=trio.Lock)
    """of whoever checks limits, and then changes what they depend on"""

    async def create(self, node: Node, changes: Mapping[str, Any], caller: Caller | None) -> None:
        """Make an empty directory a namespace. NotEmpty, InvalidArgument; NotPermitted: only its owner may."""
        self._check_allowed(node, caller)
        settings = Settings().changed(changes)
        async with self._turn:
            await self._check_limits(node, node.ino, settings)
            await self._check_empty(node, "a namespace begins with an empty folder")
            node.namespace = node.ino
            self._put(node, node.ino, settings)
        await self.journal.commit(node, durable=True)

    async def change(self, node: Node, changes: Mapping[str, Any], caller: Caller | None) -> None:
        """Change settings of a namespace, by its folder. InvalidArgument, NotPermitted, NoAttribute."""
        number = self._check_allowed(node, caller)
        if number is None:
            raise errors.NoAttribute("the folder is no namespace, but in one")
        if number == ROOT:
            self._check_root(changes)
        async with self._turn:
            namespace = self.core.namespaces.all.get(number)  # None: its record is damaged
            settings = (namespace.stored if namespace is not None else Settings()).changed(changes)
            await self._check_limits(node, number, settings)
            _check_there(node)
            self._put(node, number, settings)
        await self.journal.commit(node, durable=True)

    async def delete(self, node: Node, caller: Caller | None) -> None:
        """Make the empty folder of a namespace an ordinary one of the namespace above. NotEmpty, NotPermitted."""
        number = self._check_allowed(node, caller)
        if number is None:
            raise errors.NoAttribute("the folder is no namespace, but in one")
        if number == ROOT:
            raise errors.NotPermitted("the root of a volume is always a namespace")
        async with self._turn:
            above = await self.lookups.node(node.parent or ROOT_INODE)
            await self._check_empty(node, "what is in a namespace stays in it: remove that first")
            node.namespace = above.namespace
            end_namespace(self.core, node)
            self.folders.let_go(number)
            self._touch(node)
        await self.journal.commit(node, durable=True)

    async def clear(self, node: Node, caller: Caller | None) -> None:
        """Invalidate all that is in a namespace."""
        raise errors.Unsupported("clearing a namespace is not offered yet: remove its files")

    # -- in memory -----------------------------------------------------------------------------------

    def _put(self, node: Node, number: int, settings: Settings) -> None:
        self.core.namespaces.put(number, settings)
        self.folders.hold(number)
        node.extra[schema.namespace_key(number)] = encode_settings(settings)
        self._touch(node)

    def _touch(self, node: Node) -> None:
        node.ctime = clock.now()
        self.journal.pending.touch(node, forced=True)
        self.journal.pending.touch_times(node)

    # -- what is allowed -----------------------------------------------------------------------------

    def _check_allowed(self, node: Node, caller: Caller | None) -> int | None:
        """`number_of`, if the caller may change that."""
        if self.is_shared:
            raise errors.Unsupported("a volume that several hosts share has no namespaces yet")
        if not node.is_directory:
            raise errors.NotADirectory(f"inode {node.ino} is no directory: a namespace is one")
        if caller is not None and caller.uid not in (0, node.uid):
            raise errors.NotPermitted(f"only user {node.uid}, who owns the folder, and root may change this namespace")
        _check_there(node)
        return number_of(node)

    def _check_root(self, changes: Mapping[str, Any]) -> None:
        for name in changes:
            if name in _ROOT_SETTINGS:
                raise errors.InvalidArgument(_ROOT_SETTINGS[name])
            if name in self.core.namespaces.overrides:
                raise errors.InvalidArgument(
                    f"the options of this mount say what the root's {name} is: change it there"
                )

    async def _check_empty(self, node: Node, reason: str) -> None:
        """Nothing has changed since until the next await. NotEmpty, Stale."""
        if not await self.lookups.is_empty(node.ino):
            raise errors.NotEmpty(f"the folder is not empty: {reason}")
        _check_there(node)

    async def _check_limits(self, node: Node, number: int, settings: Settings) -> None:
        """InvalidArgument, if a namespace would have more than what it is in, or less than a namespace in it."""
        own = {}
        for name, limit in (await self._limits_above(node)).items():
            value = getattr(settings, name)
            if limit and value > limit:
                owner = "volume" if (name, limit) == ("capacity", self.core.geometry.capacity) else "namespace above"
                raise _refusal(name, value, f"more than the {owner} has: at most", limit)
            own[name] = value or limit
        for other in list(self.core.namespaces.all.values()):
            for name, limit in own.items():
                value = getattr(other.settings, name)
                if limit and value > limit and await self._is_in(other.number, number):
                    raise _refusal(name, limit, "less than a namespace in it has: at least", value)

    async def _limits_above(self, node: Node) -> dict[str, int]:
        """The limits, by setting, of what is above a folder; 0: none."""
        found = {"capacity": 0, "blocks": 0}
        for number in await self._numbers_above(node):
            namespace = self.core.namespaces.all.get(number)
            for name in found:
                found[name] = found[name] or (getattr(namespace.settings, name) if namespace is not None else 0)
        return {**found, "capacity": found["capacity"] or self.core.geometry.capacity}

    async def _numbers_above(self, node: Node) -> list[int]:
        """The namespaces that a folder is in, the innermost first; not the one whose folder it is."""
        numbers: list[int] = []
        while node.ino != ROOT_INODE and numbers[-1:] != [ROOT]:
            node = await self.lookups.node(node.parent or ROOT_INODE)
            numbers.append(node.namespace)
            node = await self.lookups.node(node.namespace or ROOT_INODE)
        return numbers

    async def _is_in(self, inner: int, outer: int) -> bool:
        if inner in (ROOT, outer):
            return False
        try:
            return outer in await self._numbers_above(await self.lookups.node(inner))
        except errors.Stale:  # it was removed meanwhile
            return False


def _check_there(node: Node) -> None:
    if node.nlink == 0:
        raise errors.Stale(f"directory {node.ino} was removed")


def _refusal(name: str, value: int, relation: str, limit: int) -> errors.InvalidArgument:
    shown, allowed = [format_size(size) if name == "capacity" else f"{size:,}" for size in (value, limit)]
    return errors.InvalidArgument(f"{name} {shown} is {relation} {allowed}")
