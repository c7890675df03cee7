"""Which slabs are emptied for an extent that needs a whole one."""

from __future__ import annotations

from kvfuse.slab.emptying import choose_slabs, needs_slabs


def test_small_and_old_slabs_go_first_and_only_whole_ones() -> None:
    blocks = {1: (4000, 100.0), 2: (1000, 100.0), 3: (4000, 10.0), 4: (3000, 5.0), 5: (1000, 0.0)}
    used = {1: 4000, 2: 1000, 3: 4000, 4: 4000, 5: 0}  # another file is in 4, nothing is in 5 any more
    assert choose_slabs(blocks, used, 9) == [3, 2, 1]
    assert choose_slabs(blocks, used, 1) == [3]
    assert choose_slabs({}, {}, 1) == []


def test_single_blocks_help_as_long_as_few_of_them_hold_the_extent() -> None:
    assert not needs_slabs(16 * 4096, 0, 1 << 20, 4096)
    assert needs_slabs(17 * 4096, 0, 1 << 20, 4096)
    assert needs_slabs(8192, 1 << 20, 1 << 20, 4096)  # there is much free, which does not fit
    assert not needs_slabs(0, 1 << 20, 1 << 20, 4096)
