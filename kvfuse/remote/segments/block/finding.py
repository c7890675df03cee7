"""A device of a set is opened, and found again under another name when it was away. The calls are for threads."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kvfuse.errors import ConfigError, EngineError, VolumeError
from kvfuse.remote.segments.block import label
from kvfuse.remote.segments.block.label import Label
from kvfuse.remote.segments.block.pieces import read_bytes, read_page
from kvfuse.remote.segments.block.segment_map import AREA_SIZE, MapName, SegmentMap, area_of, parse_map

SYSFS = Path("/sys/class/block")
SECTOR_SIZE = 512


class Expected(NamedTuple):
    """A device as the map of its set has it."""

    volume_id: bytes
    device_id: bytes
    size_min: int

    @property
    def title(self) -> str:
        """In messages."""
        return f"device {self.device_id.hex()[:8]} of the volume {self.volume_id.hex()}"


def expected_in(made: SegmentMap, index: int) -> Expected:
    return Expected(made.volume_id, made.rows[index].device_id, made.size_min(index))


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


def label_at(path: Path) -> Label:
    """OSError, ConfigError; VolumeError where the device has none."""
    fd = open_direct(path, read_only=True)
    try:
        return read_label(fd)
    finally:
        os.close(fd)


def read_maps(fd: int, found: Label) -> dict[MapName, SegmentMap]:
    """All intact ones of the device with this label: at most one of them counts. OSError."""
    maps = {} if found.first_map is None else {found.first_map.name: found.first_map}
    for parity in range(2):
        with contextlib.suppress(VolumeError, EOFError):
            made = parse_map(read_bytes(fd, area_of(parity), AREA_SIZE))
            if made.volume_id == found.volume_id and made.number % 2 == parity:
                maps[made.name] = made
    return maps


def open_expected(path: Path, expected: Expected, *, read_only: bool) -> int:
    """Open the device ``expected`` at ``path``. OSError, EngineError: it is not there."""
    fd = open_direct(path, read_only=read_only)
    try:
        try:
            found = read_label(fd)
        except VolumeError as error:
            raise EngineError(f"{path} is not {expected.title}: {error}") from None
        if (found.volume_id, found.device_id) != (expected.volume_id, expected.device_id):
            raise EngineError(f"{path} is {found.title}, and not {expected.title}")
        size = os.lseek(fd, 0, os.SEEK_END)
        if size < expected.size_min:
            raise EngineError(f"{path}, {expected.title}, has {size} bytes instead of {expected.size_min}")
    except BaseException:
        os.close(fd)
        raise
    return fd


def find(path: Path, expected: Expected, *, read_only: bool) -> tuple[int, Path]:
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


def _candidates(expected: Expected) -> Iterator[Path]:
    """Block devices of this machine that are large enough; those in other hands are not asked."""
    for folder in sorted(SYSFS.iterdir()) if SYSFS.is_dir() else []:
        with contextlib.suppress(OSError, ValueError):
            size = int((folder / "size").read_text()) * SECTOR_SIZE
            if size >= expected.size_min and not any((folder / "holders").iterdir()):
                yield Path("/dev", folder.name.replace("!", "/"))
