"""Bytes of a connection in many pieces of memory: the compiled way and its twin do the same, whatever is there when."""

from __future__ import annotations

import random
import socket
from array import array
from collections.abc import Callable, Iterator
from contextlib import suppress
from errno import EAGAIN, EBADF

import numpy as np
import pytest

from kvfuse.checksum import crc32c
from kvfuse.native import rowreceiver
from kvfuse.native.rowreceiver import ENDED, ROW, python_receive_rows, receive_rows

Receive = Callable[[int, "array[int]", int, int], tuple[int, int, int]]
Pair = tuple[socket.socket, socket.socket]

WAYS: list[Receive] = [python_receive_rows] + [receive_rows] * rowreceiver.IS_NATIVE
SIZES = [1, 2, 7, 255, 256, 4096, 24577, 65536, 262143, 262144]


@pytest.fixture
def pair() -> Iterator[Pair]:
    here, there = socket.socketpair()
    with here, there:
        here.setblocking(False)
        there.setblocking(False)
        yield here, there


def rows_of(memory: np.ndarray, sizes: list[int], gap: int = 3) -> array[int]:
    """Pieces of memory with gaps between them."""
    rows, offset = array("q"), gap
    for size in sizes:
        rows.extend((memory.ctypes.data + offset, size, 0, 0))
        offset += size + gap
    return rows


@pytest.mark.parametrize("receive", WAYS)
def test_any_pieces_are_filled_and_summed(receive: Receive, pair: Pair, rng: random.Random) -> None:
    here, there = pair
    for _ in range(15):
        sizes = rng.choices(SIZES, k=rng.randint(1, 150))
        while sum(sizes) > 4 << 20:
            sizes.pop()
        sizes = sizes or [7]
        data = rng.randbytes(sum(sizes))
        memory = np.zeros(sum(sizes) + 3 * len(sizes) + 3, np.uint8)
        rows = rows_of(memory, sizes)
        first = sent = came = 0
        while first < len(sizes):
            part = data[sent : sent + rng.choice([1, 100, 4096, 100_000, 150_000])]
            with suppress(BlockingIOError):
                sent += there.send(part) if part else 0
            budget = rng.choice([1, 5000, 1 << 20])
            first, count, error = receive(here.fileno(), rows, first, budget)
            assert count <= budget
            assert error in (0, EAGAIN)
            came += count
            assert came == sum(rows[2::ROW]) <= sent
            assert rows[2 : ROW * first : ROW] == rows[1 : ROW * first : ROW]
            assert first == len(sizes) or rows[ROW * first + 2] < rows[ROW * first + 1]
        assert came == len(data)
        offset, place = 3, 0
        for checksum, size in zip(rows[3::ROW], sizes, strict=True):
            assert memory[offset : offset + size].tobytes() == data[place : place + size]
            assert checksum == crc32c(data[place : place + size])
            assert not memory[offset - 3 : offset].any()
            offset, place = offset + size + 3, place + size
        assert not memory[offset - 3 :].any()


@pytest.mark.parametrize("receive", WAYS)
def test_a_connection_that_ends_is_told_after_its_bytes(receive: Receive, pair: Pair) -> None:
    here, there = pair
    memory = np.zeros(100, np.uint8)
    rows = rows_of(memory, [10, 20])
    assert receive(here.fileno(), rows, 0, 1 << 20) == (0, 0, EAGAIN)
    there.sendall(b"x" * 15)
    assert receive(here.fileno(), rows, 0, 1 << 20) == (1, 15, EAGAIN)
    there.close()
    assert receive(here.fileno(), rows, 1, 1 << 20) == (1, 0, ENDED)
    assert rows[2::ROW].tolist() == [10, 5]
    assert receive(-1, rows, 1, 1 << 20) == (1, 0, EBADF)
