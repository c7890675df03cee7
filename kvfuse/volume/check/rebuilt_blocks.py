"""The blocks that a rebuild finds in slabs, and records of the namespaces and folders that these need.

Heads tell the number of a folder and of its namespace, and that one's epoch, but no names. So folders come back in
``lost+found``, with their numbers, as blocks are found by these; they are root's alone, as nobody knows any more who
might use them. Blocks of an epoch before the newest that is found of a namespace were cleared.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from kvfuse.native import blockforms as forms
from kvfuse.slab.image import LENT, TOKEN_SIZE
from kvfuse.volume.api import ROOT_INODE
from kvfuse.volume.check.block_heads import SlabHeads, is_possible
from kvfuse.volume.check.evidence import directory_record
from kvfuse.volume.namespaces.settings import ROOT, Settings, encode_settings
from kvfuse.volume.store import schema

_FIELDS = "low", "high", "sequence", "directory", "name_space", "epoch", "length", "expires"
_BLOCK = np.dtype([(name, forms.HEAD[name]) for name in _FIELDS])
INODES_MAX = 1 << 62


@dataclass
class RebuiltBlocks:
    """``slab_size``: of the volume. ``lent``: slab -> token of its loan."""

    slab_size: int
    lent: dict[int, int] = field(default_factory=dict)
    count: int = 0
    """of blocks that a mount will show"""
    size: int = 0
    """of these, in bytes"""
    epochs: dict[int, int] = field(default_factory=dict)
    """namespace -> epoch"""
    homes: dict[int, int] = field(default_factory=dict)
    """folder -> namespace, with the namespaces' own"""
    _parts: list[npt.NDArray[np.void]] = field(default_factory=list)

    def add(self, found: SlabHeads) -> None:
        """A slab that is lent."""
        self.lent[found.slab] = found.token
        heads = found.heads[is_possible(found.heads, found.slot_size, self.slab_size)]
        numbers = heads["directory"], heads["name_space"]
        heads = heads[(numbers[0] > 0) & (numbers[0] < INODES_MAX) & (numbers[1] < INODES_MAX)]
        blocks = np.zeros(len(heads), _BLOCK)
        for name in _FIELDS:
            blocks[name] = heads[name]
        self._parts.append(blocks)

    def choose(self) -> None:
        """Find namespaces, folders, and the newest block of each name: all slabs were added."""
        blocks = np.concatenate([np.zeros(0, _BLOCK), *self._parts])
        self._parts.clear()
        blocks = blocks[np.argsort(blocks["sequence"], kind="stable")]
        for number in np.unique(blocks["name_space"]).tolist():
            self.epochs[number] = int(blocks["epoch"][blocks["name_space"] == number][-1])
        is_current = np.zeros(len(blocks), np.bool_)
        for number, epoch in self.epochs.items():
            is_current |= (blocks["name_space"] == number) & (blocks["epoch"] == epoch)
        blocks = blocks[is_current]
        folders, last = np.unique(blocks["directory"][::-1], return_index=True)
        self.homes = dict(zip(folders.tolist(), blocks["name_space"][::-1][last].tolist(), strict=True))
        self.homes.update({number: number for number in self.epochs if number != ROOT})
        homes = np.array([self.homes[folder] for folder in blocks["directory"].tolist()], np.uint64)
        blocks = blocks[homes == blocks["name_space"]]
        _, first = np.unique(blocks[["low", "high"]][::-1], return_index=True)
        newest = blocks[::-1][first]
        newest = newest[(newest["expires"] == 0) | (newest["expires"] > time.time())]
        self.count, self.size = len(newest), int(newest["length"].sum(dtype=np.int64))

    def paths(self, lost_found: bytes) -> dict[bytes, int]:
        """Path -> folder, of all but the root."""
        found = {}
        for folder, namespace in self.homes.items():
            above = lost_found + b"/namespace-%d" % namespace if namespace != ROOT else lost_found
            if folder not in (namespace, ROOT_INODE):
                found[above + b"/folder-%d" % folder] = folder
        found.update({lost_found + b"/namespace-%d" % number: number for number in self.epochs if number != ROOT})
        return found

    def mark(self, ino: int, record: schema.InodeRecord) -> schema.InodeRecord:
        """The record of a folder, as one of these if it is."""
        if ino == ROOT_INODE or ino not in self.homes:
            return record
        private = directory_record(ino, 0o700, record.nlink, record.parent)
        return replace(private, namespace=self.homes[ino])

    def slab_records(self) -> Iterator[tuple[bytes, bytes]]:
        for slab, token in self.lent.items():
            yield schema.slab_key(slab), schema.encode_slab(LENT, token.to_bytes(TOKEN_SIZE, "little"))

    def namespace_records(self, root: Settings) -> Mapping[bytes, bytes]:
        """``root``: settings of the root's namespace, as a new volume has them."""
        return {
            schema.namespace_key(number): encode_settings(
                replace((root if number == ROOT else Settings()).changed({"kind": "blocks"}), epoch=epoch)
            )
            for number, epoch in self.epochs.items()
        }
