"""A round of one of S3-FIFO's queues, for all its blocks at once.

Candidates are looked at one after the other, and each that is spared gets another place: where all blocks of a large
cache were used, one choice would look at all of them several times. Here columns are compared instead. What goes and
what stays is the same as for candidates, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvfuse.policy.blockrows import Numbers, Places, PolicyRows
from kvfuse.policy.blockset import BlockSet
from kvfuse.policy.candidates import DUE, EVERYTHING, make_candidates, no_candidates
from kvfuse.policy.taking import Taking


class Spared(NamedTuple):
    """What becomes of the blocks that a round spares."""

    list_: int
    """where they are from then on"""
    uses: Callable[[NDArray[np.uint8]], NDArray[np.uint8]]
    """what they have left of their uses"""


def lose_uses(blocks: BlockSet, taking: Taking, list_: int, size_max: int) -> None:
    """Rounds of a list in which all blocks without uses go: as many as make up no more than ``size_max`` bytes."""
    sizes = np.zeros(256)
    for _, table, rows in _rows_of(blocks, taking, list_):
        sizes += np.bincount(table.uses[rows], blocks.sizes(table, rows), 256)
    sums = np.cumsum(sizes)
    rounds = int(np.searchsorted(sums, size_max, side="right"))
    if not rounds or not sums[-1]:
        return
    for number, table, rows in _rows_of(blocks, taking, list_):
        goes = table.uses[rows] < rounds
        _go(blocks, taking, number, rows[goes])
        stays = rows[~goes]
        table.uses[stays] -= np.uint8(min(rounds, 255))


def go_round(blocks: BlockSet, taking: Taking, list_: int, level: int, count: int, size: int, spared: Spared) -> int:
    """Look at the first ``count`` blocks of a list: those with up to ``level`` uses go, until that are ``size`` bytes.

    How many were looked at.
    """
    last = _last_due(blocks, taking, list_, level, count, size)
    going, seen, moved = [no_candidates()], 0, list[tuple[int, Places]]()
    for number, table, rows in _rows_of(blocks, taking, list_):
        rows = rows[table.due[rows] <= last]
        seen += len(rows)
        goes = table.uses[rows] <= level
        going.append(make_candidates(number, table.due[rows[goes]], rows[goes], table.sequences[rows[goes]]))
        moved.append((number, rows[~goes]))
    candidates = np.concatenate(going, axis=1)
    candidates = candidates[:, np.argsort(candidates[DUE], kind="stable")]
    taking.leave_until(candidates, size)
    _move(blocks, taking, moved, spared)
    return seen


def _rows_of(blocks: BlockSet, taking: Taking, list_: int) -> Iterator[tuple[int, PolicyRows, Places]]:
    """(number, table, rows of the list), some at a time."""
    for number, table, start, which in blocks.chunks():
        fits = (table.list[which] == list_) & table.is_live(which)
        if taking.skip:
            fits &= (table.flags[which] & np.uint32(taking.skip)) == 0
        if fits.any():
            yield number, table, start + np.flatnonzero(fits)


def _last_due(blocks: BlockSet, taking: Taking, list_: int, level: int, count: int, size: int) -> int:
    """When the last block is due that is looked at."""
    dues, found, sizes = [[np.zeros(0, np.int64)] for _ in range(3)]
    is_whole = count >= blocks.counts[list_]
    for _, table, rows in _rows_of(blocks, taking, list_):
        if not is_whole:
            dues.append(table.due[rows])
        going = rows[table.uses[rows] <= level]
        found.append(table.due[going])
        sizes.append(blocks.sizes(table, going))
    last = EVERYTHING if is_whole else _smallest(np.concatenate(dues), count)
    all_found, all_sizes = np.concatenate(found), np.concatenate(sizes)
    total = int(all_sizes.sum())
    if total > size:
        guess = _smallest(all_found, int(len(all_found) * size / total * 1.1) + 64)
        near = np.flatnonzero(all_found <= guess)
        if int(all_sizes[near].sum()) < size:
            near = np.arange(len(all_found))
        order = near[np.argsort(all_found[near], kind="stable")]
        last = min(last, int(all_found[order[int(np.searchsorted(np.cumsum(all_sizes[order]), size))]]))
    return last


def _smallest(dues: Numbers, count: int) -> int:
    """The largest of the ``count`` smallest."""
    return int(np.partition(dues, count - 1)[count - 1]) if count < len(dues) else EVERYTHING


def _go(blocks: BlockSet, taking: Taking, number: int, rows: Places) -> None:
    table = blocks.tables[number]
    taking.leave_until(make_candidates(number, table.due[rows], rows, table.sequences[rows]), EVERYTHING)


def _move(blocks: BlockSet, taking: Taking, moved: list[tuple[int, Places]], spared: Spared) -> None:
    """Give blocks places behind all others, in the order that they have."""
    count = sum([len(rows) for _, rows in moved])
    if not count:
        return
    bounds = [(int(dues.min()), int(dues.max())) for dues in _dues_of(blocks, moved)]
    low, high = min([one for one, _ in bounds]), max([one for _, one in bounds])
    first, scale = blocks.moments(taking.now, count) - count + 1, (count - 1) / max(high - low, 1)
    for number, rows in moved:
        table = blocks.tables[number]
        table.uses[rows] = spared.uses(table.uses[rows])
        blocks.place(number, rows, spared.list_, first + ((table.due[rows] - low) * scale).astype(np.int64))


def _dues_of(blocks: BlockSet, moved: list[tuple[int, Places]]) -> Iterator[Numbers]:
    for number, rows in moved:
        if len(rows):
            yield blocks.tables[number].due[rows]
