"""Numbers by which the file door knows blocks, which have no inodes: of files, and of places in a listing.

A block's inode number names the place of its table, its row, and a part of its sequence: the block that replaces it has
another one, so what a kernel cached by a number never becomes untrue. Nothing is kept for a number that was given
(`WrittenNumbers` has a bounded number of others).
"""

from __future__ import annotations

MARK = 1 << 62
"""of numbers of blocks: those of inodes are smaller"""
_TABLE_BITS, ROW_BITS, _TAG_BITS = 10, 26, 26
_ROW_MASK, _TAG_MASK = (1 << ROW_BITS) - 1, (1 << _TAG_BITS) - 1
_FACTOR, _WORD = 0x9E3779B97F4A7C15, (1 << 64) - 1

FIRST_ROW_COOKIE = 1 << ROW_BITS
"""cookies of rows are larger"""
FILE_COOKIE = 1 << 61
"""mark of cookies of files and sketches, which are listed behind rows"""
_LATE_COOKIE = 1 << 62
"""mark of cookies of rows that were stored while a directory was listed: they come last"""


def is_block(ino: int) -> bool:
    return ino >= MARK


def inode_of(table: int, row: int, sequence: int) -> int:
    return MARK | table << ROW_BITS + _TAG_BITS | row << _TAG_BITS | tag_of(sequence)


def tag_of(sequence: int) -> int:
    """Sequences are about microseconds: their low bits alone would repeat each minute."""
    return (sequence * _FACTOR & _WORD) >> 64 - _TAG_BITS


def split_inode(ino: int) -> tuple[int, int, int]:
    """(place of the table, row, tag of the sequence)"""
    return ino >> ROW_BITS + _TAG_BITS & (1 << _TABLE_BITS) - 1, ino >> _TAG_BITS & _ROW_MASK, ino & _TAG_MASK


# -- cookies: rows of one table after the other, then files and sketches, then rows that came meanwhile ----------


def row_cookie(table: int, row: int) -> int:
    """Of row -1: in front of all rows of a table, behind those of the one before."""
    return (table + 1 << ROW_BITS) + row + 1


def split_row_cookie(cookie: int) -> tuple[int, int]:
    """(place of the table, row)"""
    return (cookie >> ROW_BITS) - 1, (cookie & _ROW_MASK) - 1


def file_cookie(cookie: int) -> int:
    """The cookie of a file or sketch. ``cookie``: the one that it has in a directory without blocks."""
    return FILE_COOKIE | cookie >> 2


def after_file(cookie: int) -> int:
    """Where a listing of files goes on behind `file_cookie`."""
    return (cookie & FILE_COOKIE - 1) << 2 | 3


def late_cookie(cookie: int) -> int:
    """The cookie of a row that was stored while its directory was listed. ``cookie``: as `row_cookie` has it."""
    return _LATE_COOKIE | cookie
