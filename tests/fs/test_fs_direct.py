"""O_DIRECT through a mount: what is whole is in the segments when write(2) returns."""

from __future__ import annotations

import json
import mmap
import os
from pathlib import Path

import pytest
from mounting import temporary_mount
from posix_calls import opened

MIB = 1 << 20
GRANULE = 256 << 10
WORDS = ("volume.capacity=64MiB", "volume.segment_size=16MiB", "volume.chunk_size=4MiB")


def staged(point: Path) -> int:
    return int(json.loads((point / ".kvfuse/stats").read_text())["memory"]["staged_bytes"])


def in_segments(volume: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(volume.rglob("*")) if path.is_file())


@pytest.mark.parametrize("size", [MIB, 4 * MIB, 8 * MIB], ids=["1 MiB", "4 MiB", "8 MiB"])
def test_whole_chunks_are_in_the_segments_when_the_write_returns(size: int) -> None:
    content = os.urandom(16 * MIB)
    with temporary_mount(WORDS) as mount, mmap.mmap(-1, size) as buffer:
        with opened(mount.point / "file", os.O_CREAT | os.O_RDWR | os.O_DIRECT) as fd:
            for end in range(size, len(content) + 1, size):
                buffer[:] = content[end - size : end]
                assert os.pwrite(fd, buffer, end - size) == size
                assert end % (4 * MIB) or staged(mount.point) == 0
                written = in_segments(mount.volume)
                whole = range(max(0, end - size), end - end % (4 * MIB), GRANULE)
                assert all(content[start : start + GRANULE] in written for start in whole)
        assert (mount.point / "file").read_bytes() == content
