"""The blocks of the block store, read again by a scrub: rows of tables, in the order in which slabs have them.

Rows say what the medium has: a block that waits for a write is left out. The store goes on meanwhile, so what looks
wrong is read once more, and counts only if its row is the same then. A damaged block is dropped: it is a miss, and its
slot is written again.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import trio

from kvfuse.checksum import crc32c
from kvfuse.errors import EngineError, MediumError
from kvfuse.native import blockforms as forms
from kvfuse.remote.segments.api import SegmentStore, Transfer
from kvfuse.volume.blocks.block_engine import BlockEngine
from kvfuse.volume.blocks.block_tables import BlockTable
from kvfuse.volume.check.block_heads import HEAD_SIZE, batches, is_sound
from kvfuse.volume.store.codec import unpack_one

ROWS_AT_ONCE = 8192
BYTES_AT_ONCE = 1 << 20
"""that are read together; of a larger block such pieces"""
SAME_FIELDS = "low", "high", "sequence", "length", "checksum"
"""in a row, and in the head of its slot"""
Rows = npt.NDArray[np.void]

log = logging.getLogger(__name__)


@dataclass
class BlockScrub:
    """Of one pass. ``pace``: waits for what so many bytes may cost. ``report``: hears of each damaged block."""

    engine: BlockEngine
    segments: SegmentStore
    pace: Callable[[int], Awaitable[None]]
    report: Callable[[tuple[object, ...], str], None]
    blocks: int = 0
    """that were looked at"""

    async def run(self) -> None:
        for place in list(self.engine.tables.all):
            start = 0
            while (table := self.engine.tables.all.get(place)) and not table.has_ended and start < len(table.rows):
                numbers = self._settled(table, start, start + ROWS_AT_ONCE)
                for first, end in batches(table.rows["length"][numbers], BYTES_AT_ONCE):
                    if not table.has_ended:
                        await self._check(table, numbers[first:end])
                start += ROWS_AT_ONCE

    def _settled(self, table: BlockTable, start: int, end: int) -> npt.NDArray[np.int64]:
        """Rows whose blocks the medium has, by their place there."""
        rows = table.rows[start:end].copy()
        numbers = np.flatnonzero(_are_settled(rows))
        return numbers[np.lexsort((rows["slot"][numbers], rows["slab"][numbers]))] + start

    async def _check(self, table: BlockTable, numbers: npt.NDArray[np.int64]) -> None:
        rows = table.rows[numbers].copy()
        keeps = _are_settled(rows)
        numbers, rows = numbers[keeps], rows[keeps]
        for at, wrong in (await self._wrong(rows)).items():
            number, row = int(numbers[at]), rows[at : at + 1]
            if (
                self._is_current(table, number, row)
                and (await self._wrong(row))
                and self._is_current(table, number, row)
            ):
                self._drop(table, number, row[0], wrong)
        self.blocks += len(rows)

    def _is_current(self, table: BlockTable, number: int, row: Rows) -> bool:
        now = table.rows[number : number + 1].copy()
        return not table.has_ended and bool(_are_settled(now)[0]) and bool(now["sequence"][0] == row["sequence"][0])

    def _drop(self, table: BlockTable, number: int, row: np.void, wrong: str) -> None:
        sequence = int(row["sequence"])
        self.engine.core.counters.checksum_failures += 1
        place = f"slab {row['slab']}, slot {row['slot']}"
        self.report(("block", sequence), f"a block of directory {row['directory']} in {place}: {wrong}: it is dropped")
        self.engine.drop_entry(table, number, sequence)

    # -- what the medium has ---------------------------------------------------------------------------

    async def _wrong(self, rows: Rows) -> dict[int, str]:
        """Which are wrong, and how. What the medium does not tell now is left out."""
        try:
            return await self._compare(rows)
        except MediumError as error:
            if len(rows) == 1:
                return {0: f"it cannot be read: {error}"}
        except EngineError as error:
            log.info("scrub leaves out %d blocks: %s", len(rows), error)
            return {}
        except ValueError:  # a slab has just been cut anew, so that of these blocks some are none any more
            if len(rows) == 1:
                return {}
        found = dict[int, str]()
        for at in range(len(rows)):
            if wrong := await self._wrong(rows[at : at + 1]):
                found[at] = wrong[0]
        return found

    async def _compare(self, rows: Rows) -> dict[int, str]:
        batch, heads = list[Transfer](), list[list[Transfer]]()
        geometry, native = self.engine.core.geometry, self.engine.native
        places = []
        for row in rows:
            slab, slot = int(row["slab"]), int(row["slot"])
            _, offset = native.slot_places(slab, slot)
            places.append(geometry.locate(slab * geometry.slab_size + offset))
            pieces = self.engine.slabs.heads.pieces(slab, HEAD_SIZE * (slot + 1), HEAD_SIZE)
            heads.append([Transfer(segment, start, bytearray(length)) for segment, start, length in pieces])
            batch += heads[-1]
        sums = await self._sums(places, rows, batch)
        found = {}
        for at, row in enumerate(rows):
            head = b"".join(bytes(piece.buffer) for piece in heads[at])
            if sums[at] != int(row["checksum"]):
                found[at] = "its bytes do not match their checksum"
            elif not _speaks_for(head, row):
                found[at] = "its head is damaged"
        return found

    async def _sums(self, places: list[tuple[int, int]], rows: Rows, others: list[Transfer]) -> list[int]:
        """Checksums of blocks. ``others``: what is read with them."""
        sums, packed = [0] * len(places), {at: bytearray() for at in np.flatnonzero(rows["packed"]).tolist()}
        lengths = np.where(rows["packed"], rows["packed"].astype(np.int64) * forms.PAGE, rows["length"]).tolist()
        for start in range(0, max(lengths, default=0), BYTES_AT_ONCE):
            batch = [
                Transfer(segment, offset + start, bytearray(max(0, min(BYTES_AT_ONCE, length - start))))
                for (segment, offset), length in zip(places, lengths, strict=True)
            ]
            await self.segments.read([one for one in batch if len(one.buffer)] + (others if not start else []))
            sums = [crc32c(one.buffer, before) for before, one in zip(sums, batch, strict=True)]
            for at, stored in packed.items():
                stored += batch[at].buffer
            await self.pace(sum(len(one.buffer) for one in batch) + (HEAD_SIZE * len(places) if not start else 0))
        for at, stored in packed.items():
            data = await trio.to_thread.run_sync(unpack_one, memoryview(stored), int(rows["length"][at]))
            sums[at] = crc32c(data)
        return sums


def _are_settled(rows: Rows) -> npt.NDArray[np.bool_]:
    """Blocks of this host of which all is written."""
    others = forms.DIRTY | forms.WRITING | forms.FOREIGN
    settled: npt.NDArray[np.bool_] = (rows["version"] & 1 == 1) & (rows["flags"] & others == 0)
    return settled


def _speaks_for(image: bytes, row: np.void) -> bool:
    head = np.frombuffer(image, forms.HEAD, 1)[0]
    is_block = head["magic"] == forms.HEAD_MAGIC and head["state"] == forms.BLOCK_HEAD
    return bool(is_block and is_sound(image) and all(head[name] == row[name] for name in SAME_FIELDS))
