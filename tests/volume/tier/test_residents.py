"""Indexes of blocks in the shared-memory tier: what one shows that is made for blocks that are there."""

from __future__ import annotations

import mmap

import numpy as np
import pytest

from kvfuse.blockindex import BUCKET, Table
from kvfuse.volume.tier import resident_indexes
from kvfuse.volume.tier.resident_indexes import BUCKETS_MIN, Residents
from kvfuse.volume.tier.shared_tier import ReadClass, SharedTier

HERE = ReadClass(1, 0, 0, 0o444)


def test_a_new_index_shows_all_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where most likely some bucket has no room for all of its blocks."""
    monkeypatch.setattr(resident_indexes, "FULL", 2.0)
    tier, residents = SharedTier(4096), Residents(lambda ino: None)
    block = tier.allocate(4096, HERE)
    assert block is not None
    count = BUCKET * BUCKETS_MIN
    touches = residents.open(HERE, [(b"%d" % number, number, block) for number in range(1, count + 1)])
    assert touches is not None
    assert len(touches.index) == count
    for ino in range(1, count + 1):
        residents.hide(ino)
    assert not len(touches.index)


def test_names_that_come_too_late_for_an_index_leave_the_next_one_alone() -> None:
    residents = Residents(lambda ino: None)
    assert residents.open(HERE, []) is not None
    former = residents.begin_names(HERE, None)
    assert former is not None
    residents.end([HERE.directory])
    touches = residents.open(HERE, [])
    assert touches is not None
    assert not residents.add_names(former, [b"%d" % number for number in range(20_000)])  # more than it has room for
    residents.end_names(former, are_all=True)
    assert residents.begin_names(HERE, None) is touches.index


def test_a_filter_is_bounded_whatever_came_and_went() -> None:
    residents = Residents(lambda ino: None)
    for _ in range(3):
        assert residents.open(HERE, []) is not None
        index = residents.begin_names(HERE, None)
        assert index is not None
        size = index.size
        index.filter.count = 1 << 40
        assert not residents.add_names(index, [b"one more"])
    assert size < 8 << 20


def test_a_filter_that_was_given_up_is_not_complete_any_more() -> None:
    residents = Residents(lambda ino: None)
    touches = residents.open(HERE, [])
    assert touches is not None
    index = residents.begin_names(HERE, None)
    assert index is touches.index
    residents.end_names(index, are_all=True)
    table = Table(np.frombuffer(mmap.mmap(index.descriptor(), index.size, prot=mmap.PROT_READ), np.uint8))
    assert table.lacks([b"name"]).all()
    residents.names_come(HERE.directory, [b"name"])
    assert not table.lacks([b"name"]).any()
    assert table.lacks([b"other"]).all()
    residents.doubt_names()
    assert not table.lacks([b"other"]).any()
    assert table.holds()
    assert residents.begin_names(HERE, None) is None


def test_one_name_and_many_set_the_same_bits() -> None:
    residents = Residents(lambda ino: None)
    touches = residents.open(HERE, [])
    assert touches is not None
    index = residents.begin_names(HERE, None)
    assert index is not None
    names = [b"%d" % number for number in range(500)]
    for name in names:
        residents.name_changes(HERE.directory, name, 1)
    one_by_one = index._memory.table.filter.copy()
    assert index.filter.count <= len(names)
    residents.add_names(index, names)
    assert (index._memory.table.filter == one_by_one).all()
