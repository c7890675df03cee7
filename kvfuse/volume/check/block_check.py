"""Blocks of lent slabs, checked: their heads against each other and the records, and their bytes and names.

What is merely old is no fault: heads of another epoch of their namespace, of folders that are gone, of earlier loans,
and of a block that another one of its name replaced. What is damaged is a problem, and mended by removing it: a missing
block is a miss. With a block all older ones of its name go, or one of these would come back in its place.
"""

from __future__ import annotations

import mmap
import stat
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvfuse.checksum import Buffer, crc32c
from kvfuse.errors import EngineError
from kvfuse.native import blockforms as forms
from kvfuse.native._blocks import begin_table, name_keys
from kvfuse.remote.segments.api import Transfer
from kvfuse.volume.blocks.head_tables import HeadTables, name_offset, plan_slab
from kvfuse.volume.check.block_heads import HEAD_SIZE, SlabHeads, batches, is_possible, parse_heads, stored_sizes
from kvfuse.volume.check.evidence import Evidence
from kvfuse.volume.store.codec import unpack_one

SLABS_AT_ONCE = 32
BYTES_AT_ONCE = 8 << 20
_FROM_HEAD = (
    *("low", "high", "sequence", "directory", "length", "checksum", "slot_size", "name_length", "expires"),
    *("version", "token"),
)
BLOCK = np.dtype([*[(name, forms.HEAD[name]) for name in _FROM_HEAD], ("slab", np.uint32), ("slot", np.uint32)])
_IDENTITY = ["sequence", "low", "high"]
Blocks = npt.NDArray[np.void]


