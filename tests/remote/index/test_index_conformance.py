"""What every engine of the index promises: the rules of `kvfuse.remote.index.api`."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable

import pytest
import trio
import trio.testing
from index_engines import Opener

from kvfuse.errors import EngineError
from kvfuse.remote.index.api import KEY_SIZE, SEQUENCE_MAX, VALUE_SIZE_MAX, BlockIndex, Entry, Replacement

KEY = b"\0\xff" * 8
SEQUENCES = (
    0,
    1,
    255,
    256,
    (1 << 32) - 1,
    1 << 32,
    (1 << 53) + 1,
    (1 << 63) - 1,
    1 << 63,
    SEQUENCE_MAX - 1,
    SEQUENCE_MAX,
)
VALUES = (b"", b"\0", b"\1", b"\xff", b"\xff" * VALUE_SIZE_MAX, bytes(VALUE_SIZE_MAX))


def drawn(rng: random.Random, count: int, sequence: int = 1) -> list[Entry]:
    """Entries of different keys."""
    return [Entry(rng.randbytes(KEY_SIZE), sequence, rng.randbytes(rng.randrange(200))) for _ in range(count)]


def keys_of(entries: list[Entry]) -> list[bytes]:
    return [entry.key for entry in entries]


async def put(index: BlockIndex, sequence: int, value: bytes = b"", key: bytes = KEY) -> Entry | None:
    """What was there."""
    (had,) = await index.put([Entry(key, sequence, value)])
    return had


async def found(index: BlockIndex, key: bytes = KEY) -> Entry | None:
    (entry,) = await index.find([key])
    return entry


# -- one call -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 5000])
async def test_calls_of_any_size_answer_in_the_order_of_the_keys(
    index: BlockIndex, other: BlockIndex, rng: random.Random, count: int
) -> None:
    entries = drawn(rng, count)
    assert await index.find(keys_of(entries)) == [None] * count
    assert await index.put(entries) == [None] * count
    rng.shuffle(entries)
    assert await other.find(keys_of(entries)) == entries
    later = [Entry(entry.key, 2, entry.value[::-1]) for entry in entries]
    assert await other.put(later) == entries
    await index.drop([(key, 1 + index % 2) for index, key in enumerate(keys_of(entries))])
    assert await other.find(keys_of(later)) == [entry if index % 2 == 0 else None for index, entry in enumerate(later)]


async def test_clear_removes_all_entries_and_none_of_another_volume(
    open_index: Opener, index: BlockIndex, rng: random.Random
) -> None:
    """Of a name that begins alike, or has characters that a server takes for a pattern."""
    neighbours = [await open_index(name) for name in ("kv2", "k", "k?", "[k]v", "*")]
    entries = [*drawn(rng, 3000), Entry(bytes(KEY_SIZE), 1, b"first"), Entry(b"\xff" * KEY_SIZE, 1, b"last")]
    for engine in (index, *neighbours):
        await engine.put(entries)
    await index.clear()
    await neighbours[2].clear()
    for engine in (index, neighbours[2]):
        assert await engine.find(keys_of(entries)) == [None] * len(entries)
    for engine in neighbours[:2] + neighbours[3:]:
        assert await engine.find(keys_of(entries)) == entries
        await engine.clear()
        await engine.clear()
        assert await found(engine, entries[0].key) is None
        await engine.aclose()
    await neighbours[2].aclose()
    await put(index, 1)
    assert await found(index) is not None


async def test_some_keys_are_there_and_others_not(index: BlockIndex, rng: random.Random) -> None:
    entries = drawn(rng, 100)
    await index.put(entries[::3])
    expected = [entry if place % 3 == 0 else None for place, entry in enumerate(entries)]
    assert await index.find(keys_of(entries)) == expected
    assert await index.put(entries) == expected
    assert index.counters.found == 34


@pytest.mark.parametrize("value", VALUES, ids=[f"{len(value)}-{value[:1].hex()}" for value in VALUES])
async def test_any_value(index: BlockIndex, value: bytes) -> None:
    for sequence in (0, 7, SEQUENCE_MAX):
        await put(index, sequence, value)
        assert await found(index) == Entry(KEY, sequence, value)
        await index.drop([(KEY, sequence)])
        assert await found(index) is None


@pytest.mark.parametrize("key", [bytes(16), b"\xff" * 16, b"a\0" * 8, b"\r\n" * 8, "äö€".encode() * 2 + b"\0\0"])
async def test_any_key(index: BlockIndex, key: bytes) -> None:
    await put(index, 1, b"value", key)
    assert await found(index, key) == Entry(key, 1, b"value")
    assert await found(index, key[::-1]) in (None, Entry(key, 1, b"value"))


async def test_what_no_key_or_value_is_is_refused(index: BlockIndex) -> None:
    other_key = bytes(16)
    for wrong in (
        lambda: index.find([KEY, other_key, KEY]),
        lambda: index.put([Entry(KEY, 1, b"a"), Entry(KEY, 2, b"b")]),
        lambda: index.drop([(KEY, 1), (KEY, 2)]),
        lambda: index.find([b"short"]),
        lambda: index.find([KEY + b"!"]),
        lambda: index.put([Entry(KEY, 1, bytes(VALUE_SIZE_MAX + 1))]),
        lambda: index.put([Entry(KEY, -1, b"")]),
        lambda: index.put([Entry(KEY, SEQUENCE_MAX + 1, b"")]),
        lambda: index.drop([(KEY, SEQUENCE_MAX + 1)]),
    ):
        with pytest.raises(ValueError):
            await wrong()
    assert await index.find([KEY, other_key]) == [None, None]


# -- sequences ----------------------------------------------------------------------------------------


async def test_a_lower_sequence_never_replaces_and_an_equal_one_does(index: BlockIndex, other: BlockIndex) -> None:
    """Whatever the values are: an equal sequence replaces a greater value by a smaller one."""
    last: Entry | None = None
    for place, sequence in enumerate(SEQUENCES):
        assert await put(index, sequence, b"\xff" * VALUE_SIZE_MAX) == last
        for value in VALUES:
            await put(other, sequence, value)
            last = Entry(KEY, sequence, value)
            assert await found(index) == last
            for lower in SEQUENCES[:place]:
                assert await put(other, lower, b"\xff" * VALUE_SIZE_MAX) == last
            assert await found(index) == last


async def test_only_the_same_sequence_is_dropped(index: BlockIndex) -> None:
    for sequence in SEQUENCES:
        for value in VALUES:
            await put(index, sequence, value)
            for another in SEQUENCES:
                if another != sequence:
                    await index.drop([(KEY, another)])
            assert await found(index) == Entry(KEY, sequence, value)
        await index.drop([(KEY, sequence)])
        await index.drop([(KEY, sequence)])
        assert await found(index) is None
        await put(index, 0)
        assert await found(index) == Entry(KEY, 0, b"")


async def test_an_entry_takes_the_place_of_the_expected_one_alone(index: BlockIndex, other: BlockIndex) -> None:
    assert await index.replace([Replacement(0, Entry(KEY, 1, b"new"))]) == [False]
    assert await found(index) is None
    for sequence in SEQUENCES:
        await put(index, sequence, b"\xff" * VALUE_SIZE_MAX)
        for another in SEQUENCES:
            if another != sequence:
                assert await other.replace([Replacement(another, Entry(KEY, sequence, b"wrong"))]) == [False]
        for value in VALUES:
            for later in (sequence, SEQUENCE_MAX, 0):  # a lower one, too
                await index.drop([(KEY, (await found(index) or Entry(KEY, 0, b"")).sequence)])
                await put(index, sequence, b"before")
                assert await other.replace([Replacement(sequence, Entry(KEY, later, value))]) == [True]
                assert await found(index) == Entry(KEY, later, value)
                assert await other.replace([Replacement(sequence, Entry(KEY, later, value))]) == [True], "it is there"
        await index.drop([(KEY, 0)])


async def test_hosts_that_replace_one_entry_agree_who_did(index: BlockIndex, other: BlockIndex) -> None:
    await put(index, 7, b"first")
    won: list[bytes] = []

    async def change(engine: BlockIndex, value: bytes) -> None:
        if await engine.replace([Replacement(7, Entry(KEY, 8, value))]) == [True]:
            won.append(value)

    async with trio.open_nursery() as nursery:
        for place in range(10):
            nursery.start_soon(change, (index, other)[place % 2], b"%d" % place)
    assert len(won) == 1
    assert await found(index) == Entry(KEY, 8, won[0])


async def test_some_replacements_are_refused_and_others_not(index: BlockIndex, rng: random.Random) -> None:
    entries = drawn(rng, 700, 5)
    await index.put(entries)
    wanted = [Replacement(5 - place % 2, Entry(one.key, 6, b"new")) for place, one in enumerate(entries)]
    done = await index.replace(wanted)
    assert done == [place % 2 == 0 for place in range(700)]
    kept = [change.entry if was else one for was, change, one in zip(done, wanted, entries, strict=True)]
    assert await index.find(keys_of(entries)) == kept
    assert index.counters.replaces == 1


async def test_a_call_with_keys_of_every_case(index: BlockIndex, rng: random.Random) -> None:
    """Those that are refused do not keep the others from being put."""
    entries = drawn(rng, 300, 5)
    await index.put(entries)
    new = [Entry(entry.key, 4 + place % 3, b"new") for place, entry in enumerate(entries)] + drawn(rng, 100, 0)
    assert await index.put(new) == entries + [None] * 100
    kept = [entry if entry.sequence > later.sequence else later for entry, later in zip(entries, new, strict=False)]
    assert await index.find(keys_of(new)) == kept + new[300:]


# -- hosts and volumes --------------------------------------------------------------------------------


async def test_concurrent_puts_end_with_the_highest_sequence(
    index: BlockIndex, other: BlockIndex, rng: random.Random
) -> None:
    """And every entry that was put and is not there any more was answered to somebody, or was lower."""
    keys = [rng.randbytes(KEY_SIZE) for _ in range(40)]
    sequences = {key: rng.sample(range(1000), 30) for key in keys}
    had: dict[bytes, list[Entry]] = {key: [] for key in keys}
    put_entries: dict[bytes, list[Entry]] = {key: [] for key in keys}

    async def work(engine: BlockIndex, rng: random.Random) -> None:
        for _ in range(8):
            entries = [
                Entry(key, sequences[key].pop(), rng.randbytes(8)) for key in rng.sample(keys, 30) if sequences[key]
            ]
            for entry, before in zip(entries, await engine.put(entries), strict=True):
                put_entries[entry.key].append(entry)
                if before is not None:
                    had[entry.key].append(before)

    async with trio.open_nursery() as nursery:
        for engine in (index, other, index):
            nursery.start_soon(work, engine, random.Random(rng.random()))
    for key, entry in zip(keys, await index.find(keys), strict=True):
        highest = max(put_entries[key], key=lambda one: one.sequence)
        assert entry == highest
        rising = sorted({one.sequence for one in had[key]} | {highest.sequence})
        assert all(one in put_entries[key] for one in had[key])
        assert rising[-1] == highest.sequence


async def test_a_random_history_is_that_of_a_dict(index: BlockIndex, other: BlockIndex, rng: random.Random) -> None:
    keys = [rng.randbytes(KEY_SIZE) for _ in range(12)]
    model: dict[bytes, Entry] = {}
    for _ in range(120):
        engine = rng.choice([index, other])
        some = rng.sample(keys, rng.randrange(len(keys)))
        if rng.random() < 0.6:
            entries = [Entry(key, rng.randrange(4), rng.randbytes(rng.choice([0, 1, 9]))) for key in some]
            assert await engine.put(entries) == [model.get(key) for key in some]
            for entry in entries:
                if entry.key not in model or model[entry.key].sequence <= entry.sequence:
                    model[entry.key] = entry
        else:
            dropped = [(key, rng.randrange(4)) for key in some]
            await engine.drop(dropped)
            for key, sequence in dropped:
                if key in model and model[key].sequence == sequence:
                    del model[key]
        assert await rng.choice([index, other]).find(keys) == [model.get(key) for key in keys]


async def test_two_volumes_do_not_see_each_others_entries(index: BlockIndex, open_index: Opener) -> None:
    another = await open_index("kv2")
    await put(index, 5, b"one")
    assert await found(another) is None
    await put(another, 3, b"two")
    await index.drop([(KEY, 3)])
    await another.drop([(KEY, 5)])
    assert (await found(index), await found(another)) == (Entry(KEY, 5, b"one"), Entry(KEY, 3, b"two"))
    await another.aclose()


# -- the end ------------------------------------------------------------------------------------------


async def test_an_index_that_is_closed_fails_and_is_there_when_it_is_opened_again(open_index: Opener) -> None:
    index = await open_index("kv")
    await put(index, 1, b"value")
    await index.aclose()
    await index.aclose()
    calls: list[Callable[[], Awaitable[object]]] = [
        lambda: index.find([KEY]), lambda: put(index, 2), lambda: index.drop([(KEY, 1)])
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(EngineError, match="closed"):
            await call()
    assert index.counters.errors == 3
    index = await open_index("kv")
    assert await found(index) == Entry(KEY, 1, b"value")
    await index.aclose()


async def test_calls_in_flight_end_when_it_is_closed(open_index: Opener, rng: random.Random) -> None:
    index = await open_index("kv")
    entries = drawn(rng, 2000)
    ended = []

    async def call() -> None:
        try:
            await index.put(entries)
        except EngineError:
            pass
        ended.append(True)

    async with trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(call)
        await trio.testing.wait_all_tasks_blocked()
        await index.aclose()
    assert len(ended) == 4


async def test_a_call_that_is_cancelled_leaves_the_index_usable(index: BlockIndex, rng: random.Random) -> None:
    entries = drawn(rng, 500)
    for _ in range(20):
        with trio.move_on_after(rng.random() * 0.02):
            await index.put(entries)
            await index.find(keys_of(entries))
            await index.drop([(entry.key, entry.sequence) for entry in entries])
    await index.put(entries)
    assert await index.find(keys_of(entries)) == entries
