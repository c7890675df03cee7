"""Reads files in a ring's thread: through content maps, without asking the event loop.

`volume/views/content_map.py` says why that is right: look at the map's version, copy, look again. The event loop reads
whatever a map does not show - bytes still staged, a chunk in pieces, a mismatch of a checksum (``ASK``).

For many reads of one file it also keeps the places of verified granules in arrays (`_Table`), so that a batch of small
reads is a few numpy calls: one `take` of rows where the reads are pages that go to neighbouring pages.
"""

from __future__ import annotations

import errno
import os
import weakref

import numpy as np
import numpy.typing as npt

from kvfuse.checksum import GRANULE_SIZE, crc32c
from kvfuse.usrbio.daemon.client_memory import LOOK_BYTES, SMALL, TINY, MappedIov
from kvfuse.volume.views.content_map import ContentMap, MappedSource, MapRow

Numbers = npt.NDArray[np.int64]

ASK = -1 << 31
"""A result: the event loop has to do it."""
PAGE = 4096
TABLE_GRANULES_MAX = 1 << 19
"""Granules that the tables of one ring may have together: 128 GiB of files, 9 MiB of memory."""


def read(content: ContentMap, offset: int, length: int, iov: MappedIov, iov_offset: int) -> int:
    """Copy up to ``length`` bytes at ``offset`` into the iov: how many there were before the end of the file, or ASK.

    OSError, where the client's memory went away.
    """
    version = content.version
    size = content.size
    if size < 0:
        return ASK
    end = min(offset + length, size)
    position = offset
    while position < end:
        index, start = divmod(position, content.chunk_size)
        part = min(end - position, content.chunk_size - start)
        row = content.rows.get(index)
        if row is None:
            return ASK
        if not _read_row(row, start, part, iov, iov_offset + position - offset):
            return ASK
        if row.block is not None and not position:
            row.block.note_use()  # one use of the whole file, however many reads it takes
        position += part
    return max(0, end - offset) if content.version == version else ASK


def _read_row(row: MapRow, start: int, length: int, iov: MappedIov, iov_offset: int) -> bool:
    """Copy bytes of one chunk; False where they are not what the checksums say, or the medium does not give them."""
    stored = min(length, row.length - start) if row.source is not None else 0
    if stored > 0:
        assert row.source is not None
        if row.checksums and not _verify(row, row.source, start, stored):
            return False
        if not copy(row.source, row.start + start, stored, iov, iov_offset):
            return False
    zeros_from = max(0, stored)
    if zeros_from < length:
        iov.clear(iov_offset + zeros_from, length - zeros_from)
    return True


def _verify(row: MapRow, source: MappedSource, start: int, length: int) -> bool:
    """Check the granules of a range that nobody has checked yet."""
    first, last = start // GRANULE_SIZE, (start + length - 1) // GRANULE_SIZE
    if not ((2 << (last - first)) - 1) << first & ~row.verified:
        return True
    for number in range(first, last + 1):
        if not row.verified >> number & 1:
            low = number * GRANULE_SIZE
            part = source.bytes[row.start + low : row.start + min(low + GRANULE_SIZE, row.length)]
            if crc32c(part.data) != int.from_bytes(row.checksums[4 * number : 4 * number + 4], "little"):
                return False
            row.verified |= 1 << number
    return True


def copy(source: MappedSource, start: int, length: int, iov: MappedIov, iov_offset: int) -> bool:
    """Copy bytes of a source into a client's memory; False where the source does not give them.

    OSError EFAULT; see `MappedIov.charging`.
    """
    if iov.is_present(length):
        iov.map_pages(iov_offset, length)
        return _copy(source, start, length, iov, iov_offset)
    is_copied = True
    for done in range(0, length, LOOK_BYTES):
        part = min(LOOK_BYTES, length - done)
        with iov.charging(iov_offset + done, part):
            is_copied &= _copy(source, start + done, part, iov, iov_offset + done)
    return is_copied


def _copy(source: MappedSource, start: int, length: int, iov: MappedIov, iov_offset: int) -> bool:
    """Copy into memory without absent pages, as `copy`."""
    if not iov.is_sealed:
        return _read_file(source, start, iov.view[iov_offset : iov_offset + length])
    if length <= SMALL and iov.holds_lock:
        iov.view[iov_offset : iov_offset + length] = source.bytes.data[start : start + length]
    elif length > TINY:
        np.copyto(iov.bytes[iov_offset : iov_offset + length], source.bytes[start : start + length])
    else:
        iov.put_guarded(iov_offset, source.bytes.data[start : start + length])
    return source.is_intact()


def _read_file(source: MappedSource, start: int, target: memoryview) -> bool:
    """Have the kernel copy into memory that may vanish, as `copy`."""
    done = 0
    while done < len(target):
        try:
            count = os.preadv(source.fd, [target[done:]], start + done)
        except OSError as error:
            if error.errno == errno.EFAULT:
                raise
            return False
        if not count:
            return False
        done += count
    return True


