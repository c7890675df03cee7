"""The kvfuse mounts in the kernel's table, and requests to them that never hang."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from kvfuse.cli import MountBusy
from kvfuse.errors import EngineTimeout, MountError
from kvfuse.mounttable import DEAD, FILE_SYSTEM, Mounted, all_mounts, top_mount

STATUS_HINT = "'kvfuse status' lists the kvfuse mounts"
ANSWER_SECONDS = 5.0
"""after which a daemon that does not answer is said to hang"""

_MNT_DETACH = 2
_UMOUNT_NOFOLLOW = 8

T = TypeVar("T")


def kvfuse_mounts() -> list[Mounted]:
    """The mounts, without binds of their folders: those count only where the whole is not seen, as in a container."""
    rows = _mounts_and_binds()
    whole = {row.device for row in rows if row.root == "/"}
    return [row for row in rows if row.root == "/" or row.device not in whole]


def _mounts_and_binds() -> list[Mounted]:
    return [row for row in all_mounts() if row.file_system == FILE_SYSTEM]


def kvfuse_mount_at(place: Path) -> Mounted:
    """The kvfuse mount at ``place``, a mount point, or of ``place``, a volume's folder or mount.conf.

    MountError where there is none, or where a volume has several.
    """
    row = top_mount(place)
    if row is not None and row.file_system == FILE_SYSTEM:
        return row
    if row is not None:
        raise MountError(f"{place} is a mount of {row.file_system}, not of kvfuse; {STATUS_HINT}")
    path = Path(os.path.abspath(place))
    mounts = kvfuse_mounts()
    if row := next((row for row in mounts if row.point in path.parents), None):
        raise MountError(f"{place} is not a mount point, but lies in the mount {row.point}")
    found = [row for row in mounts if row.source in {str(path), os.path.realpath(path)}]
    if not found:
        raise MountError(f"{place} is not a mount point, nor a volume that is mounted; {STATUS_HINT}")
    if len(found) > 1:
        points = ", ".join(str(row.point) for row in found)
        raise MountError(f"{place} is mounted at {points}: name one of these")
    return found[0]


def mount_of(path: Path) -> Mounted:
    """The kvfuse mount that ``path``, which may be absent, is in. MountError where it is in none."""
    real = Path(os.path.realpath(path))
    found = [row for row in _mounts_and_binds() if row.point == real or row.point in real.parents]
    if not found:
        raise MountError(f"{path} is not in a kvfuse mount; {STATUS_HINT}")
    return max(found, key=lambda row: len(row.point.parts))


def within(seconds: float, function: Callable[..., T], *arguments: Any) -> T:
    """The result of ``function``, or EngineTimeout when it takes longer.

    It runs in a thread that is left behind then: a wait for a FUSE daemon cannot be cancelled, only killed.
    """
    answers: list[T] = []
    errors: list[BaseException] = []

    def answer() -> None:
        try:
            answers.append(function(*arguments))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise EngineTimeout(f"no answer within {seconds:g} s")
    if errors:
        raise errors[0]
    return answers[0]


def ask_health(point: Path, seconds: float = ANSWER_SECONDS) -> float:
    """Seconds that the daemon took to answer a stat of its root. EngineTimeout, or OSError (ENOTCONN: it is gone)."""
    begin = time.monotonic()
    within(seconds, os.statvfs, point)
    return time.monotonic() - begin


def read_virtual(point: Path, name: str, seconds: float = ANSWER_SECONDS) -> dict[str, Any]:
    """The JSON of ``MNT/.kvfuse/NAME``. MountError where the daemon does not answer with that."""
    path = point / ".kvfuse" / name
    try:
        content = json.loads(within(seconds, path.read_bytes))
    except EngineTimeout as error:
        raise MountError(f"the daemon of {point} does not answer: {error}") from error
    except OSError as error:
        raise MountError(f"the daemon of {point} does not answer: {error.strerror}") from error
    except ValueError as error:
        raise MountError(f"{path} holds no JSON") from error
    if not isinstance(content, dict):
        raise MountError(f"{path} holds no JSON object")
    return content


def degraded(row: Mapping[str, Any]) -> str:
    """What does not work, since when, in words: of a row of "degraded" in a mount's stats."""
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["since"]))
    return f"degraded: {row['what']} ({row['why']}), since {since}"


def is_dead(point: Path) -> bool:
    """The daemon of the mount at ``point`` is gone, the mount is not."""
    try:
        ask_health(point)
    except EngineTimeout:
        return False
    except OSError as error:
        return error.errno in DEAD
    return False


def detach(point: Path, *, lazy: bool = False) -> None:
    """Unmount. MountBusy while files below are open (not with ``lazy``), MountError otherwise."""
    if os.geteuid() != 0:
        _fusermount(point, lazy=lazy)
        return
    libc = ctypes.CDLL(None, use_errno=True)
    flags = _UMOUNT_NOFOLLOW | (_MNT_DETACH if lazy else 0)
    if libc.umount2(os.fsencode(point), flags) != 0:
        number = ctypes.get_errno()
        if number == errno.EBUSY:
            raise MountBusy(_busy_message(point))
        raise MountError(f"{point} cannot be unmounted: {os.strerror(number)}")


def _fusermount(point: Path, *, lazy: bool) -> None:
    program = shutil.which("fusermount3")
    if program is None:
        raise MountError(f"unmounting {point} needs fusermount3 (package fuse3), or root")
    command = [program, "-u", *(["-z"] if lazy else []), "--", str(point)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return
    message = done.stderr.strip().removeprefix("fusermount3: ")
    if "busy" in message.lower():
        raise MountBusy(_busy_message(point))
    raise MountError(f"{point} cannot be unmounted: {message}")


def _busy_message(point: Path) -> str:
    users = users_of(point)
    who = f" by {', '.join(users)}" if users else ""
    return f"{point} is busy: files or folders below it are in use{who}; --lazy detaches it all the same"


def users_of(point: Path, count_max: int = 5) -> list[str]:
    """Up to ``count_max`` processes, as "name (pid)", with an open file or working directory below ``point``."""
    users = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and _uses(process, point):
            users.append(f"{_process_name(process)} ({process.name})")
            if len(users) == count_max:
                break
    return users


def _uses(process: Path, point: Path) -> bool:
    """Links in /proc are read, never followed: nothing here asks the daemon."""
    try:
        links = [process / "cwd", process / "root", *(process / "fd").iterdir()]
    except OSError:  # it ended, or is not ours to look at
        return False
    for link in links:
        try:
            if link.readlink().is_relative_to(point):
                return True
        except OSError:
            continue
    return False


def _process_name(process: Path) -> str:
    try:
        return os.fsdecode((process / "comm").read_bytes()).strip()
    except OSError:
        return "?"