class BlockCheck:
    """Of one pass; the check owns it."""

    def __init__(self, check: Evidence) -> None:
        self.check = check
        self.tables = HeadTables(check.geometry, check.segments)
        self._torn = self._homeless = 0
        self._name_keys = NameKeys(check.superblock.volume_id)
        self._now = time.time()

    async def run(self) -> None:
        """Count blocks and their bytes, and report what is wrong; directories and namespaces were read before."""
        check, lent = self.check, sorted(self.check.slabs.lent)
        parts = [np.zeros(0, BLOCK)]
        for start in range(0, len(lent), SLABS_AT_ONCE):
            some = lent[start : start + SLABS_AT_ONCE]
            parts += [self._judge(found) for found in await self._read_slabs(some)]
            check.progress("heads of blocks", start + len(some), len(lent))
        every = await self._without_twins(np.concatenate(parts))
        every = every[np.lexsort((every["sequence"], every["high"], every["low"]))]
        is_newest = np.ones(len(every), np.bool_)
        is_newest[:-1] = (every["low"][1:] != every["low"][:-1]) | (every["high"][1:] != every["high"][:-1])
        live = every[is_newest & ((every["expires"] == 0) | (every["expires"] > self._now))]
        check.report.blocks = len(live)
        check.report.block_bytes = int(live["length"].sum(dtype=np.int64))
        if check.wants_verify:
            await self._verify(live, every)
        if self._torn:
            check.report.notes.append(f"{self._torn} heads of blocks are torn, as after a loss of power: no blocks")
        if self._homeless:
            check.report.notes.append(
                f"{self._homeless} heads are of blocks in folders that are gone: nobody finds them"
            )

    # -- heads -----------------------------------------------------------------------------------------

    async def _read_slabs(self, slabs: Sequence[int]) -> list[SlabHeads]:
        """Those whose heads the medium gives."""
        found = []
        for slab in slabs:
            token = int.from_bytes(self.check.slabs.lent[slab], "little")
            try:
                (table,) = await self.tables.read_heads([slab])
            except (EngineError, ValueError) as error:
                self.check.problem(f"the heads of lent slab {slab} cannot be read: {error}")
            else:
                found.append(parse_heads(self.check.geometry, slab, table, token))
        return found

    def _judge(self, found: SlabHeads) -> Blocks:
        """The blocks of a slab that a mount would show, unless there are newer ones."""
        check, slab, heads = self.check, found.slab, found.heads
        if found.is_damaged:
            text = f"the head of lent slab {slab} is damaged: its blocks are lost"
            check.problem(text, writes=self._zeros(slab, 0))
        for slot in found.damaged:
            check.problem(f"slab {slab}, slot {slot}: the head of a block is damaged", writes=self._free(slab, slot))
        self._torn += len(found.torn)
        is_possible_here = is_possible(heads, found.slot_size, check.geometry.slab_size)
        for at in np.flatnonzero(~is_possible_here).tolist():
            head, slot = heads[at], int(found.slots[at])
            text = f"slab {slab}, slot {slot}: the head says {head['length']} bytes in slots of {head['slot_size']}"
            check.problem(f"{text}, in one of {found.slot_size}", writes=self._free(slab, slot))
        counts = is_possible_here & self._is_current(heads)
        counts[counts] = self._are_at_home(slab, found.slots[counts], heads[counts])
        blocks = np.zeros(int(np.count_nonzero(counts)), BLOCK)
        for name in _FROM_HEAD:
            blocks[name] = heads[name][counts]
        blocks["slab"], blocks["slot"] = slab, found.slots[counts]
        return blocks

    def _is_current(self, heads: Blocks) -> npt.NDArray[np.bool_]:
        """Of the present epoch of a namespace of blocks."""
        current = np.zeros(len(heads), np.bool_)
        for number, epoch in self.check.namespaces.epochs.items():
            current |= (heads["name_space"] == number) & (heads["epoch"] == epoch)
        return current

    def _are_at_home(self, slab: int, slots: npt.NDArray[np.int64], heads: Blocks) -> npt.NDArray[np.bool_]:
        """Whose folders are there, and in their namespaces."""
        folders, which = np.unique(heads["directory"], return_inverse=True)
        homes = np.array([self._home(folder) for folder in folders.tolist()], np.int64)[which]
        at_home: npt.NDArray[np.bool_] = homes == heads["name_space"].astype(np.int64)
        self._homeless += int(np.count_nonzero(homes < 0))
        for at in np.flatnonzero(~at_home & (homes >= 0)).tolist():
            slot, head = int(slots[at]), heads[at]
            text = f"a block of folder {head['directory']} is of namespace {head['name_space']} instead of {homes[at]}"
            self.check.problem(f"slab {slab}, slot {slot}: {text}", writes=self._free(slab, slot))
        return at_home

    def _home(self, folder: int) -> int:
        """The namespace of a folder; -1: it is gone."""
        found = self.check.inodes.get(folder)
        is_there = found is not None and stat.S_ISDIR(found.record.mode)
        return self.check.namespace_of(folder) if is_there else -1

    async def _without_twins(self, blocks: Blocks) -> Blocks:
        """Of two heads of a name with one sequence one is in the wrong slot, as its bytes tell."""
        blocks = blocks[np.lexsort((blocks["high"], blocks["low"], blocks["sequence"]))]
        is_twin = np.zeros(len(blocks), np.bool_)
        is_twin[1:] = blocks[1:][_IDENTITY] == blocks[:-1][_IDENTITY]
        is_wrong = np.zeros(len(blocks), np.bool_)
        for first in np.flatnonzero(is_twin & ~np.roll(is_twin, 1)).tolist():
            last = first
            while last < len(blocks) and is_twin[last]:
                last += 1
            twins = list(range(first - 1, last))
            sound = [at for at in twins if not await self._wrong_bytes(blocks[at : at + 1])]
            for at in twins:
                if at != (sound or twins)[0]:
                    is_wrong[at] = True
                    slab, slot = int(blocks["slab"][at]), int(blocks["slot"][at])
                    text = f"slab {slab}, slot {slot}: the head is that of a block which is elsewhere"
                    self.check.problem(text, writes=self._free(slab, slot))
        return blocks[~is_wrong]

    # -- bytes and names -------------------------------------------------------------------------------

    async def _verify(self, live: Blocks, every: Blocks) -> None:
        """``every``: with the older ones of each name, sorted by it."""
        report, total = self.check.report, report_size(live)
        live = live[np.lexsort((live["slot"], live["slab"]))]
        for start, end in batches(live["length"], BYTES_AT_ONCE):
            some = live[start:end]
            wrong = dict.fromkeys(await self._wrong_names(some), "its name is damaged")
            wrong |= dict.fromkeys(await self._wrong_bytes(some), "its bytes are damaged")
            for at, text in sorted(wrong.items()):
                block = some[at]
                first = np.searchsorted(every["low"], block["low"], "left")
                last = np.searchsorted(every["low"], block["low"], "right")
                same = every[first:last][every["high"][first:last] == block["high"]]
                writes = [one for row in same for one in self._free(int(row["slab"]), int(row["slot"]))]
                place = f"slab {block['slab']}, slot {block['slot']}"
                self.check.problem(f"{place}: a block of folder {block['directory']}: {text}", writes=writes)
            report.verified_bytes += report_size(some)
            self.check.progress("bytes of blocks", report.verified_bytes, total)

    async def _wrong_bytes(self, blocks: Blocks) -> list[int]:
        """Which do not have the bytes that their heads promise."""
        geometry, batch = self.check.geometry, list[Transfer]()
        for block, size in zip(blocks, stored_sizes(blocks).tolist(), strict=True):
            _, lead = plan_slab(geometry.slab_size, int(block["slot_size"]))
            addr = int(block["slab"]) * geometry.slab_size + (lead + int(block["slot"])) * int(block["slot_size"])
            batch.append(Transfer(*geometry.locate(addr), bytearray(size)))
        came = await self._read(batch)
        sums = [
            crc32c(_unpacked(one.buffer, block)) if is_there else -1
            for one, is_there, block in zip(batch, came, blocks, strict=True)
        ]
        return [at for at, found in enumerate(sums) if found != int(blocks["checksum"][at])]

    async def _wrong_names(self, blocks: Blocks) -> list[int]:
        """Which do not have the names of which their fingerprints are made."""
        names = list[bytes]()
        for block in blocks:
            count, _ = plan_slab(self.check.geometry.slab_size, int(block["slot_size"]))
            part = int(block["slab"]), name_offset(count, int(block["slot"])), int(block["name_length"])
            try:
                names += await self.tables.read([part])
            except (EngineError, ValueError):
                names.append(b"")
        keys = np.zeros(len(blocks), np.uint64)
        for directory in np.unique(blocks["directory"]).tolist():
            mine = np.flatnonzero(blocks["directory"] == directory)
            keys[mine] = self._name_keys.of(directory, [names[at] for at in mine.tolist()])
        return np.flatnonzero(keys != blocks["low"]).tolist()

    async def _read(self, batch: Sequence[Transfer]) -> list[bool]:
        """Which of these the medium gives."""
        try:
            await self.check.segments.read(batch)
        except (EngineError, ValueError):
            return [len(batch) > 1 and all(await self._read([one])) for one in batch]
        return [True] * len(batch)

    # -- mending ---------------------------------------------------------------------------------------

    def _free(self, slab: int, slot: int) -> list[Transfer]:
        return self._zeros(slab, slot + 1)

    def _zeros(self, slab: int, index: int) -> list[Transfer]:
        """What makes a head none. ``index``: 0 for the slab's own."""
        pieces = self.tables.pieces(slab, HEAD_SIZE * index, HEAD_SIZE)
        return [Transfer(segment, offset, bytes(length)) for segment, offset, length in pieces]


class NameKeys:
    """Fingerprints of names, as the core makes them."""

    def __init__(self, volume_id: bytes) -> None:
        self._table = mmap.mmap(-1, forms.table_size(forms.BUCKETS_MIN, forms.BUCKETS_MIN))
        begin_table(
            self._table, forms.multipliers_of(volume_id), forms.BUCKETS_MIN, forms.BUCKETS_MIN, 0, 0, 0, 0, 0, 1
        )  # fmt: skip

    def of(self, directory: int, names: Sequence[bytes]) -> npt.NDArray[np.uint64]:
        """The first half of each; 0: it can be no name."""
        keys = np.zeros(len(names), np.uint64)
        name_keys(self._table, directory, *forms.name_columns(names), keys)
        return keys


def _unpacked(data: Buffer, block: np.void) -> Buffer:
    """The bytes of a block whose slot has ``data``."""
    is_packed = block["version"] == forms.PACKED_VERSION
    return unpack_one(memoryview(data), int(block["length"])) if is_packed else data


def report_size(blocks: Blocks) -> int:
    return int(blocks["length"].sum(dtype=np.int64))
