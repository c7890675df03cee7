"""Mounts without a daemon: the kernel's connection of a mount that a process in another container will serve."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from kvfuse.errors import ConfigError, MountError
from kvfuse.holder.takeover import check, libc
from kvfuse.mounttable import FILE_SYSTEM, top_mount

DEVICE = "/dev/fuse"
FLAGS = {
    "rw": 0, "suid": 0, "dev": 0, "exec": 0, "async": 0, "atime": 0, "diratime": 0, "auto": 0, "defaults": 0,
    "nosuid": 2, "nodev": 4, "noexec": 8, "sync": 16, "dirsync": 128, "noatime": 1024, "nodiratime": 2048,
    "relatime": 1 << 21, "strictatime": 1 << 24, "lazytime": 1 << 25,
}  # fmt: skip
"""word of mount(8) -> flag of mount(2)"""
WORDS_OF_FUSE = ("allow_other", "default_permissions")
LATE = "ro"
"""the daemon makes a name in the mount first; the volume refuses changes anyhow"""


class KernelMount(NamedTuple):
    """A mount that no daemon serves yet: calls wait."""

    connection: int
    """descriptor of /dev/fuse, the caller's"""
    st_dev: int


def split_words(words: Iterable[str]) -> tuple[str, int, list[str]]:
    """Split words of `mount_session.build_kernel_options` into (source, flags, words for FUSE). ConfigError."""
    source, flags, of_fuse = "kvfuse", 0, []
    for word in sorted(words):
        name, _, value = word.partition("=")
        if name == "fsname":
            source = value.replace("\\,", ",").replace("\\\\", "\\")
        elif word in FLAGS:
            flags |= FLAGS[word]
        elif word in WORDS_OF_FUSE:
            of_fuse.append(word)
        elif name not in ("subtype", LATE):
            raise ConfigError(f"'kvfuse hold' does not know the mount option {word}; leave it out")
    return source, flags, of_fuse


def mount_kernel(place: Path, words: Iterable[str]) -> KernelMount:
    """Mount at ``place``, a folder, without links in its path. MountError; ConfigError for a word it does not know."""
    source, flags, of_fuse = split_words(words)
    connection = -1
    try:
        connection = os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        said = [f"fd={connection},rootmode=40000,user_id={os.geteuid()},group_id={os.getegid()}", *of_fuse]
        target, data = os.fsencode(place), ",".join(said).encode()
        check(libc.mount(os.fsencode(source), target, FILE_SYSTEM.encode(), flags, data))
    except OSError as error:
        if connection >= 0:
            os.close(connection)
        remedy = ""
        if error.errno in (errno.EPERM, errno.EACCES):
            remedy = "; it takes root with CAP_SYS_ADMIN, and no seccomp or AppArmor profile that forbids mount(2)"
        elif error.filename == DEVICE:
            remedy = "; modprobe fuse; in a container: --device /dev/fuse"
        raise MountError(f"{place} cannot be mounted: {error.strerror}{remedy}") from error
    return KernelMount(connection, _find_device(place))


def _find_device(place: Path) -> int:
    """Find st_dev of the mount at ``place`` by the mount table: a stat would wait for a daemon."""
    row = top_mount(place)
    if row is None:
        raise MountError(f"{place} is not in the mount table: is it below a link?")
    return row.st_dev
