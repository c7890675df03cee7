"""Decides which namespaces a client may use: without a token, with a folder that lets it in, or whose token it showed.

A client shows tokens once for its connection, and never says whose they are. So it learns of a namespace that it may
not use only what it learns of a folder that was removed: ESTALE when it registers something of it. A handle that it has
from before (the namespace was given another token, or its folder another owner) finds nothing. The daemon looks up
names that nobody can guess in place of those asked for, in the same way: so neither the answer, nor the time that it
takes, depends on which names exist.

Modes decide as they are now, those of the directories above a registered one, too: as the kernel would decide for a
path. A descriptor of a directory lets a process in whatever becomes of those above, so they count only for a client
whose user could go that way when it registered the directory.
"""

from __future__ import annotations

import itertools
import os
import stat
from dataclasses import dataclass, field

from kvfuse import errors
from kvfuse.access.client_process import ClientProcess, Owned
from kvfuse.access.namespace_handle import UNCHECKED, Group, NamespaceHandle
from kvfuse.volume.api import Attributes, RingApi
from kvfuse.volume.measures.gates import ENDED, Gate, fits, is_token

TOKENS_MAX = 16
"""tokens of one connection"""
ROUNDS = 4
"""attempts to read the rights of a client, where they change meanwhile"""
_UNKNOWN = os.urandom(16).hex().encode()
_numbers = itertools.count()


@dataclass
class NamespaceAccess:
    """The rights of one connection to namespaces. Event loop only."""

    volume: RingApi
    peer: ClientProcess
    _tokens: list[str] = field(default_factory=list)

    def add_token(self, token: str) -> None:
        """Add a token that the client showed. InvalidArgument: it is none, or one too many."""
        if not is_token(token):
            raise errors.InvalidArgument("this is no token of a namespace")
        if token in self._tokens:
            return
        if len(self._tokens) >= TOKENS_MAX:
            raise errors.InvalidArgument(f"a connection shows at most {TOKENS_MAX} tokens")
        self._tokens.append(token)

    async def check_access(self, ino: int) -> bool:
        """Whether the client has shown the token for an inode's namespace. Stale: the client needs one, and has not."""
        gate = await self.volume.inodes.gate(ino)
        if gate is None or not gate.lock:
            return False
        has_token = self._has_token(gate)
        if not has_token and not await self._may_enter(gate):
            self.volume.inodes.measures(ino).failures["token"] += 1
            raise errors.Stale(f"inode {ino} was removed")
        return has_token

    async def may_reach(self, directory: int) -> bool:
        """Whether the client's user may search all directories above one. Stale: it was removed."""
        _, above = await self.volume.search.ancestors(directory)
        return all(self.peer.may_access(one, 1) for one in above)

    async def find_group(self, directory: int) -> Group:
        """The group that the client's new blocks in a directory have. Stale: it was removed."""
        ancestors, _ = await self.volume.search.ancestors(directory)
        changes = ancestors.changes
        found = await self.volume.inodes.attributes(directory)
        return Group(found.gid if found.mode & stat.S_ISGID else self.peer.gid, ancestors, changes)

    async def read_directory(self, namespace: NamespaceHandle) -> Attributes:
        """Read a registered directory, and the client's present rights into ``namespace``.

        PermissionDenied: the client's user may not reach it any more. ``namespace.is_absent`` may be set afterwards.
        """
        for _ in range(ROUNDS):
            if not namespace.is_checked:
                await self._refresh(namespace)
            directory = await self.volume.inodes.attributes(namespace.ino)
            if namespace.is_checked:
                break
        if namespace.is_cut_off and not namespace.is_absent:
            raise errors.PermissionDenied("a folder above this one does not let the client's user through any more")
        return directory

    async def _refresh(self, namespace: NamespaceHandle) -> None:
        """Read again whether the client may use a registered directory."""
        gates = self.volume.gates
        epoch, namespace.epoch = gates.epoch, UNCHECKED
        try:
            namespace.ancestors, above = await self.volume.search.ancestors(namespace.ino)
            namespace.changes = namespace.ancestors.changes
            namespace.group = await self.find_group(namespace.ino)
            is_cut_off = namespace.by_path and not all(self.peer.may_access(one, 1) for one in above)
            namespace.has_token = await self.check_access(namespace.ino)
            namespace.is_absent = await self._has_other_descriptor(namespace)
            namespace.is_cut_off = is_cut_off and not namespace.has_token
        except errors.Stale:
            namespace.has_token, namespace.is_absent = False, True
        namespace.blocks = None  # what it may read is found anew
        if namespace.is_absent or namespace.is_cut_off:
            namespace.bindings = {}  # or ring threads would use stale bindings
        namespace.gates, namespace.epoch = gates, epoch if epoch != ENDED else UNCHECKED

    async def describe(self, namespace: NamespaceHandle, descriptor: str) -> None:
        """Set what the client says its blocks are. Exists: the namespace has another descriptor. Stale."""
        namespace.has_token = await self.check_access(namespace.ino)
        may_pin = self.may_access(namespace, await self.volume.inodes.attributes(namespace.ino), 3)
        may_pin &= not namespace.read_only
        try:
            namespace.descriptor = await self.volume.inodes.describe(namespace.ino, descriptor, may_pin=may_pin)
        except errors.Exists:
            self.volume.inodes.measures(namespace.ino).failures["descriptor"] += 1
            raise
        namespace.epoch = UNCHECKED

    async def _has_other_descriptor(self, namespace: NamespaceHandle) -> bool:
        if not namespace.descriptor:
            return False
        gate = await self.volume.inodes.gate(namespace.ino)
        return gate is not None and gate.descriptor not in ("", namespace.descriptor)

    def may_access(self, namespace: NamespaceHandle, inode: Owned, wanted: int) -> bool:
        """`ClientProcess.may_access`, for an inode in a namespace, whose token allows all."""
        return namespace.has_token or self.peer.may_access(inode, wanted)

    def _has_token(self, gate: Gate) -> bool:
        return True in [fits(gate.lock, token) for token in self._tokens]  # takes the same time for any token

    async def _may_enter(self, gate: Gate) -> bool:
        return self.peer.may_access(await self.volume.inodes.attributes(gate.folder), 1)


def make_blind_names(count: int) -> list[bytes]:
    """New names, of files that do not exist."""
    return [_UNKNOWN + b"%d" % next(_numbers) for _ in range(count)]
