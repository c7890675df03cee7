"""How far a prefix can be restored, where several pools must have it: the hit policies of side pools."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Pages = npt.NDArray[np.bool_]
"""for each page of a prefix, whether it is there"""

ALL_PAGES, TRAILING_PAGES, BLOCK_GROUPS = "all_pages", "trailing_pages", "block_groups"


def leading(pages: Pages) -> int:
    """How many are there from the first on without a gap."""
    return int(pages.argmin()) if not pages.all() else len(pages)


def restorable_lengths(pages: Pages, policy: str, trailing: int) -> Pages:
    """For each length of a prefix, from 1 to that of ``pages``, whether a pool has what it must have for it.

    ``trailing``: pages at the end of the prefix that count, for `TRAILING_PAGES`.
    """
    count = len(pages)
    if policy == ALL_PAGES:
        return np.arange(count) < leading(pages)
    if policy == TRAILING_PAGES:
        there = np.concatenate([[0], np.cumsum(pages)])
        ends = np.arange(1, count + 1)
        starts = np.maximum(ends - max(trailing, 1), 0)
        lengths: Pages = there[ends] - there[starts] == ends - starts
        return lengths
    raise ValueError(f"no such hit policy: {policy}")


def longest(lengths: Pages) -> int:
    """The longest prefix of those that can be restored; 0: none."""
    return int(np.flatnonzero(lengths)[-1]) + 1 if lengths.any() else 0


def group_pages(found: Pages, transfer: Any) -> int:
    """Pages that the leading complete groups of a pool cover (`BLOCK_GROUPS`), where ``found`` are its keys."""
    size, per_block = int(transfer.group_pages), int(transfer.block_pages)
    if size <= 0 or per_block <= 0:
        return 0
    groups: Pages = np.all(found[: len(found) // size * size].reshape(-1, size), axis=1)
    return leading(groups) * per_block
