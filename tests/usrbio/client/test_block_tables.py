"""Clients find and copy blocks of `kind=blocks` by tables that they map: never wrong ones, nor others' unseen."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from errno import ENOENT
from pathlib import Path

import numpy as np
import pytest
from mounting import KvfuseMount, stopped, temporary_mount, wait_until
from posix_calls import as_user
from ring_lab import stats

from kvfuse.usrbio.client import BlockStore
from kvfuse.usrbio.client.resident import NOT_HERE
from kvfuse.usrbio.client.session import Bytes
from kvfuse.usrbio.protocol.wire import Op

NAMESPACE, CLEAR = "user.kvfuse.namespace", "user.kvfuse.clear"
SIZE = 4096
KEYS = [b"a", b"with/slash", b"\0\1\2", b"%percent", b".", bytes(range(1, 128)), b"k" * 255, bytes(range(200))]


@pytest.fixture(scope="module")
def mount() -> Iterator[KvfuseMount]:
    """Without a holder: a table holds as long as the daemon lives, also while that is stopped."""
    with temporary_mount(["capacity=1GiB,allow_other,cache.tier_size=128MiB,outlive=false"]) as mount:
        yield mount


@pytest.fixture
def name(mount: KvfuseMount, tmp_path: Path) -> str:
    return make_namespace(mount, tmp_path.name)


def make_namespace(mount: KvfuseMount, name: str) -> str:
    (mount.point / name).mkdir()
    (mount.point / name).chmod(0o777)
    os.setxattr(mount.point / name, NAMESPACE, b"kind=blocks")
    return name


def content(key: bytes, size: int, turn: int = 0) -> bytes:
    """Bytes that no other key has."""
    return (b"<%s %d>" % (key, turn) * (size // (len(key) + 4) + 1))[:size]


def found(store: BlockStore, keys: list[bytes], size: int = SIZE) -> list[bytes | int | None]:
    """What the client finds by itself; -ENOENT: there is none; None: it would ask the daemon."""
    memory = np.zeros((len(keys), size), np.uint8)
    targets = np.arange(len(keys), dtype=np.uint64) * np.uint64(size) + np.uint64(memory.ctypes.data)
    results = store._resident.get(keys, targets, np.full(len(keys), size, np.int64))
    if results is None:
        return [None] * len(keys)
    rows = enumerate(results.tolist())
    return [memory[row, :one].tobytes() if one >= 0 else None if one == NOT_HERE else one for row, one in rows]


class Done:
    """A copy that has ended."""

    def finish(self) -> None:
        return None


def copied(store: BlockStore, keys: list[bytes], size: int = SIZE) -> list[bytes | int | None]:
    """As `found`, by copies that the caller makes, as for memory of a GPU."""
    memory = np.zeros((len(keys), size), np.uint8)

    def begin(row: int, arena: Bytes, offset: int, length: int) -> Done:
        memory[row, :length] = arena[offset : offset + length]
        return Done()

    results = store._resident.copy(keys, np.full(len(keys), size, np.int64), begin)
    if results is None:
        return [None] * len(keys)
    rows = enumerate(results.tolist())
    return [memory[row, :one].tobytes() if one >= 0 else None if one == NOT_HERE else one for row, one in rows]


def wait_for_table(store: BlockStore, key: bytes) -> None:
    """Tables that ended are mapped again soon."""
    wait_until(lambda: isinstance(found(store, [key], 1 << 20)[0], bytes), f"{key!r} to be found")


# -- what is found ---------------------------------------------------------------------------------------


def test_any_key_is_found_and_others_are_certainly_absent(mount: KvfuseMount, name: str) -> None:
    with BlockStore(mount.point, name) as store:
        data = [os.urandom(100 + number) for number in range(len(KEYS))]
        others = [b"b", b"%", b"a\0", b"aa", b"k" * 254]
        assert store.put_many(KEYS, data).all()
        assert found(store, KEYS) == data
        assert found(store, others) == [-ENOENT] * 5
        assert copied(store, [*KEYS, *others]) == [*data, *[-ENOENT] * 5]
        with stopped(stats(mount)["pid"]):  # nobody else answers
            assert store.exists([*KEYS, *others]).tolist() == [True] * len(KEYS) + [False] * 5
            assert store.longest_prefix([*KEYS, b"b", b"a"]) == len(KEYS)
            assert store.get_into(b"b", bytearray(10)) is None
            buffers = [bytearray(SIZE) for _ in range(len(KEYS) + 5)]
            sizes = store.get_many_into([*KEYS, *others], buffers).tolist()
            assert sizes == [len(one) for one in data] + [-1] * 5
            one = bytearray(SIZE)
            assert store.get_into(KEYS[1], one) == len(data[1])
            assert one[: len(data[1])] == data[1]


def test_a_buffer_that_is_too_small_is_told_as_before(mount: KvfuseMount, name: str) -> None:
    with BlockStore(mount.point, name) as store:
        store.put(b"a", b"x" * 100)
        for get in (lambda: store.get_into(b"a", bytearray(99)), lambda: store.get_many_into([b"a"], [bytearray(99)])):
            with pytest.raises(OSError, match="essage too long"):
                get()


def test_a_block_that_was_replaced_deleted_or_cleared_is_not_found(mount: KvfuseMount, name: str) -> None:
    with BlockStore(mount.point, name) as store:
        store.put_many([b"a", b"b"], [b"1", b"1"])
        assert found(store, [b"a", b"b"]) == [b"1", b"1"]
        store.put(b"a", b"22")
        assert store.delete(b"b")
        assert found(store, [b"a", b"b"]) == [b"22", -ENOENT]
        os.setxattr(mount.point / name, CLEAR, b"now")
        assert found(store, [b"a"]) == [None]
        assert store.get(b"a") is None
        store.put(b"a", b"333")
        wait_for_table(store, b"a")
        assert found(store, [b"a"]) == [b"333"]


def test_a_file_in_the_folder_ends_what_is_certain(mount: KvfuseMount, name: str) -> None:
    with BlockStore(mount.point, name) as store:
        store.put(b"a", b"1")
        assert found(store, [b"file"]) == [-ENOENT]
        os.mkdir(mount.point / name / "folder")
        assert found(store, [b"file"]) == [None]


def test_a_block_of_another_owner_ends_what_is_certain(mount: KvfuseMount, name: str) -> None:
    with BlockStore(mount.point, name) as store:
        store.put(b"a", b"1")
        assert found(store, [b"theirs"]) == [-ENOENT]
        with as_user(), BlockStore(mount.point, name, create=False) as other:
            other.put(b"theirs", b"2")
            assert found(other, [b"a", b"theirs", b"nobodys"]) == [b"1", b"2", None]
        assert found(store, [b"theirs"]) == [None], "another table may have it"
        assert store.exists([b"theirs", b"nobodys"]).tolist() == [True, False]
        assert bytes(store.get(b"theirs") or b"") == b"2"


def test_blocks_that_the_client_may_not_read_are_in_no_table_of_it(mount: KvfuseMount, name: str) -> None:
    with BlockStore(mount.point, name) as own:
        own.put(b"open", b"1")
        with own.client.namespace(name, mode=0o600) as namespace, own.lanes.take() as lane:
            assert lane.move(Op.PUT, namespace, [b"private"], [np.frombuffer(b"2", np.uint8)], own._terms) == [1]
        wait_for_table(own, b"private")
        with as_user(), BlockStore(mount.point, name, create=False) as other:
            assert found(other, [b"open", b"private"]) == [b"1", None]
            assert not any(mapped.table.find([b"private"])[0] >= 0 for mapped in other._resident._mapped[1])


def test_who_loses_the_folder_finds_nothing(mount: KvfuseMount, name: str) -> None:
    folder = mount.point / name
    with BlockStore(mount.point, name) as store, as_user():
        other = BlockStore(mount.point, name, create=False)
    with other, BlockStore(mount.point, name) as store:
        store.put(b"a", b"1")
        wait_for_table(other, b"a")
        folder.chmod(0o711)
        assert found(other, [b"a"]) == [None]
        store.put(b"b", b"2")
        assert found(other, [b"a", b"b"]) == [None, None]
        wait_for_table(store, b"b")


def test_reads_by_clients_are_uses(mount: KvfuseMount, name: str) -> None:
    with BlockStore(mount.point, name) as store:
        keys = [b"%08d" % number for number in range(100)]
        assert store.put_many(keys, keys).all()
        assert found(store, keys) == keys
        table = store._resident._mapped[1][0].table
        rows = table.find(keys)
        stored = table.rows["used"][rows].copy()
        wait_until(lambda: found(store, keys[:50]) and (table.rows["used"][rows[:50]] > stored[:50]).all(), "their use")
        assert (table.rows["used"][rows[50:]] == stored[50:]).all()


# -- many blocks, and changes meanwhile ------------------------------------------------------------------


def is_whole(key: bytes, data: bytes, size: int) -> bool:
    """It is what was put under this key at some time."""
    turn = data[len(key) + 2 :].partition(b">")[0]
    return turn.isdigit() and data == content(key, size, int(turn))


@contextmanager
def reading(
    store: BlockStore, keys: list[bytes], size: int, seed: int, get: Callable[..., list[bytes | int | None]] = found
) -> Iterator[list[int]]:
    """Threads that read any of these keys in a loop. How many blocks were found, and how many not; none is wrong."""
    is_over = threading.Event()
    wrong: list[bytes] = []
    counts = [0, 0]

    def read(place: int) -> None:
        rng = np.random.default_rng([seed, place])
        while not is_over.is_set():
            asked = [keys[number] for number in rng.integers(0, len(keys), 16).tolist()]
            for key, data in zip(asked, get(store, asked, size), strict=True):
                if isinstance(data, bytes) and not is_whole(key, data, size):
                    wrong.append(key)
                counts[0 if isinstance(data, bytes) else 1] += 1

    readers = [threading.Thread(target=read, args=(place,)) for place in range(2)]
    for reader in readers:
        reader.start()
    try:
        yield counts
    finally:
        is_over.set()
        for reader in readers:
            reader.join()
    assert not wrong, wrong[:10]


@pytest.mark.parametrize("get", [found, copied])
def test_blocks_that_go_while_they_are_read_are_never_mixed_up(
    seed: int, get: Callable[..., list[bytes | int | None]]
) -> None:
    """Many times the memory goes through it, and the volume evicts. A copy that counts is whole and of its key."""
    with temporary_mount(["capacity=96MiB,cache.tier_size=16MiB,cache.staging_size=16MiB"]) as mount:
        make_namespace(mount, "blocks")
        with BlockStore(mount.point, "blocks") as store, BlockStore(mount.point, "blocks") as other:
            size, keys = 64 << 10, [b"%08d" % number for number in range(2000)]
            with reading(other, keys, size, seed, get) as counts:
                for turn in range(3):
                    for start in range(0, len(keys), 40):
                        part = keys[start : start + 40]
                        store.put_many(part, [content(key, size, turn) for key in part])
                        if start % 200 == 0:
                            assert store.delete(part[0]) in (True, False)
            assert counts[0] > 100, counts
            here = store.exists(keys)
            assert 0 < here.sum() < len(keys)
            for key in [key for key, is_there in zip(keys, here.tolist(), strict=True) if is_there][-20:]:
                assert is_whole(key, bytes(store.get(key) or b""), size)


def test_blocks_that_are_not_in_memory_exist_and_come_by_the_daemon() -> None:
    with temporary_mount(["capacity=256MiB,cache.tier_size=8MiB,cache.staging_size=16MiB"]) as mount:
        make_namespace(mount, "blocks")
        with BlockStore(mount.point, "blocks") as store:
            size, keys = 64 << 10, [b"%08d" % number for number in range(600)]
            for start in range(0, len(keys), 20):
                part = keys[start : start + 20]
                assert store.put_many(part, [content(key, size) for key in part]).all()
            by_itself = found(store, keys, size)
            assert 0 < by_itself.count(None) < len(keys)
            assert store.exists(keys).all()
            assert store.longest_prefix([*keys, b"none"]) == len(keys)
            assert all(bytes(store.get(key) or b"") == content(key, size) for key in keys[:100])


def test_a_table_grows_while_it_is_read(mount: KvfuseMount, name: str, seed: int) -> None:
    with BlockStore(mount.point, name) as store, BlockStore(mount.point, name) as other:
        size, keys = 64, [b"%08d" % number for number in range(100_000)]
        with reading(other, keys, size, seed) as counts:
            for start in range(0, len(keys), 1000):
                part = keys[start : start + 1000]
                assert store.put_many(part, [content(key, size) for key in part]).all()
        assert counts[0] > 1000
        for start in range(0, len(keys), 10_000):
            assert other.exists(keys[start : start + 10_000]).all()
        asked = keys[::97]
        assert other.get_many_into(asked, [np.empty(size, np.uint8) for _ in asked]).tolist() == [size] * len(asked)


def test_what_was_acknowledged_is_never_absent(mount: KvfuseMount, name: str, seed: int) -> None:
    """While a table grows, and blocks are replaced, a client that answers itself what is absent misses none."""
    keys = [b"%08d" % number for number in range(30_000)]
    acknowledged = [0]
    is_over = threading.Event()

    def put() -> None:
        rng = np.random.default_rng(seed)
        with BlockStore(mount.point, name) as store:
            for start in range(0, len(keys), 100):
                part = keys[start : start + 100]
                assert store.put_many(part, part).all()
                acknowledged[0] = start + 100
                again = [keys[number] for number in rng.integers(0, acknowledged[0], 50).tolist()]
                assert store.put_many(again, again).all()
        is_over.set()

    with BlockStore(mount.point, name) as other:
        writer = threading.Thread(target=put)
        writer.start()
        rng, looked = np.random.default_rng(seed + 1), 0
        while not is_over.is_set():
            if count := acknowledged[0]:
                asked = [keys[number] for number in rng.integers(0, count, 300).tolist()]
                missing = [key for key, one in zip(asked, found(other, asked, 8), strict=True) if one == -ENOENT]
                assert not missing
                assert other.exists(asked).all()
                looked += 1
        writer.join()
        assert looked > 100


# -- the next daemon -------------------------------------------------------------------------------------


def kill_daemon(mount: KvfuseMount) -> None:
    former = int(stats(mount)["pid"])
    os.kill(former, signal.SIGKILL)
    assert stats(mount)["pid"] != former


def test_reads_go_on_when_the_daemon_is_killed(seed: int) -> None:
    with temporary_mount(["capacity=512MiB,cache.tier_size=64MiB,outlive=true"]) as mount:
        make_namespace(mount, "blocks")
        with BlockStore(mount.point, "blocks") as store, BlockStore(mount.point, "blocks") as other:
            size, keys = SIZE, [b"%08d" % number for number in range(3000)]
            for start in range(0, len(keys), 100):
                part = keys[start : start + 100]
                assert store.put_many(part, [content(key, size) for key in part]).all()
            table = other._resident._mapped[1][0].table
            with reading(other, keys, size, seed) as counts:
                for turn in range(1, 3):
                    kill_daemon(mount)
                    wait_for_table(other, keys[0])
                    before = counts[0]
                    part = keys[:100]
                    assert store.put_many(part, [content(key, size, turn) for key in part]).all()
                    wait_until(lambda before=before: counts[0] > before, "more reads")  # type: ignore[misc]
                    assert found(other, part, size) == [content(key, size, turn) for key in part]
            assert other._resident._mapped[1][0].table is table, "it is the same memory"
            assert not table.has_ended
            assert other.exists([*keys, b"none"]).tolist() == [True] * len(keys) + [False]


def test_changes_elsewhere_end_no_table_of_the_former_daemon() -> None:
    with temporary_mount(["capacity=512MiB,cache.tier_size=64MiB,outlive=true,allow_other"]) as mount:
        make_namespace(mount, "blocks")
        (mount.point / "elsewhere").mkdir()
        with as_user():
            other = BlockStore(mount.point, "blocks", create=False)
        with other, BlockStore(mount.point, "blocks") as store:
            store.put(b"a", b"1")
            wait_for_table(other, b"a")
            kill_daemon(mount)
            wait_for_table(other, b"a")
            (mount.point / "elsewhere").chmod(0o700)
            wait_for_table(other, b"a")
            tables = [mapped.table for mapped in other._resident._present()]
            mount.point.chmod(0o711)
            assert all(table.has_ended for table in tables), "a folder above it has changed"
            assert bytes(store.get(b"a") or b"") == b"1"
            wait_for_table(other, b"a")


# -- views -----------------------------------------------------------------------------------------------


def arenas_of(store: BlockStore) -> set[int]:
    return set(store.client.session._arenas)


def test_a_view_keeps_its_bytes(mount: KvfuseMount, name: str) -> None:
    with BlockStore(mount.point, name) as store:
        store.put(b"a", content(b"a", SIZE))
        view = store.get(b"a")
        assert view is not None
        assert stats(mount)["rings"]["pins"] == 1
        store.put(b"a", content(b"a", SIZE, 1))
        assert store.delete(b"a")
        assert bytes(view) == content(b"a", SIZE)
        with pytest.raises(TypeError):
            view[0] = 0
        view.release()
        assert store.get(b"a") is None
        wait_until(lambda: not (store.get(b"b") or stats(mount)["rings"]["pins"]), "the pin to go")


@pytest.mark.parametrize("kill", [False, True])
def test_memory_that_is_viewed_is_not_used_again(kill: bool) -> None:
    with temporary_mount(["capacity=512MiB,cache.tier_size=16MiB,cache.staging_size=16MiB,outlive=true"]) as mount:
        make_namespace(mount, "blocks")
        with BlockStore(mount.point, "blocks") as store:
            size, keys = 64 << 10, [b"%08d" % number for number in range(1000)]
            store.put_many(keys[:10], [content(key, size) for key in keys[:10]])
            views = [store.get(key) for key in keys[:10]]
            assert stats(mount)["rings"]["pins"] == 10
            if kill:
                kill_daemon(mount)
                wait_until(lambda: stats(mount).get("rings", {}).get("pins") == 10, "the pins")
            for start in range(0, len(keys), 20):
                part = keys[start : start + 20]
                assert store.put_many(part, [content(key, size, 1) for key in part]).all()
            for key, view in zip(keys, views, strict=False):
                assert view is not None
                assert bytes(view) == content(key, size)
            assert bytes(store.get(keys[0]) or b"") == content(keys[0], size, 1)
            before = stats(mount)["store"]["recycled_arenas"]
            del view
            views.clear()
            for start in range(0, len(keys), 20):
                part = keys[start : start + 20]
                assert store.put_many(part, [content(key, size, 2) for key in part]).all()
            assert stats(mount)["store"]["recycled_arenas"] > before
            assert stats(mount)["rings"]["pins"] == 0
