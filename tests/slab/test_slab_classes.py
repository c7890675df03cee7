"""Which slot sizes there are, how an extent is cut into them, and which sizes are learned."""

import itertools

import pytest

from kvfuse.slab import classes
from kvfuse.slab.classes import SizeClasses

KIB, MIB = 1 << 10, 1 << 20


def waste(sizes: SizeClasses, length: int, plan: tuple[int, ...]) -> float:
    """Part of the length (rounded up to 4 KiB) that a plan loses to slack and to slabs' ends."""
    rounded = -(-length // 4096) * 4096
    return sum(sizes.slab_size / (sizes.slab_size // size) for size in plan) / rounded - 1


def test_four_geometric_sizes_per_doubling() -> None:
    pages = [size // 4096 for size in SizeClasses(MIB).sizes]
    assert pages == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112,
                     128, 160, 192, 224, 256]  # fmt: skip
    assert SizeClasses(64 * MIB).sizes[-1] == 64 * MIB


def test_class_for_is_the_smallest_that_holds() -> None:
    sizes = SizeClasses(MIB, exact=[300 * KIB])
    assert 300 * KIB in sizes.sizes
    for length in (1, 4096, 4097, 33 * KIB, 299 * KIB, 300 * KIB, 300 * KIB + 1, MIB):
        assert sizes.class_for(length) == min(size for size in sizes.sizes if size >= length)


@pytest.mark.parametrize("slot_size", [0, -4096, 5000, 2 * MIB])
def test_illegal_exact_sizes_are_refused(slot_size: int) -> None:
    with pytest.raises(ValueError, match=f"slot size {slot_size}"):
        SizeClasses(MIB, exact=[slot_size])


@pytest.mark.parametrize("length", [0, -1, -5000, MIB + 1])
def test_lengths_that_no_extent_has_are_refused(length: int) -> None:
    sizes = SizeClasses(MIB)
    for call in (sizes.class_for, sizes.plan, sizes.request):
        with pytest.raises(ValueError, match=f"no slots for {length} bytes"):
            call(length)


def test_a_plan_is_one_piece_where_that_wastes_little() -> None:
    sizes = SizeClasses(MIB)
    assert sizes.plan(1) == (4096,)
    assert sizes.plan(64 * KIB) == (64 * KIB,)
    assert sizes.plan(MIB) == (MIB,)
    assert sizes.plan(250 * KIB) == (256 * KIB,)


def test_a_plan_is_cut_where_one_piece_does_not_tile_the_slab() -> None:
    """Three slots of 320 KiB fit in 1 MiB: 300 KiB would cost 341."""
    assert SizeClasses(MIB).plan(300 * KIB) == (256 * KIB, 48 * KIB)


def test_every_plan_holds_its_length_with_little_waste() -> None:
    for slab_size, step in ((MIB, 4096), (64 * MIB, 251 * 4096)):
        sizes = SizeClasses(slab_size)
        for length in range(4096, slab_size + 1, step):
            plan = sizes.plan(length)
            assert sum(plan[:-1]) < length <= sum(plan)
            assert len(plan) <= classes.PLAN_PIECES_MAX
            assert waste(sizes, length, plan) <= 0.05
            assert plan == sizes.plan(length - 1)


def test_no_plan_of_two_pieces_is_cheaper() -> None:
    sizes = SizeClasses(MIB)
    for length in range(4096, MIB + 1, 7 * 4096):
        best = min(
            waste(sizes, length, (first, sizes.class_for(length - first)))
            for first in sizes.sizes
            if first < length or (first, length) == (4096, 4096)
            if length > first
        ) if length > 4096 else 0.0  # fmt: skip
        assert waste(sizes, length, sizes.plan(length)) <= max(best, classes.WASTE_ACCEPTED) + 1e-9


def learn(sizes: SizeClasses, length: int) -> None:
    for _ in range(classes.LEARN_AFTER):
        sizes.request(length)


def test_a_size_asked_often_is_learned() -> None:
    sizes = SizeClasses(64 * MIB)
    odd = MIB + 28
    assert sizes.plan(odd) == (MIB, 4096)
    for _ in range(classes.LEARN_AFTER - 1):
        sizes.request(odd)
    assert sizes.class_for(odd) > MIB + 4096
    sizes.request(odd)
    assert sizes.class_for(odd) == MIB + 4096
    assert sizes.plan(odd) == (MIB + 4096,)
    learn(sizes, 300 * KIB)
    assert sizes.plan(300 * KIB) == (300 * KIB,)


def test_where_the_whole_does_not_tile_the_last_piece_is_learned() -> None:
    sizes = SizeClasses(MIB)
    learn(sizes, 300 * KIB)
    assert sizes.plan(300 * KIB) == (256 * KIB, 44 * KIB)


def test_learning_is_bounded_and_deterministic() -> None:
    def learned() -> list[int]:
        sizes = SizeClasses(64 * MIB, learned_max=5)
        for pages in range(1, 400):
            learn(sizes, pages * 4096)
        return sorted(set(sizes.sizes) - set(SizeClasses(64 * MIB).sizes))

    assert len(learned()) == 5
    assert learned() == learned()


def test_adopted_sizes_count_as_learned() -> None:
    sizes = SizeClasses(MIB, learned_max=1)
    sizes.adopt(44 * KIB)
    sizes.adopt(44 * KIB)
    sizes.adopt(52 * KIB)
    assert 44 * KIB in sizes.sizes
    assert 52 * KIB not in sizes.sizes
    with pytest.raises(ValueError, match="slot size 100"):
        sizes.adopt(100)


def test_exact_sizes_are_used_by_plans() -> None:
    sizes = SizeClasses(64 * MIB, exact=[1310720 + 4096])
    assert sizes.plan(1310720 + 28) == (1310720 + 4096,)
    assert all(a < b for a, b in itertools.pairwise(sizes.sizes))
