"""Which free slab is next: the lowest, or by turns of devices; compared with a plain set."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfuse.slab.allocator import Allocator
from kvfuse.slab.free_slabs import FreeSlabs, Spread, Stripe, Turns
from kvfuse.slab.layout import Geometry

MIB = 1 << 20


class OnDevices(Spread):
    """Each ten slabs are on the next device."""

    def __init__(self, *stripes: Stripe, window: int = 0) -> None:
        self.stripes = stripes
        self._window = window or 20 * len(stripes)

    def stripe(self, slab: int) -> Stripe:
        return self.stripes[slab // 10 % len(self.stripes)]

    @property
    def window(self) -> int:
        return self._window


def stripes_of(*weights: int, domains: str = "") -> list[Stripe]:
    names = domains or " " * len(weights)
    return [Stripe(bytes([index]), weight, names[index].strip()) for index, weight in enumerate(weights)]


def test_devices_have_turns_by_weight_and_none_makes_up_for_what_it_missed() -> None:
    turns, stripes = Turns(), stripes_of(1, 2, 1)
    assert Counter(turns.take(stripes) for _ in range(400)) == {stripes[0]: 100, stripes[1]: 200, stripes[2]: 100}
    for _ in range(100):
        turns.take(stripes[:2])
    assert Counter(turns.take(stripes) for _ in range(40))[stripes[2]] <= 11


def test_turns_go_to_another_domain_where_that_can_be() -> None:
    stripes = stripes_of(1, 1, 1, 1, domains="aabb")
    turns = Turns()
    found = [turns.take(stripes) for _ in range(100)]
    assert all(one.domain != other.domain for one, other in pairwise(found))
    assert set(Counter(found).values()) == {25}
    heavy = stripes_of(3, 1, domains="ab")
    assert Counter(turns.take(heavy) for _ in range(400))[heavy[0]] == pytest.approx(300, abs=3)


def test_slabs_in_turn_are_on_several_devices() -> None:
    allocator = Allocator(Geometry(200 * MIB, MIB, 10, 100))
    spread = OnDevices(*stripes_of(1, 1, 2))
    allocator.spread_by(spread)
    said = allocator.next_free(40)
    assert allocator.lend(40, bytes(8)) == said
    assert Counter(spread.stripe(slab).weight for slab in said) == {1: 20, 2: 20}
    assert all(len({spread.stripe(slab) for slab in said[start : start + 4]}) == 3 for start in range(0, 40, 4))
    rest = allocator.lend(100, bytes(8))
    assert sorted([*said, *rest]) == list(range(100))


@given(st.data())
def test_free_slabs_are_those_of_a_plain_set(data: st.DataObject) -> None:
    end, free = 100, set(range(100))
    slabs = FreeSlabs(0)
    if data.draw(st.booleans()):
        slabs.spread = OnDevices(*stripes_of(1, 3, 1, domains="abb"), window=data.draw(st.integers(1, 60)))
    for _ in range(data.draw(st.integers(1, 60))):
        if free and data.draw(st.booleans()):
            said = slabs.next(3, end)
            assert [slabs.take(end) for _ in said] == said
            free.difference_update(said)
            if slabs.spread is None:
                assert all(slab < other for slab in said for other in free)
        elif free and data.draw(st.booleans()):
            slab = data.draw(st.sampled_from(sorted(free)))
            slabs.remove(slab)
            free.remove(slab)
        elif used := sorted(set(range(slabs.unused_start)) - free):
            slab = data.draw(st.sampled_from(used))
            slabs.add(slab)
            free.add(slab)
        assert slabs.count(end) == len(free)
        assert {*slabs, *range(slabs.unused_start, end)} == free
