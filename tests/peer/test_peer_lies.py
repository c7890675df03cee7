"""Mounts that read from a host which sends wrong, too many, or any bytes: 64 readers, and no wrong byte."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from mounting import wait_until
from peer_lab import Lie, as_answer, states, stats
from peer_load import BLOCK_SIZE, Pair, load

from kvfuse.peer.peer_wire import MessageHead, Rows
from kvfuse.volume.views.neighbours import Answer


def another_life(rng: random.Random) -> Lie:
    """Bytes of another block: as a slot has that was written again."""
    former = bytearray(rng.randbytes(BLOCK_SIZE))

    def lie(head: MessageHead, rows: Rows, data: bytearray) -> bytes:
        other = bytes(former[:BLOCK_SIZE])
        former[:] = data or former
        return as_answer(head, rows, (other * (len(data) // BLOCK_SIZE + 1))[: len(data)])

    return lie


def oversized(rng: random.Random) -> Lie:
    return lambda head, rows, data: as_answer(head, rows, data) + rng.randbytes(1 << 20)


def all_here(rng: random.Random) -> Lie:
    """What it did not have, too."""

    def lie(head: MessageHead, rows: Rows, data: bytearray) -> bytes:
        rows["answer"] = Answer.HERE
        return as_answer(head, rows, data + rng.randbytes(BLOCK_SIZE))

    return lie


def shuffled(rng: random.Random) -> Lie:
    """Bytes of one row as those of another."""

    def lie(head: MessageHead, rows: Rows, data: bytearray) -> bytes:
        blocks = [data[start : start + BLOCK_SIZE] for start in range(0, len(data), BLOCK_SIZE)]
        blocks.reverse()
        return as_answer(head, rows, b"".join(blocks) if len(blocks) > 1 else bytes(len(data)))

    return lie


def fuzzed(rng: random.Random) -> Lie:
    def lie(head: MessageHead, rows: Rows, data: bytearray) -> bytes:
        message = bytearray(as_answer(head, rows, data))
        for _ in range(rng.randint(1, 4)):
            message[rng.randrange(min(len(message), rng.choice((32, 300, 1 << 30))))] = rng.randrange(256)
        if rng.randrange(4) == 0:
            del message[rng.randrange(len(message)) :]
        return bytes(message)

    return lie


def failures(pair: Pair) -> int:
    asked = stats(pair.reader)["peers"]["asked"]
    return int(asked["wrong"] + asked["lost"] + asked["late"])


@pytest.mark.parametrize("made", [another_life, oversized, all_here, shuffled, fuzzed])
def test_a_lie_costs_no_byte(made: Callable[[random.Random], Lie], pair: Pair, rng: random.Random) -> None:
    with load(pair) as readers:
        before = failures(pair)
        pair.proxy.lie = made(rng)
        wait_until(lambda: failures(pair) >= before + 10, "reads that failed")
        readers.wait_for_reads()


def test_noise_in_both_directions_costs_no_byte(pair: Pair, rng: random.Random) -> None:
    """Greetings, questions and answers: neither side believes them, and both go on."""

    def noise(data: bytearray) -> None:
        if rng.randrange(2):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)

    def ended(mount_stats: dict[str, int]) -> int:
        return mount_stats["refused"] + mount_stats["malformed"] + mount_stats["given_up"]

    with load(pair) as readers:
        before = failures(pair), ended(stats(pair.writer)["peers"]["served"])
        pair.proxy.noise = noise

        def both_noticed() -> bool:
            pair.proxy.cut()
            wait_until(lambda: states(pair.reader) != ["connected"], "the end of the connections")
            now = failures(pair), ended(stats(pair.writer)["peers"]["served"])
            return now[0] > before[0] and now[1] > before[1]

        wait_until(both_noticed, "messages that were wrong on both sides")
        readers.wait_for_reads()
