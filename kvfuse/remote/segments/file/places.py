"""Where the segments of a `FileSegments` lie, and how they come and go there. The calls are for threads.

In a folder segment 26 is the file ``0000001a.seg``, preallocated whole. It is made under a temporary name and renamed,
so that a name means a whole segment.
"""

from __future__ import annotations

import contextlib
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from kvfuse.errors import EngineError
from kvfuse.remote.segments.file import fileio
from kvfuse.remote.segments.file.direct import BLOCK_SIZE
from kvfuse.remote.segments.file.fileio import SegmentFile

FILE_NAME = re.compile(r"([0-9a-f]{8})(?:\.[0-9a-f]+)?\.(seg|new)")
"""A segment, or one whose creation did not end."""
SEGMENT_MAX = 0xFFFFFFFF


class SegmentPlaces(ABC):
    """Places of segments. All methods raise EngineError, EngineFull."""

    path: Path
    """for messages"""
    are_mappable: bool
    """each segment is a whole file"""

    @abstractmethod
    def found(self) -> Sequence[SegmentFile]:
        """All segments that are there, opened."""

    def numbers(self) -> set[int]:
        """Segments that are there now, where other processes may make some."""
        return set()

    @abstractmethod
    def find(self, segment: int) -> SegmentFile | None:
        """One that may have been made meanwhile, opened."""

    def has(self, file: SegmentFile) -> bool:
        """It is still there, and no other in its place. Looks at once; True where nobody can tell."""
        return True

    @abstractmethod
    def make(self, segment: int, size: int) -> SegmentFile:
        """A new one of zeros, reserved whole and durable; or the one that is there, of whatever size."""

    @abstractmethod
    def drop(self, file: SegmentFile) -> None:
        """Remove one that no call uses any more."""


class FolderPlaces(SegmentPlaces):
    """Files of a folder, which is made if absent, unless ``is_read_only``."""

    are_mappable = True

    def __init__(self, path: Path, *, is_direct: bool, is_read_only: bool) -> None:
        self.path = path
        self._is_direct = is_direct
        self._is_read_only = is_read_only

    def found(self) -> Sequence[SegmentFile]:
        files = []
        with contextlib.ExitStack() as on_failure, fileio.translated(self.path):
            if not self._is_read_only:
                self.path.mkdir(parents=True, exist_ok=True)
            for entry in self.path.iterdir():
                match = FILE_NAME.fullmatch(entry.name)
                if match and match[2] == "seg":
                    file = self._open(entry, int(match[1], 16))
                    on_failure.callback(file.retire)
                    files.append(file)
                    if self._is_direct and file.size % BLOCK_SIZE:
                        raise EngineError(
                            f"{entry}: {file.size} bytes are no multiple of {BLOCK_SIZE}: not for O_DIRECT"
                        )
                elif match and not self._is_read_only:
                    fileio.remove_unfinished(entry)
            on_failure.pop_all()
        return files

    def numbers(self) -> set[int]:
        with fileio.translated(self.path):
            matches = [FILE_NAME.fullmatch(name) for name in os.listdir(self.path)]
            return {int(match[1], 16) for match in matches if match and match[2] == "seg"}

    def find(self, segment: int) -> SegmentFile | None:
        path = self._path(segment)
        with fileio.translated(path), contextlib.suppress(FileNotFoundError):
            return self._open(path, segment)
        return None

    def has(self, file: SegmentFile) -> bool:
        try:
            found = os.stat(file.path)
        except FileNotFoundError:
            return False
        except OSError:
            return True
        return os.path.samestat(found, os.fstat(file.fd))

    def make(self, segment: int, size: int) -> SegmentFile:
        return fileio.create(self._path(segment), segment, size, is_direct=self._is_direct)

    def drop(self, file: SegmentFile) -> None:
        fileio.remove(file.path)

    def _path(self, segment: int) -> Path:
        return self.path / f"{segment:08x}.seg"

    def _open(self, path: Path, segment: int) -> SegmentFile:
        return SegmentFile.open(path, segment, is_direct=self._is_direct, read_only=self._is_read_only)
