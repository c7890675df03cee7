"""Identifies the process at the other end of a connection, and grants it the permissions that the kernel would.

Uid 0 alone allows nothing: a container's root often has no capability, or has them in a user namespace of its own. So
the daemon reads capabilities from /proc. Another process may reuse a pid meanwhile; SO_PEERPIDFD (Linux 6.5) proves
that this did not happen. Where the kernel has no such proof, no process has a capability here.

Between connect() and the look at /proc a process may exec a setuid program. So capabilities count only for a process
whose effective uid was 0 when it connected, which gains no more by that than its bounding set allows it anyway.
"""

from __future__ import annotations

import os
import select
import socket
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

import trio

from kvfuse.credentials import Capability, process_status, shares_user_namespace
from kvfuse.volume.api import Caller

SO_PEERGROUPS = 59
SO_PEERPIDFD = 77
GROUPS_MAX = 256
"""most groups that `getsockopt` can return"""


class Owned(Protocol):
    """Owner, group and mode, which decide permissions."""

    @property
    def uid(self) -> int: ...
    @property
    def gid(self) -> int: ...
    @property
    def mode(self) -> int: ...


@dataclass(frozen=True)
class Powers:
    """The capabilities of a process in its user namespace, and that namespace as the daemon sees it."""

    capabilities: int = 0
    """bit n: capability n is effective"""
    is_ours: bool = False
    """the namespace is the daemon's"""
    uids: tuple[range, ...] = ()
    """owners and groups of inodes that the namespace maps"""
    gids: tuple[range, ...] = ()

    @classmethod
    def from_pid(cls, pid: int) -> Self:
        """Read the powers of a process of effective uid 0 from /proc; any other process has none. OSError.

        Capabilities first, then the namespace: in between a process may enter a child namespace, never a parent.
        """
        fields = process_status(pid)
        if int(fields["Uid"].split()[1]) != 0:
            return cls()
        try:
            is_ours = shares_user_namespace(pid)
        except PermissionError:  # the daemon is not root
            is_ours = False
        uids, gids = (_parse_id_map(Path(f"/proc/{pid}", name).read_text()) for name in ("uid_map", "gid_map"))
        return cls(int(fields["CapEff"], 16), is_ours, uids, gids)

    def has(self, capability: Capability, inode: Owned | None = None) -> bool:
        """Whether the capability counts for the inode; None: for all that the daemon has."""
        if not self.capabilities >> capability & 1:
            return False
        if self.is_ours or inode is None:
            return self.is_ours
        return any(inode.uid in ids for ids in self.uids) and any(inode.gid in ids for ids in self.gids)


def _parse_id_map(table: str) -> tuple[range, ...]:
    """The ids that a uid_map or gid_map maps, as the reader's user namespace numbers them."""
    rows = [[int(word) for word in line.split()] for line in table.splitlines()]
    return tuple(range(outside, outside + count) for _, outside, count in rows)


def read_credentials(connection: socket.socket | trio.socket.SocketType) -> tuple[int, int, int]:
    """(pid, uid, gid) of the process that connected."""
    pid, uid, gid = struct.unpack("iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid, gid


@dataclass(frozen=True)
class ClientProcess:
    """The process that connected, as the kernel says."""

    pid: int
    uid: int
    gid: int
    groups: frozenset[int]
    powers: Powers = Powers()

    @classmethod
    async def from_socket(cls, connection: trio.socket.SocketType, limiter: trio.CapacityLimiter | None = None) -> Self:
        """Identify the peer of a socket. ``limiter``: of threads that look at processes of uid 0."""
        pid, uid, gid = read_credentials(connection)
        try:
            raw = connection.getsockopt(socket.SOL_SOCKET, SO_PEERGROUPS, 4 * GROUPS_MAX)
        except OSError:
            raw = b""  # the process has more groups than Python can ask for: none counts
        groups = frozenset(struct.unpack(f"{len(raw) // 4}I", raw))
        powers = Powers()
        if uid == 0 and pid > 0:
            powers = await trio.to_thread.run_sync(_prove_powers, connection.fileno(), pid, limiter=limiter)
        return cls(pid, uid, gid, groups, powers)

    @property
    def is_unlimited(self) -> bool:
        """Whether it could end the daemon, so that limits of users would not hold it back."""
        if self.uid == 0:
            return self.powers.has(Capability.SYS_ADMIN) or self.powers.has(Capability.SYS_RESOURCE)
        return self.uid == os.geteuid()

    def make_caller(self) -> Caller:
        return Caller(self.uid, self.gid, self.pid, self.powers.has(Capability.FSETID), self.groups)

    def may_access(self, inode: Owned, wanted: int) -> bool:
        """Whether the kernel would grant the permission bits ``wanted`` (4 read, 2 write, 1 search)."""
        if self.uid == inode.uid:
            granted = inode.mode >> 6
        elif inode.gid == self.gid or inode.gid in self.groups:
            granted = inode.mode >> 3
        else:
            granted = inode.mode
        return wanted & ~granted & 7 == 0 or self._may_override(inode, wanted)

    def _may_override(self, inode: Owned, wanted: int) -> bool:
        """Decide as the kernel's ``generic_permission`` does after the permission bits refused."""
        is_directory = stat.S_ISDIR(inode.mode)
        reads = not wanted & 2 if is_directory else wanted == 4
        if reads and self.powers.has(Capability.DAC_READ_SEARCH, inode):
            return True
        executes = wanted & 1 and not is_directory
        return (not executes or inode.mode & 0o111 != 0) and self.powers.has(Capability.DAC_OVERRIDE, inode)

    def may_take_name(self, directory: Owned, inode: Owned) -> bool:
        """Whether the sticky bit of the directory lets it remove or replace a name of the inode."""
        return (
            not directory.mode & stat.S_ISVTX
            or self.uid in (directory.uid, inode.uid)
            or self.powers.has(Capability.FOWNER, inode)
        )


def _prove_powers(connection: int, pid: int) -> Powers:
    """Powers of the process that connected a socket; none where it ended, or the kernel cannot prove otherwise."""
    try:
        with socket.socket(fileno=os.dup(connection)) as peer:
            pidfd = struct.unpack("i", peer.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD, 4))[0]
        try:
            powers = Powers.from_pid(pid)
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            return Powers() if poll.poll(0) else powers
        finally:
            os.close(pidfd)
    except (OSError, ValueError, KeyError):
        return Powers()
