from __future__ import annotations

import itertools

from kvfuse.kept.keeper import NO_KEEPER, MemoryKeeper
from kvfuse.volume.tier.arena_numbers import ANNOUNCED_AT_ONCE, NAME, ArenaNumbers, _permuted


def take(numbers: ArenaNumbers, count: int) -> list[int]:
    found = []
    while len(found) < count:
        while numbers.has_more and len(found) < count:
            found.append(numbers.take())
        numbers.announce_more()
    return found


def test_numbers_are_all_over_the_range_and_none_comes_twice() -> None:
    found = take(ArenaNumbers(NO_KEEPER), 20_000)
    assert len(set(found)) == len(found)
    assert min(found) >= 1 << 31
    assert max(found) < 1 << 32
    eighths = [sum(number >> 28 == part for number in found) for part in range(8, 16)]
    assert min(eighths) > 2000, "2,500 are to be expected in each"
    assert sum(later > former for former, later in itertools.pairwise(found)) in range(9_500, 10_500)


def test_two_tiers_have_other_numbers() -> None:
    first, second = (set(take(ArenaNumbers(NO_KEEPER), 1000)) for _ in range(2))
    assert len(first & second) <= 1, "chance: 1 in 2,000"


def test_the_permutation_is_one() -> None:
    """Of the first and the last numbers; no two images are the same, as each round can be undone."""
    numbers = [*range(1, 3000), *range((1 << 32) - 3000, 1 << 32)]
    assert len({_permuted(number, b"key") for number in numbers}) == len(numbers)


def test_the_next_daemon_gives_others_whatever_this_one_told() -> None:
    keeper = MemoryKeeper()
    given: set[int] = set()
    for count in (1, ANNOUNCED_AT_ONCE - 2, 3 * ANNOUNCED_AT_ONCE, 5):
        found = take(ArenaNumbers(keeper), count)
        assert len({*given, *found}) == len(given) + count
        given |= set(found)


def test_numbers_wait_until_they_are_announced() -> None:
    numbers = ArenaNumbers(MemoryKeeper())
    count = 0
    while numbers.has_more:
        numbers.take()
        count += 1
    assert 400 < count < 600, f"half of {ANNOUNCED_AT_ONCE} images"
    numbers.announce_more()
    assert numbers.has_more


def test_numbers_of_a_version_that_counted_are_not_given_again() -> None:
    keeper, floor = MemoryKeeper(), 3 << 30  # three of four images are below
    keeper.keep(NAME, floor.to_bytes(8, "little"))
    assert min(take(ArenaNumbers(keeper), 200)) > floor
    assert min(take(ArenaNumbers(keeper), 200)) > floor, "the daemon after that one knows it, too"


def test_a_version_that_counts_follows_and_is_followed() -> None:
    """Forth and back again: no number is given twice."""
    keeper = MemoryKeeper()
    given: set[int] = set()
    for number in range(4):
        if number % 2:
            found = take(ArenaNumbers(keeper), 100)
        else:  # as it did: it read the first word, and announced as many above it
            kept = keeper.take(NAME)
            last = int.from_bytes(kept.content[:8], "little") if kept is not None else 0
            found = [last + 1 + more for more in range(ANNOUNCED_AT_ONCE)]
            keeper.keep(NAME, found[-1].to_bytes(8, "little"))
        assert not given & set(found)
        given |= set(found)
