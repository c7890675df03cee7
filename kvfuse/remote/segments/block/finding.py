"""A device of a set is opened, and found again under another name when it was away. The calls are for threads."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from kvfuse.errors import ConfigError, EngineError, VolumeError
from kvfuse.remote.segments.block import label
from kvfuse.remote.segments.block.label import Label
from kvfuse.remote.segments.block.pieces import read_page

SYSFS = Path("/sys/class/block")
SECTOR_SIZE = 512


def open_direct(path: Path, *, read_only: bool = False) -> int:
    """A descriptor past the page cache; what was written is durable when the call returns. OSError; ConfigError."""
    mode = os.O_RDONLY if read_only else os.O_RDWR | os.O_DSYNC
    try:
        return os.open(path, mode | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.EINVAL:
            raise ConfigError(
                f"segments.devices: {path} cannot be opened with O_DIRECT: hosts would not see each"
                " other's bytes: name a block device, or a file of another file system"
            ) from None
        raise


def read_label(fd: int) -> Label:
    """OSError; VolumeError where the device has none."""
    try:
        return label.parse(read_page(fd, 0))
    except EOFError:
        raise VolumeError("it is empty") from None


def open_expected(path: Path, expected: Label, *, read_only: bool) -> int:
    """Open the device ``expected`` at ``path``. OSError, EngineError: it is not there."""
    fd = open_direct(path, read_only=read_only)
    try:
        try:
            found = read_label(fd)
        except VolumeError as error:
            raise EngineError(f"{path} is not {expected.title}: {error}") from None
        if found != expected:
            raise EngineError(f"{path} is {found.title}, and not {expected.title}")
        size, needed = os.lseek(fd, 0, os.SEEK_END), expected.set.size_min(expected.device)
        if size < needed:
            raise EngineError(f"{path}, {expected.title}, has {size} bytes instead of {needed}")
    except BaseException:
        os.close(fd)
        raise
    return fd


def find(path: Path, expected: Label, *, read_only: bool) -> tuple[int, Path]:
    """The device, opened, and where it was found: at ``path``, or under any name that it has now. EngineError."""
    try:
        return open_expected(path, expected, read_only=read_only), path
    except (OSError, EngineError, ConfigError) as error:
        problem = error
    if _is_device_name(path):
        for other in _candidates(expected):
            with contextlib.suppress(OSError, EngineError, ConfigError):
                return open_expected(other, expected, read_only=read_only), other
    reason = f"{path}: {os.strerror(problem.errno or 0)}" if isinstance(problem, OSError) else str(problem)
    raise EngineError(f"{expected.title} is not there: {reason}")


def _is_device_name(path: Path) -> bool:
    """It is, or was, a block device: only those get other names."""
    with contextlib.suppress(OSError):
        return stat.S_ISBLK(path.stat().st_mode)
    return path.is_relative_to("/dev")


def _candidates(expected: Label) -> Iterator[Path]:
    """Block devices of this machine that are large enough; those in other hands are not asked."""
    needed = expected.set.size_min(expected.device)
    for folder in sorted(SYSFS.iterdir()) if SYSFS.is_dir() else []:
        with contextlib.suppress(OSError, ValueError):
            if int((folder / "size").read_text()) * SECTOR_SIZE >= needed and not any((folder / "holders").iterdir()):
                yield Path("/dev", folder.name.replace("!", "/"))
