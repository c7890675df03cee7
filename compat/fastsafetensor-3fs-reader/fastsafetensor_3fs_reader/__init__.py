"""The module that fastsafetensors' loader for 3FS imports, served by a kvfuse mount: `ThreeFSFileReader`."""

from __future__ import annotations

from kvfuse.connectors.models.weight_reader import PIECE, PIECES_MAX, WeightReader
from kvfuse.usrbio.client.session import find_mount

__all__ = ["ThreeFSFileReader", "extract_mount_point"]


class ThreeFSFileReader(WeightReader):
    """Has ``read_chunked(path, dev_ptr, file_offset, total_length, chunk_size)``; see `WeightReader`."""

    def __init__(
        self, mount_point: str, entries: int = 64, io_depth: int = 0, buffer_size: int = PIECE * PIECES_MAX
    ) -> None:
        """``entries`` and ``io_depth`` are of 3FS's rings: nothing here depends on them."""
        super().__init__(mount_point, buffer_size=max(buffer_size, PIECE))


def extract_mount_point(path: str) -> str:
    """The root of the mount that ``path`` lies in. FileNotFoundError."""
    return str(find_mount(path))
