"""Checks before a mount changes anything: the mount point, /dev/fuse, the right to use them."""

from __future__ import annotations

import errno
import os
import re
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from kvfuse.cli.console import note
from kvfuse.cli.mounts import is_dead
from kvfuse.errors import MountError
from kvfuse.holder.daemon_side import KERNEL_RESENDS, NOT_SENT_AGAIN
from kvfuse.machine_memory import free_memory_size, memory_size
from kvfuse.mounttable import FILE_SYSTEM, top_mount
from kvfuse.options.options import MountOptions
from kvfuse.sizes import MIB

FUSE_DEVICE = Path("/dev/fuse")
FUSE_CONF = Path("/etc/fuse.conf")
STANDBY_MEMORY_SIZE, STANDBY_FREE_SIZE = 512 * MIB, 256 * MIB
"""bytes, see `stands_by`"""


def check_mountpoint(point: Path) -> Path:
    """The absolute mount point: a directory, empty, with no living kvfuse mount on it. MountError otherwise.

    A mount whose daemon died stays, with a notice, until the new one takes its place.
    """
    mounted = top_mount(point)
    if mounted and mounted.file_system == FILE_SYSTEM:
        if not is_dead(mounted.point):
            raise MountError(f"{point} is mounted already, from {mounted.source}")
        note(f"kvfuse: the daemon that had mounted {point} has died; the new mount takes its place")
        return mounted.point
    if not point.exists():
        raise MountError(f"the mount point {point} does not exist; type: mkdir -p {point}")
    if not point.is_dir():
        raise MountError(f"the mount point {point} is not a directory")
    # Opening an automount point would wait for the very mount that is being made.
    if not (mounted and mounted.file_system == "autofs") and any(os.scandir(point)):
        raise MountError(
            f"the mount point {point} is not empty: its files would be hidden. Programs may have written them while "
            "nothing was mounted: move them away, or name an empty folder"
        )
    return point.resolve()


def fuse_device_problem(device: Path = FUSE_DEVICE) -> tuple[str, str] | None:
    """(what is wrong with /dev/fuse, what mends it), or None."""
    try:
        os.close(os.open(device, os.O_RDWR | os.O_CLOEXEC))
    except FileNotFoundError:
        remedy = "modprobe fuse; in a container: --device /dev/fuse --cap-add SYS_ADMIN"
        return f"{device} is missing", remedy
    except OSError as error:
        if error.errno in (errno.ENODEV, errno.ENXIO):
            return f"{device} has no driver", "modprobe fuse"
        remedy = "chmod 666 /dev/fuse; in a container: --device /dev/fuse --cap-add SYS_ADMIN"
        return f"{device} cannot be opened: {error.strerror}", remedy
    return None


class Shortcoming(NamedTuple):
    """Why a mount does not outlive its daemon by default, and what mends that."""

    detail: str
    remedy: str
    is_final: bool
    """nor where somebody asks for it"""


def outliving_problem() -> Shortcoming | None:
    """None: mounts outlive their daemons here."""
    if find_spec("kvfuse.native._fusewire") is None:
        return Shortcoming("parts in C were not built", "see native parts", is_final=True)
    if tuple(map(int, re.findall(r"\d+", os.uname().release)[:2])) < KERNEL_RESENDS:
        detail = f"the kernel does not send calls again that a killed daemon had taken: {NOT_SENT_AGAIN}"
        return Shortcoming(detail, "Linux 6.9 or later; or outlive=true", is_final=False)
    return None


def outlives(options: MountOptions) -> bool:
    """A mount with these options is to outlive its daemon."""
    problem = outliving_problem()
    if options.outlive is None:
        return problem is None
    return options.outlive and not (problem is not None and problem.is_final)


def stands_by(options: MountOptions, root: Path = Path("/")) -> bool:
    """A process is to stand by that forks the daemons of a mount with these options.

    By default where this process may have `STANDBY_MEMORY_SIZE` and the machine has `STANDBY_FREE_SIZE` to spare: the
    16 MB for it are then of no account. ``root``: where /proc and what it names are found.
    """
    if options.standby is None:
        return memory_size(root) >= STANDBY_MEMORY_SIZE and free_memory_size(root) >= STANDBY_FREE_SIZE
    return options.standby


def users_may_allow_other(conf: Path = FUSE_CONF) -> bool:
    """/etc/fuse.conf lets users other than root mount with allow_other."""
    try:
        return "user_allow_other" in (line.strip() for line in conf.read_text().splitlines())
    except OSError:
        return False


def check_machine(options: MountOptions) -> None:
    """MountError where this machine, or this user, cannot mount with these options; it names the remedy."""
    if problem := fuse_device_problem():
        raise MountError(f"{problem[0]}; as root: {problem[1]}")
    if os.geteuid() == 0:
        return
    if shutil.which("fusermount3") is None:
        raise MountError("a mount without being root needs fusermount3; as root: apt-get install fuse3")
    if options.allow_other and not users_may_allow_other():
        raise MountError(f"allow_other is for root only; as root: echo user_allow_other >> {FUSE_CONF}")
