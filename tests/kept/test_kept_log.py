"""A log in shared memory, as a process leaves it that is killed at any moment, and the room for bytes."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
from kept_memory import after_kill, let_go

from kvfuse.kept import log as kept_log
from kvfuse.kept.keeper import MemoryKeeper
from kvfuse.kept.log import CLASSES, KeptLog, KeptLogReader

KIB, MIB = 1 << 10, 1 << 20


def left_of(keeper: MemoryKeeper) -> KeptLogReader:
    kept = keeper.take("log")
    assert kept is not None
    return KeptLogReader(kept)


def frames_of(keeper: MemoryKeeper) -> list[bytes]:
    left = left_of(keeper)
    frames = list(left.read_frames())
    left.close()
    return frames


def test_a_kill_leaves_each_frame_wholly_or_not_at_all(rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_log, "SHORT", 500)
    keeper, seen = MemoryKeeper(), []
    log = KeptLog(MIB, 4096)
    log.keep_with(keeper, "log", b"")

    def store(name: str) -> Any:
        real = getattr(KeptLog, name)

        def looked_at(self: KeptLog, place: int, value: Any) -> None:
            seen.append(frames_of(keeper))
            real(self, place, value)
            seen.append(frames_of(keeper))

        return looked_at

    for name in ("_store_word", "_store_bytes"):
        monkeypatch.setattr(KeptLog, name, store(name))
    wanted: list[bytes] = []
    changes = 0
    for _ in range(300):
        before = list(wanted)
        frame = rng.randbytes(rng.randrange(100))
        if rng.random() < 0.02:
            log.clear_frames()
            wanted = []
        elif log.append_frame(frame):
            wanted.append(frame)
        else:
            assert log.replace_frames(frame)
            wanted = [frame]
            changes += 1
        assert frames_of(keeper) == wanted
        assert all(one in (before, wanted) for one in seen)
        seen.clear()
    assert changes > 10
    assert not log.append_frame(bytes(5000))
    assert not log.replace_frames(bytes(5000))
    assert frames_of(keeper) == wanted
    log.invalidate_log()
    assert frames_of(keeper) == []
    log.close(is_stored=False)
    assert not left_of(keeper).is_stored
    let_go(keeper)


def test_pieces_of_the_room_never_overlap(rng: random.Random) -> None:
    keeper = MemoryKeeper()
    log = KeptLog(8 * MIB)
    log.keep_with(keeper, "log", b"")
    taken: list[tuple[list[tuple[int, int]], bytes]] = []
    refused = 0
    for _ in range(2000):
        if taken and rng.random() < 0.45:
            pieces, data = taken.pop(rng.randrange(len(taken)))
            left = left_of(keeper)
            assert left.read_pieces(pieces, len(data)) == data
            left.close()
            log.free_pieces(pieces)
            continue
        size = int((3 * MIB) ** rng.random())
        found = log.take_pieces(size)
        if found is None:
            refused += 1
            continue
        assert sum(size for _, size in found) >= size
        data, position = rng.randbytes(size), 0
        for offset, length in found:
            log.write_bytes(offset, data[position : position + length])
            position += length
        taken.append((found, data))
    assert refused > 10
    for pieces, _ in taken:
        log.free_pieces(pieces)
    whole = [log.take_pieces(CLASSES[-1]) for _ in range(8)]
    assert None not in whole
    assert log.take_pieces(1) is None
    log.close(is_stored=True)
    assert left_of(keeper).is_stored
    let_go(keeper)


@pytest.mark.parametrize("descriptors", [0, 1, 3])
def test_what_is_no_log_is_refused(descriptors: int) -> None:
    keeper = MemoryKeeper()
    made = [os.memfd_create("log") for _ in range(descriptors)]
    keeper.keep("log", b"", made)
    with pytest.raises(ValueError, match="log"):
        left_of(keeper)
    let_go(keeper)
    for descriptor in made:
        os.close(descriptor)


def test_a_log_outlives_its_process(rng: random.Random) -> None:
    keeper = MemoryKeeper()
    log = KeptLog(MIB)
    log.keep_with(keeper, "log", b"")
    assert log.append_frame(b"frame")
    pieces = log.take_pieces(10 * KIB)
    assert pieces is not None
    data = rng.randbytes(10 * KIB)
    log.write_bytes(pieces[0][0], data)
    copy = after_kill(keeper)
    assert log.append_frame(b"another")
    log.write_bytes(pieces[0][0], bytes(10 * KIB))
    left = left_of(copy)
    assert list(left.read_frames()) == [b"frame"]
    assert left.read_pieces(pieces, 10 * KIB) == data
    with pytest.raises(ValueError, match="lacks bytes"):
        left.read_pieces([(10 * MIB, 10 * KIB)], 10 * KIB)
    left.close()
    log.close(is_stored=False)
    let_go(keeper, copy)
