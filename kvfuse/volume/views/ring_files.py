"""Files that clients of rings have registered, as the daemon before this one left them: they count as open.

The door of rings keeps a `KeptFile` for each, under ``ring/CLIENT/file/HANDLE``. The volume finds them before its
inodes are read (`find_ring_files`), and the door takes them over, one by one (`LeftOpenApi.ring_files`).
"""

from __future__ import annotations

import msgspec

from kvfuse.kept.keeper import Keeper
from kvfuse.volume.views.handover import Handover

PREFIX = "ring/"


class KeptFile(msgspec.Struct):
    """A registered file. ``places``: (directory, name) where it may be, the newest first."""

    ino: int
    readable: bool
    writable: bool
    places: list[tuple[int, bytes]]
    is_cut: bool = False
    """a daemon was killed before it had stored what the file has, and the client was not told"""


def find_ring_files(keeper: Keeper, handover: Handover) -> None:
    """Have the handover know them. Before the volume is opened."""
    for name in keeper.list_names(PREFIX):
        parts = name.split("/")
        if len(parts) != 4 or parts[2] != "file" or (kept := keeper.take(name)) is None:
            continue
        try:
            file = msgspec.json.decode(kept.content, type=KeptFile)
        except msgspec.MsgspecError:  # of another version: its entries are answered with EBADF
            continue
        handover.ring_files[name] = file
        handover.was_open(file.ino, file.places, writable=file.writable)
    cut_ring_files(keeper, handover)


def cut_ring_files(keeper: Keeper, handover: Handover) -> None:
    """Have the clients of files that are in ``handover.lost`` hear it."""
    for name, file in handover.ring_files.items():
        if file.writable and file.ino in handover.lost and not file.is_cut:
            file.is_cut = True
            keeper.keep(name, msgspec.json.encode(file))
