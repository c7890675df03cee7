"""Checks which callers may have a holder run a program, and which programs. Standard library only, as all of `main`.

A program that the holder runs has the holder's user, groups and capabilities. Uid 0 alone does not prove that the
caller has as much: a container's root may lack capabilities, or have them in a user namespace of its own. So the holder
reads the caller's effective capabilities and its user namespace from /proc. A pid may be reused meanwhile; SO_PEERPIDFD
(Linux 6.5) proves that this did not happen; without that proof the holder refuses.

Only root and the holder's user may be able to change the program: the file, each folder above it, and each link on the
way. The check begins at the root. In a folder that other users cannot write to, they cannot replace a name, so the
checked file is the one that is executed a moment later.
"""

from __future__ import annotations

import errno
import os
import select
import shlex
import socket
import stat
import struct
from contextlib import ExitStack

SO_PEERPIDFD = 77
CAPABILITIES = {0: "CAP_CHOWN", 1: "CAP_DAC_OVERRIDE", 6: "CAP_SETGID", 7: "CAP_SETUID", 21: "CAP_SYS_ADMIN"}
"""bit -> name of some: messages show others by their numbers, as in linux/capability.h"""
BECOME_ANOTHER_USER = 1 << 6 | 1 << 7
LINKS_MAX = 40
"""symbolic links on the way, as many as the kernel follows"""


class Refused(Exception):
    """The holder refuses a request. The text has the reason and a remedy."""


def get_peer(stream: socket.socket) -> tuple[int, int]:
    """Get (pid, effective uid) of the process that connected, at that time."""
    pid, uid, _ = struct.unpack("iII", stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid


def check_caller(stream: socket.socket) -> None:
    """Refused, unless the peer process has all rights of a program that this process runs."""
    pid, uid = get_peer(stream)
    try:
        lacking = _find_lacking(stream, pid, uid)
    except (OSError, ValueError, KeyError) as error:
        raise Refused(f"it is not known what process {pid} of user {uid} may do ({error}): {_advise()}") from None
    if lacking:
        bits = [bit for bit in range(lacking.bit_length()) if lacking >> bit & 1]
        named = [CAPABILITIES.get(bit, f"capability {bit}") for bit in bits]
        few = ", ".join(named[:3]) + (f" and {len(named) - 3} more" if len(named) > 3 else "")
        raise Refused(f"process {pid} of user {uid} lacks {few}, which the new daemon would have: {_advise()}")


def _advise() -> str:
    who = "root, with the capabilities of the holder" if os.geteuid() == 0 else f"user {os.geteuid()}, who mounted it"
    return f"ask as {who} and in the same user namespace"


def _find_lacking(stream: socket.socket, pid: int, uid: int) -> int:
    """Find capabilities that a program of this process would have, and the peer lacks. OSError: there is no proof."""
    try:
        pidfd = struct.unpack("i", stream.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD, 4))[0]
    except OSError as error:
        raise OSError(f"the kernel does not say which process asks: {error.strerror}; Linux 6.5 does") from None
    try:
        if os.readlink("/proc/self") != str(os.getpid()):
            raise OSError("/proc has the processes of another place, by other numbers")
        needed = _read_granted(uid)
        fields = _read_status(str(pid))
        # Capabilities first, then the namespace: in between a process may enter a child namespace, never a parent.
        has = int(fields["CapEff"], 16)
        if os.readlink(f"/proc/{pid}/ns/user") != os.readlink("/proc/self/ns/user"):
            raise PermissionError("it is in another user namespace")
        if int(fields["Uid"].split()[1]) != uid:
            raise PermissionError("it has become another user's")
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        if poll.poll(0):
            raise ProcessLookupError("it has ended")
        return needed & ~has
    finally:
        os.close(pidfd)


def _read_granted(uid: int) -> int:
    """Read the capabilities of a program that this process runs: a peer of this uid needs them."""
    fields = _read_status("self")
    if os.geteuid() == 0:
        return int(fields["CapInh"], 16) | int(fields["CapBnd"], 16)
    return int(fields["CapAmb"], 16) | (0 if uid == os.geteuid() else BECOME_ANOTHER_USER)


def _read_status(process: str) -> dict[str, str]:
    with open(f"/proc/{process}/status", errors="replace") as file:  # a process name has any bytes
        return dict(line.split(":", 1) for line in file.read().split("\n") if line)


# -- the program ------------------------------------------------------------------------------------


def check_program(path: str) -> None:
    """Refused, unless ``path`` is a program that only root and this user can change. OSError: it is not found."""
    if not path.startswith("/"):
        raise Refused("the program is to be named by its whole path")
    names, place, links = _split_path(path), "", 0
    found = os.stat("/")
    with ExitStack() as opened:
        folder: int | None = None
        while names:
            name = names.pop()
            here = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            opened.callback(os.close, here)
            found = os.fstat(here)
            _check_place(os.path.join(place, name), found)
            if not stat.S_ISLNK(found.st_mode):
                folder, place = here, os.path.join(place, name)
            elif (links := links + 1) <= LINKS_MAX:
                names += _split_path(os.readlink("", dir_fd=here))
            else:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
    if not stat.S_ISREG(found.st_mode) or not found.st_mode & 0o111:
        raise Refused("it is no program")


def _split_path(path: str) -> list[str]:
    """Split a path into names, the last one first. The root's name is "/"."""
    return [name for name in path.split("/")[::-1] if name] + ["/"] * path.startswith("/")


def _check_place(place: str, found: os.stat_result) -> None:
    """Refused where users other than root and this one can change the file at ``place``, or replace it."""
    if found.st_uid not in (0, os.geteuid()):
        whose = f"root's or user {os.geteuid()}'s" if os.geteuid() else "root's"
        raise Refused(f"{place} belongs to user {found.st_uid}: the program and all folders above it are to be {whose}")
    mode = found.st_mode
    if stat.S_ISLNK(mode) or (stat.S_ISDIR(mode) and mode & stat.S_ISVTX):
        return  # in a sticky folder others may make names, but not replace those of root or this user
    others = mode & stat.S_IWOTH or (mode & stat.S_IWGRP and found.st_gid != 0)
    if others:
        raise Refused(f"other users may write to {place}; type: chmod go-w {shlex.quote(place)}")