class _Table:
    """Places of a file's verified granules, as arrays by the granule's number. One ring thread's own."""

    def __init__(self, content: ContentMap) -> None:
        self.content = content
        self.version = content.version
        self.unit = min(GRANULE_SIZE, content.chunk_size)
        count = -(-max(content.size, 0) // self.unit)
        self.starts: Numbers = np.full(count, -1, np.int64)
        """place in the source; below 0: not known, or not verified"""
        self.lengths: Numbers = np.zeros(count, np.int64)
        """bytes stored of the granule"""
        self.sources: npt.NDArray[np.int16] = np.zeros(count, np.int16)
        self.source_list: list[MappedSource] = []

    def learn(self, granules: Numbers) -> None:
        """Copy the places of these granules from the map."""
        per_chunk = self.content.chunk_size // self.unit
        for granule in np.unique(granules).tolist():
            index, number = divmod(granule, per_chunk)
            row = self.content.rows.get(index)
            if row is None or row.source is None or (row.checksums and not row.verified >> number & 1):
                continue
            if row.source not in self.source_list:
                self.source_list.append(row.source)
            low = number * self.unit
            self.lengths[granule] = max(0, min(self.unit, row.length - low))
            self.sources[granule] = self.source_list.index(row.source)
            self.starts[granule] = row.start + low


class RingReader:
    """Reads of many entries at once. One for each ring thread."""

    def __init__(self) -> None:
        self._tables: weakref.WeakKeyDictionary[ContentMap, _Table] = weakref.WeakKeyDictionary()

    def read_many(
        self, content: ContentMap, offsets: Numbers, lengths: Numbers, iov: MappedIov, iov_offsets: Numbers
    ) -> Numbers:
        """Results of reads that all lie in ``iov``, as of `read`; ASK also for those that need a closer look."""
        table = self._get_table(content)
        results: Numbers = np.full(len(offsets), ASK, np.int64)
        if table is None or not len(table.starts):
            return results
        granules = np.minimum(offsets // table.unit, len(table.starts) - 1)
        within = offsets - granules * table.unit
        starts = table.starts[granules]
        if np.min(starts) < 0:
            table.learn(granules[starts < 0])
            starts = table.starts[granules]
        row = content.rows.get(int(granules[0]) * table.unit // content.chunk_size)
        if row is None or content.version != table.version:
            return results  # else ``row`` keeps a block of the tier, which is the whole file, in its place
        if row.block is not None:
            row.block.note_use()
        fits = (within + lengths <= table.lengths[granules]) & (starts >= 0)
        starts += within
        sources = table.sources[granules]
        if fits.all():
            copied = self._copy(table, sources, starts, lengths, iov, iov_offsets)
            return lengths if copied and content.version == table.version else results
        chosen = np.flatnonzero(fits)
        if len(chosen):
            copied = self._copy(table, sources[chosen], starts[chosen], lengths[chosen], iov, iov_offsets[chosen])
            if copied and content.version == table.version:
                results[chosen] = lengths[chosen]
        return results

    @staticmethod
    def _copy(
        table: _Table,
        sources: npt.NDArray[np.int16],
        starts: Numbers,
        lengths: Numbers,
        iov: MappedIov,
        iov_offsets: Numbers,
    ) -> bool:
        """Copy ranges, grouped by their source, into ``iov``. False where a source does not give the bytes."""
        if (sources == sources[0]).all():
            return _copy_many(table.source_list[sources[0]], starts, lengths, iov, iov_offsets)
        copied = True
        for number in np.unique(sources).tolist():
            same = sources == number
            source = table.source_list[number]
            copied &= _copy_many(source, starts[same], lengths[same], iov, iov_offsets[same])
        return copied

    def _get_table(self, content: ContentMap) -> _Table | None:
        """The table of a map as it is now. None for a file that is too large, or ended."""
        table = self._tables.get(content)
        if table is None or table.version != content.version:
            unit = min(GRANULE_SIZE, content.chunk_size)
            if content.chunk_size % unit or content.size > TABLE_GRANULES_MAX * unit or content.size < 0:
                return None
            table = _Table(content)
            if sum(len(other.starts) for other in self._tables.values()) + len(table.starts) > TABLE_GRANULES_MAX:
                self._tables.clear()
            self._tables[content] = table
        return table


def _copy_many(source: MappedSource, starts: Numbers, lengths: Numbers, iov: MappedIov, iov_offsets: Numbers) -> bool:
    """Copy ranges of one source: at once where all are whole pages, one by one otherwise. As `copy`."""
    one_by_one = None if iov.is_present(int(lengths.sum())) or iov.charge_many(iov_offsets, lengths) else copy
    pages = (
        one_by_one is None
        and iov.is_sealed
        and bool((lengths == PAGE).all())
        and not bool(((starts | iov_offsets) & (PAGE - 1)).any())
        and len(source.bytes) % PAGE == 0
    )
    if not pages:
        ranges = zip(starts.tolist(), lengths.tolist(), iov_offsets.tolist(), strict=True)
        one_by_one = one_by_one or _copy
        return all(one_by_one(source, start, length, iov, iov_offset) for start, length, iov_offset in ranges)
    rows = source.bytes.reshape(-1, PAGE)
    indices, targets = starts // PAGE, iov_offsets // PAGE
    first = int(targets[0])
    if bool((np.diff(targets) == 1).all()):
        np.take(rows, indices, axis=0, out=iov.rows[first : first + len(targets)], mode="clip")
    else:
        iov.rows[targets] = rows[indices]
    return source.is_intact()
