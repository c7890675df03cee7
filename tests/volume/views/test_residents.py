"""Indexes of blocks in the shared-memory tier: what one shows that is made for blocks that are there."""

from __future__ import annotations

import pytest

from kvfuse.blockindex import BUCKET
from kvfuse.volume.views import resident
from kvfuse.volume.views.resident import BUCKETS_MIN, Residents
from kvfuse.volume.views.tier import ReadClass, SharedTier

HERE = ReadClass(1, 0, 0, 0o444)


def test_a_new_index_shows_all_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where most likely some bucket has no room for all of its blocks."""
    monkeypatch.setattr(resident, "FULL", 2.0)
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
