"""Messages between hosts: sizes, fields, and what is refused. All numbers are little endian.

A connection begins with a greeting (`greeting`), which says of which kind it is. Of kind `GRANULES`, who connected
sends questions, each with rows that want granules of sealed extents, and the other side answers each question, in their
order: one row for each of its rows, after all rows the places of those that have some (`read_plans`), and then the
bytes of the others that are `HERE`, one after the other. It also tells which blocks of the other side it used, in a
message of their rows (`USE`), which is not answered. A message with one row of `traceparent.SIZE` bytes names the span
that the next question belongs to; a host gets it only if its record says that it understands it. Of kind `BLOCKS` the
rows of questions want whole blocks, and one is answered by messages with some of its rows each, and the bytes of those
that are `HERE`. Nothing else is ever sent.

Nothing that comes from the network is believed: `WireError` ends the connection, and whoever gets bytes verifies them.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvfuse.checksum import GRANULE_SIZE
from kvfuse.errors import KvfuseError
from kvfuse.volume.views.neighbours import Answer, Wanted

VERSION = 3
PARENT_MAGIC = int.from_bytes(b"KVPT", "little")
QUESTION_MAGIC = int.from_bytes(b"KVPQ", "little")
ANSWER_MAGIC = int.from_bytes(b"KVPA", "little")
USES_MAGIC = int.from_bytes(b"KVPU", "little")
BLOCK_QUESTION_MAGIC = int.from_bytes(b"KVPB", "little")
BLOCK_ANSWER_MAGIC = int.from_bytes(b"KVPC", "little")
HEAD = struct.Struct("<I I Q Q 8x")
"""magic, rows, number of the question, bytes that the sender has still to send to others"""
HEAD_SIZE = HEAD.size

ROWS_MAX = 256
"""of a question"""
GRANULES_BYTES_MAX = 64 << 20
"""bytes of one row"""
QUESTION_BYTES_MAX = 64 << 20
"""bytes that one question wants"""
NAMED_MAX = 3
"""hosts that one answer names"""

FINAL = 1
"""flag of a row: hosts that were named did not have it"""
PLACES = 2
"""flag of a row: it may be answered by places instead of bytes"""

QUESTION = np.dtype(
    [
        ("ino", "<u8"),
        ("base", "<i8"),
        ("addr", "<u8"),
        ("generation", "<u8"),
        ("low", "<u4"),
        ("high", "<u4"),
        ("flags", "<u4"),
        ("checksum", "<u4"),  # of the first granule
        ("without", "<u8"),  # a client that did not have it, though it was named; 0: none
        ("reserved", "<u8"),
    ]
)
PARENT = np.dtype([("place", "V32")])
"""as `traceparent` packs it"""
ANSWER = np.dtype([("answer", "<u4"), ("places", "<u4"), ("named", "<u8", NAMED_MAX)])
"""``answer``: an `Answer`; ``places``: how many places it has, 0: bytes; ``named``: clients that have it, those first
that have less to do; 0: no further one"""

Rows = npt.NDArray[np.void]

BLOCK_QUESTION = np.dtype(
    [("address", "<u8"), ("generation", "<u8"), ("length", "<u4"), ("flags", "<u4"), ("without", "<u8")]
)
"""``without``: as of a `QUESTION`; flags: `FINAL`"""
BLOCK_ANSWER = np.dtype([("answer", "<i4"), ("row", "<u4"), ("named", "<u8", NAMED_MAX)])
"""``row``: of the question"""

assert HEAD_SIZE == 32
assert QUESTION.itemsize == 64
assert ANSWER.itemsize == PARENT.itemsize == 32
assert BLOCK_QUESTION.itemsize == BLOCK_ANSWER.itemsize == 32


def plain(rows: Rows) -> memoryview:
    """Their bytes."""
    return rows.view(np.uint8).data


class WireError(KvfuseError):
    """The other side sent what it may not send."""


class MessageHead(NamedTuple):
    """Of a question or an answer."""

    row_count: int
    number: int
    load: int

    def pack(self, magic: int) -> bytes:
        return HEAD.pack(magic, *self)


def magic_of(data: memoryview) -> int:
    """With which the head of a message begins."""
    return int.from_bytes(data[:4], "little")


def parse_head(data: memoryview, magic: int) -> MessageHead:
    """WireError."""
    found, *fields = HEAD.unpack(data)
    head = MessageHead(*fields)
    if found != magic:
        raise WireError(f"a message begins with {found:#010x} instead of {magic:#010x}")
    if not 0 < head.row_count <= ROWS_MAX:
        raise WireError(f"a message has {head.row_count} rows")
    return head


def pack_question(wanted: Sequence[tuple[Wanted, int, int]]) -> Rows:
    """Rows of (what is wanted, flags, client that did not have it)."""
    rows = np.zeros(len(wanted), QUESTION)
    for place, (one, flags, without) in enumerate(wanted):
        checksum = int.from_bytes(one.checksums[:4], "little")
        rows[place] = (one.ino, one.base, one.addr, one.generation, one.low, one.high, flags, checksum, without, 0)
    return rows


def check_question(rows: Rows) -> None:
    """WireError for rows that nobody may want."""
    low, high = rows["low"].astype(np.int64), rows["high"].astype(np.int64)
    if (high <= low).any() or (high - low > GRANULES_BYTES_MAX).any() or (rows["base"] < -1).any():
        raise WireError("a question wants a range that no extent has")
    if (low % GRANULE_SIZE).any():
        raise WireError("a question wants a part of a granule")
    if (rows["base"] > 1 << 62).any() or int((high - low).sum()) > QUESTION_BYTES_MAX:
        raise WireError("a question wants more than one may")


def check_parent(rows: Rows) -> None:
    """WireError where several spans are named."""
    if len(rows) != 1:
        raise WireError(f"a question belongs to {len(rows)} spans")


def check_answer(rows: Rows) -> list[Answer]:
    """The answer of each row. WireError."""
    try:
        return [Answer(number) for number in rows["answer"].tolist()]
    except ValueError as error:
        raise WireError(f"an answer says something unknown: {error}") from error
