"""What threads note of blocks is told to policies in few steps, and in the order in which it happened."""

from __future__ import annotations

import random
from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvfuse.volume.blocks.block_eviction import BlockEviction


def test_puts_that_follow_each_other_are_one(rng: random.Random) -> None:
    tables = [SimpleNamespace(place=place) for place in range(2)]
    for _ in range(200):
        notes: list[tuple[Any, list[int], bool]] = []
        for _ in range(rng.randrange(12)):
            rows = rng.sample(range(-1, 9), rng.randint(1, 4))
            notes.append((rng.choice([*tables, tables[0], tables[0]]), rows, rng.random() < 0.8))
        eviction = object.__new__(BlockEviction)
        eviction._noted = deque(
            (table, np.array(rows), 100 * np.array(rows) + number if is_put else None)
            for number, (table, rows, is_put) in enumerate(notes)
        )
        expected: list[tuple[Any, list[tuple[int, int]] | list[int], bool]] = []
        for number, (table, rows, is_put) in enumerate(notes):
            if not is_put:
                expected.append((table, rows, False))
                continue
            puts: list[Any] = [(row, 100 * row + number) for row in rows]
            if expected and expected[-1][0] is table and expected[-1][2]:
                puts += [put for put in expected.pop()[1] if put[0] not in rows]  # type: ignore[index]
            expected.append((table, puts, True))
        found = []
        for table, rows_of, sizes in eviction._take_notes():
            columns = (
                list(zip(rows_of.tolist(), sizes.tolist(), strict=True)) if sizes is not None else rows_of.tolist()
            )
            found.append((table, columns, sizes is not None))
        assert found == expected
        assert not eviction._noted
