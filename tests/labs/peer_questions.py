"""Questions to hosts that read from each other: good ones, and any bytes."""

from __future__ import annotations

import random
import struct

import numpy as np

from kvfuse.peer.peer_wire import QUESTION, QUESTION_MAGIC, ROWS_MAX, MessageHead, Rows, pack_question
from kvfuse.volume.views.neighbours import BLOCK, Wanted


def good_question(rng: random.Random, size: int) -> tuple[MessageHead, Rows]:
    count = rng.randint(1, 6)
    wanted = [
        Wanted(
            rng.choice((rng.randrange(10), BLOCK)),
            0,
            rng.randrange(10),
            1,
            0,
            rng.choice((1, 4096, size)),
            bytes(4),
        )
        for _ in range(count)
    ]
    return MessageHead(count, rng.getrandbits(64), rng.getrandbits(64)), pack_question([(one, 1, 0) for one in wanted])


def fuzzed_question(rng: random.Random, size: int) -> bytes:
    """A good one, or one with fields of any value, cut off, or of any bytes."""
    head, rows = good_question(rng, size)
    for _ in range(rng.randrange(4)):
        name = rng.choice(list(QUESTION.names or ()))
        value = rng.choice((bytes(8), b"\xff" * 8, rng.randbytes(8), struct.pack("<Q", 1 << 31)))
        rows[name][rng.randrange(len(rows))] = np.frombuffer(value, QUESTION[name], 1)[0]
    data = head.pack(QUESTION_MAGIC) + rows.tobytes()
    match rng.randrange(8):
        case 0:
            return data[: rng.randrange(len(data))]
        case 1:
            return rng.randbytes(rng.randint(1, 400))
        case 2:
            count = rng.choice((0, ROWS_MAX + 1, 1 << 31))
            return struct.pack("<IIQQ8x", QUESTION_MAGIC, count, 1, 1) + data
    return data
