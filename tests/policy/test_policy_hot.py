"""What a small, fast tier keeps: probation, those that are used again, and no long calls."""

from __future__ import annotations

import random
from dataclasses import dataclass

from kvfuse.policy.hot import LOOKS_MAX, RECENT_MIN, USES_MAX, HotOrder, Recent


@dataclass
class Thing:
    uses: int = 0


def filled(count: int) -> tuple[HotOrder[Thing], list[Thing]]:
    order, things = HotOrder[Thing](Recent()), [Thing() for _ in range(count)]
    for key, thing in enumerate(things):
        order.add(key, thing)
    return order, things


def gone(order: HotOrder[Thing], count: int) -> list[int]:
    keys = []
    for _ in range(count):
        key = order.next_to_go()
        assert key is not None
        order.remove(key)
        keys.append(key)
    return keys


def test_new_things_that_were_used_at_most_once_go_in_their_order() -> None:
    order, things = filled(20)
    things[0].uses, things[1].uses = 2, 1
    assert gone(order, 3) == [1, 2, 3]
    assert list(order)[-1] == 0


def test_a_key_that_comes_again_soon_is_proven() -> None:
    recent = Recent()
    order = HotOrder[Thing](recent)
    recent.add(7, 0)
    order.add(7, Thing())
    for key in range(10, 20):
        order.add(key, Thing())
    assert 7 not in recent
    assert gone(order, 11) == [*range(10, 20), 7]


def test_keys_are_forgotten_beyond_the_bound() -> None:
    recent = Recent()
    for key in range(RECENT_MIN + 1):
        recent.add(key, 0)
    assert len(recent) == RECENT_MIN
    assert 0 not in recent
    assert 1 in recent


def test_a_call_spares_a_bounded_number() -> None:
    order, things = filled(10 * LOOKS_MAX)
    for thing in things:
        thing.uses = USES_MAX
    assert order.next_to_go() is not None
    assert sum(thing.uses for thing in things) >= USES_MAX * (len(things) - 2 * LOOKS_MAX)


def test_whatever_happens_all_that_is_there_goes_once() -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    chosen, order, kept = random.Random(seed), HotOrder[Thing](Recent()), dict[int, Thing]()
    for key in range(3000):
        kept[key] = Thing()
        order.add(key, kept[key])
        for used in chosen.sample(list(kept)[-30:], min(len(kept), 3)):
            kept[used].uses = min(kept[used].uses + 1, USES_MAX)
        if chosen.random() < 0.5:
            del kept[gone(order, 1)[0]]
        if kept and chosen.random() < 0.1:
            order.remove(removed := chosen.choice(list(kept)))
            del kept[removed]
        assert len(order) == len(kept)
    assert sorted(gone(order, len(kept))) == sorted(kept)
    assert order.next_to_go() is None


def test_an_order_goes_on_as_the_one_before_it(rng: random.Random) -> None:
    """Beside one that was there all the time. Nothing is made that nobody asks for."""
    for _ in range(30):
        recent = Recent(), Recent()
        orders = HotOrder[Thing](recent[0]), HotOrder[Thing](recent[1])
        things = dict[int, Thing]()
        for key in range(rng.randrange(60)):
            if rng.random() < 0.5:
                recent[0].add(key, 0)
            things[key] = Thing()
            orders[0].add(key, things[key])
            things[key].uses = rng.randrange(USES_MAX + 1)
        parts = [[key for key in orders[0] if orders[0].is_proven(key) is proven] for proven in (False, True)]
        others, made = {key: Thing(thing.uses) for key, thing in things.items()}, set[int]()

        def make(key: int, made: set[int] = made, others: dict[int, Thing] = others) -> Thing:
            made.add(key)
            return others[key]

        orders[1].begin_with(*parts, make)
        assert not made
        for number in range(100):
            assert list(orders[0]) == list(orders[1])
            assert len(orders[0]) == len(orders[1]) == len(things)
            key = rng.choice(list(things)) if things and rng.random() < 0.7 else 1000 + number
            kind = rng.choice(["add", "remove", "use", "replace", "go"])
            assert (key in orders[0]) == (key in orders[1]) == (key in things)
            if kind == "add" and key not in things:
                things[key], others[key] = Thing(), Thing()
                assert orders[0].add(key, things[key]) == orders[1].add(key, others[key])
            elif kind == "go":
                assert orders[0].next_to_go() == orders[1].next_to_go()
            elif key not in things:
                continue
            elif kind == "remove":
                assert orders[0].is_proven(key) == orders[1].is_proven(key)
                for order, own in zip(orders, (things, others), strict=True):
                    order.remove(key)
                    del own[key]
            elif kind == "replace":
                things[key], others[key] = Thing(1), Thing(1)
                orders[0].replace(key, things[key])
                orders[1].replace(key, others[key])
            else:
                uses = rng.randrange(USES_MAX + 1)
                things[key].uses = others[key].uses = uses
