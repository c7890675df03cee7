"""Blocks by key against a real mount: a model, the file door, views, threads, deadlines."""

from __future__ import annotations

import errno
import gc
import os
import random
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from mounting import KvfuseMount, stopped, wait_until

from kvfuse.usrbio.client import BlockStore, Client, Disconnected, Tier, connect, file_name
from kvfuse.usrbio.client.files import SETTINGS

pytestmark = pytest.mark.engines("lmdb+file", "etcd+rados")

PATIENCE_S = 20.0
ODD_KEYS = [b".", b"..", b"%", b"%61", b"a/b", b"\0", b"/" * 200, b"x" * 255, b"\xff" * 30, b"a b\n", b"~", b"-rf"]


@pytest.fixture
def store(client: Client, request: pytest.FixtureRequest) -> Iterator[BlockStore]:
    """A store in a namespace of the test's own."""
    with BlockStore(client, request.node.name.replace("/", "_")[:100], entries=16) as store:
        yield store


def make_relaxed(path: Path) -> None:
    """Make a folder of blocks that clients map: where each answer is what all hosts have, they do not."""
    path.mkdir()
    os.setxattr(path, SETTINGS, b"kind=blocks")
    os.setxattr(path, "user.kvfuse.publish", b"relaxed")


def test_after_memory_was_refused_smaller_blocks_are_stored(store: BlockStore) -> None:
    store.put(b"first", b"small")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))  # what is open stays so
    try:
        with pytest.raises(OSError) as caught:
            store.put(b"second", bytes(1 << 20))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert caught.value.errno == errno.EMFILE
    store.put(b"third", b"small")
    assert bytes(store.get(b"third") or b"") == b"small"
    assert store.get(b"second") is None


def test_a_store_does_what_a_dictionary_does(store: BlockStore, client: Client, rng: random.Random) -> None:
    keys: list[bytes | str] = [*ODD_KEYS, "ключ", *(f"key-{number}" for number in range(20))]
    model: dict[bytes | str, bytes] = {}
    pool = client.iov(1 << 20).array
    for _ in range(400):
        key = rng.choice(keys)
        action = rng.choice(["put", "put in place", "get", "get_into", "get in place", "delete", "exists", "prefix"])
        data = rng.randbytes(rng.choice([0, 1, 1000, 4096, 70_000, 300_000]))
        place = pool[(offset := rng.randrange(1000)) : offset + 300_000]
        if action == "put":
            store.put(key, data)
            model[key] = data
        elif action == "put in place":
            place[: len(data)] = np.frombuffer(data, np.uint8)
            store.put(key, place[: len(data)])
            model[key] = data
        elif action == "get":
            view = store.get(key)
            assert (None if view is None else bytes(view)) == model.get(key)
            assert view is None or view.readonly
        elif action in ("get_into", "get in place"):
            target = place if action == "get in place" else np.zeros(300_000, np.uint8)
            size = store.get_into(key, target)
            assert (None if size is None else target[:size].tobytes()) == model.get(key)
        elif action == "delete":
            assert store.delete(key) == (model.pop(key, None) is not None)
        elif action == "exists":
            asked = rng.choices(keys, k=rng.randint(0, 40))
            assert store.exists(asked).tolist() == [key in model for key in asked]
        else:
            asked = rng.sample([*model, "absent"], rng.randint(0, len(model) + 1))
            expected = next((n for n, key in enumerate(asked) if key not in model), len(asked))
            assert store.longest_prefix(asked) == expected


def test_costs_say_where_blocks_are_and_when_they_come(store: BlockStore) -> None:
    keys = [f"key-{number}" for number in range(20)]
    store.put_many(keys, [bytes(50_000)] * 20)
    assert store.prefetch(keys[:5]).all()
    found = store.costs([*keys, "absent"])
    assert set(found.tiers[:5].tolist()) == {Tier.DRAM}
    assert set(found.tiers[5:20].tolist()) <= {Tier.DRAM, Tier.REMOTE}
    assert found.tiers[20] == Tier.NONE
    assert found.milliseconds[20] == np.inf
    assert (np.diff(found.milliseconds[:20]) >= 0).all(), "each and all before it"
    assert 0 < found.milliseconds[0] < 1000
    assert len(store.costs([]).tiers) == 0


def test_batches_are_answered_block_by_block(store: BlockStore, client: Client, rng: random.Random) -> None:
    count = 100  # more than the ring has entries
    keys = [f"key-{number}" for number in range(count)]
    blocks = [rng.randbytes(rng.randrange(200_000)) for _ in keys]
    pool = client.iov(count * 200_000).array.reshape(count, -1)
    pool[::2, :100] = 7
    buffers = [pool[n, :100] if n % 2 == 0 else blocks[n] for n in range(count)]
    assert store.put_many(keys, buffers).all()
    for number in range(0, count, 2):
        blocks[number] = bytes([7]) * 100
    assert store.delete_many([keys[5], "absent", keys[6]]).tolist() == [True, False, True]
    there = [number not in (5, 6) for number in range(count)]
    assert store.exists(keys).tolist() == there
    views = store.get_many([*keys, keys[0]])
    assert [view and bytes(view) for view in views] == [
        *(block if found else None for block, found in zip(blocks, there, strict=True)),
        blocks[0],
    ]
    pool[:] = 0
    targets = [pool[n] if n % 3 else np.zeros(200_000, np.uint8) for n in range(count)]
    sizes = store.get_many_into(keys, targets)
    assert sizes.tolist() == [len(block) if found else -1 for block, found in zip(blocks, there, strict=True)]
    for target, size, block in zip(targets, sizes.tolist(), blocks, strict=True):
        assert size < 0 or target[:size].tobytes() == block
    assert store.prefetch([keys[0], "absent"]).tolist() == [True, False]
    assert store.put_many([], []).tolist() == store.get_many([]) == store.exists([]).tolist() == []
    assert store.longest_prefix([]) == 0


def test_thousands_of_keys_are_one_call(store: BlockStore) -> None:
    keys = [b"%05d" % number + b"k" * 250 for number in range(9000)]
    store.put_many(keys[:50], [b"x"] * 50)
    assert store.exists(keys).tolist() == [True] * 50 + [False] * 8950
    assert store.longest_prefix(keys) == 50
    assert store.longest_prefix([keys[0]] * 9000) == 9000
    assert store.delete_many(keys).sum() == 50


def test_a_block_is_a_file_and_a_file_is_a_block(store: BlockStore) -> None:
    folder = Path(store.namespace.path)
    for key in [*ODD_KEYS, b"plain"]:
        store.put(key, b"block " + key)
    assert {os.fsencode(path.name) for path in folder.iterdir()} == {file_name(key) for key in [*ODD_KEYS, b"plain"]}
    assert (folder / "plain").read_bytes() == b"block plain"
    (folder / "plain").write_bytes(b"from a file")
    assert bytes(store.get("plain") or b"") == b"from a file"
    (folder / "%2f").write_bytes(b"slash")
    assert bytes(store.get(b"/") or b"") == b"slash"
    store.put("plain", b"again")
    assert (folder / "plain").read_bytes() == b"again"
    assert store.delete("plain")
    assert not (folder / "plain").exists()
    (folder / "plain").write_bytes(b"x")
    assert store.exists(["plain"]).all()
    (folder / "plain").unlink()
    assert not store.exists(["plain"]).any()


def test_a_view_stays_what_it_was(store: BlockStore, rng: random.Random) -> None:
    old = rng.randbytes(500_000)
    store.put("key", old)
    view = store.get("key")
    assert view is not None
    part = view[1000:2000]
    array = np.frombuffer(view, np.uint8)
    for _ in range(5):
        store.put("key", rng.randbytes(500_000))
    store.delete("key")
    for number in range(50):
        store.put(f"other-{number}", rng.randbytes(500_000))
    assert bytes(view) == array.tobytes() == old
    view.release()
    store.prefetch(["key"])
    for number in range(50):
        store.put(f"other-{number}", rng.randbytes(500_000))
    assert array.tobytes() == old, "an array over the view holds it"
    assert bytes(part) == old[1000:2000]


def test_a_view_for_a_with(store: BlockStore) -> None:
    """A miss is None in it, whatever `get` says; and an array over the bytes is no error at the end."""
    store.put("key", b"x" * 5000)
    with store.view("key") as view:
        assert view == b"x" * 5000
    with pytest.raises(ValueError, match="released"):
        bytes(view)
    with store.view("absent") as view:
        assert view is None
    with store.view("key") as view:
        array = np.frombuffer(view, np.uint8)
    assert bytes(array) == b"x" * 5000
    with pytest.raises(RuntimeError, match="of the caller"), store.view("key") as view:
        raise RuntimeError("of the caller")
    with pytest.raises(ValueError, match="released"):
        bytes(view)


def test_pins_go_back_when_views_die(store: BlockStore, client: Client) -> None:
    store.put("key", b"x" * 100_000)
    views = [store.get("key") for _ in range(10)]
    assert len(client.session._views) == 10, "blocks just put are not in shared memory"
    half = views[:5]
    views.clear()
    gc.collect()
    assert len(client.session._views) == len(half)
    assert len(client.session.unpins) == 5
    assert not store.prefetch(["absent"]).any()
    assert not client.session.unpins
    del half


def test_pins_go_back_where_every_submit_fills_the_ring(client: Client, shared_mount: KvfuseMount) -> None:
    entries = 32
    with client.ring(entries) as ring, client.iov(4096) as iov:
        namespace = client.namespace(shared_mount.point / "full-ring")
        ring.prep_put(iov, 0, namespace, b"key", 4096)
        ring.submit()
        ring.wait(1, 10)
        for _ in range(20):
            for _ in range(entries):
                ring.prep_get(None, 0, namespace, b"key", 0, view=True)
            ring.submit()
            for completion in ring.wait(entries, 10):
                ring.view(completion).release()
        assert len(client.session.unpins) < 2 * entries, "of 640 pins"


def test_views_outlive_the_client(shared_mount: KvfuseMount) -> None:
    client = connect(shared_mount.point)
    with BlockStore(client, "outlive") as store:
        store.put("key", b"y" * 100_000)
        view = store.get("key")
        assert view is not None
    socket = client.session._socket
    client.close()
    del client, store
    gc.collect()
    assert bytes(view) == b"y" * 100_000
    assert socket.fileno() >= 0, "the connection holds the pin"
    view.release()
    assert socket.fileno() < 0


def test_a_client_that_is_closed_maps_nothing_any_more(shared_mount: KvfuseMount) -> None:
    """Else it would have the memory of each mount that it was a client of."""

    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("/kvfuse-")

    gc.collect()
    before = mapped()
    make_relaxed(shared_mount.point / "closed")
    for _ in range(2):
        with connect(shared_mount.point) as client, BlockStore(client, "closed") as store:
            store.put("key", b"x" * 100_000)
            for _ in range(3):  # by the daemon, and by an index
                assert store.get_into("key", bytearray(100_000)) == 100_000
            assert mapped() > before
        del client, store
        gc.collect()
        assert mapped() == before


def test_what_is_wrong_with_a_call_is_raised(store: BlockStore) -> None:
    store.put("key", b"x" * 100)
    with pytest.raises(OSError, match=os.strerror(errno.EMSGSIZE)) as caught:
        store.get_into("key", bytearray(99))
    assert caught.value.errno == errno.EMSGSIZE
    with pytest.raises(ValueError, match="read-only"):
        store.get_into("key", bytes(100))
    for key in ("", "x" * 256, "ж" * 128):
        with pytest.raises(ValueError, match="1 to 255 bytes"):
            store.put(key, b"x")
        with pytest.raises(ValueError, match="1 to 255 bytes"):
            store.exists(["fine", key])
    with pytest.raises(ValueError, match="2 keys and 1 buffers"):
        store.put_many(["a", "b"], [b"x"])
    same = np.zeros(100, np.uint8)
    with store.client.wrap(store.client.iov(100).array) as iov, suppress(OSError):  # if the daemon is asked
        assert store.get_many_into(["absent", "absent"], [iov.array, iov.array]).tolist() == [-1, -1]
    assert store.get_many_into(["key", "key"], [same, same]).tolist() == [100, 100], "bounced buffers may be one"


def test_a_namespace_that_is_not_made(client: Client) -> None:
    with pytest.raises(FileNotFoundError):
        BlockStore(client, "never-made", create=False)


def settings_of(folder: Path) -> dict[str, str]:
    return dict(word.split("=") for word in os.getxattr(folder, SETTINGS).decode().split())


def test_a_folder_that_is_made_is_a_cache(client: Client, shared_mount: KvfuseMount) -> None:
    made, found = shared_mount.point / "models" / "made", shared_mount.point / "found"
    found.mkdir()
    for folder in (made, found):
        with BlockStore(client, folder) as store, BlockStore(client, folder) as other:
            store.put("key", b"x")
            assert other.get("key") == b"x"
    assert settings_of(made)["kind"] in ("blocks", "cache"), "the latter where hosts share the volume"
    with BlockStore(client, made / "rank" / "0"):
        for folder in (found, made.parent, made / "rank", made / "rank" / "0"):
            assert SETTINGS not in os.listxattr(folder), "it was there, or is above or in a cache"


def test_a_store_of_its_own_connection(shared_mount: KvfuseMount) -> None:
    with BlockStore(shared_mount.point, "deep/er/still") as store:
        store.put("key", b"x")
    assert (shared_mount.point / "deep" / "er" / "still" / "key").read_bytes() == b"x"


def test_threads_share_a_store(store: BlockStore) -> None:
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            rng = random.Random(number)
            for turn in range(40):
                data = rng.randbytes(rng.randrange(50_000))
                store.put(f"{number}", data)
                view = store.get(f"{number}")
                assert view == data, f"turn {turn}"
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert 1 <= len(store.lanes.idle) <= 6


def test_past_its_deadline_a_get_is_a_miss(client: Client) -> None:
    with BlockStore(client, "deadline") as store, BlockStore(client, "deadline", deadline=1e-9) as hasty:
        store.put("key", b"x" * 1000)
        hasty.exists(["key"])
        assert hasty.get_many_into(["key"], [bytearray(1000)]).tolist() in ([-1], [1000])
        with pytest.raises(OSError, match=os.strerror(errno.ETIMEDOUT)):
            for number in range(1000):
                hasty.put(f"{number}", b"x" * 1000)


def test_past_its_deadline_a_delete_does_not_say_that_nothing_was_there(client: Client) -> None:
    """It may have happened, or happen later: as in a volume whose record store does not answer for a while."""
    keys = [f"{number}" for number in range(50)]
    late: list[str] = []
    with BlockStore(client, "late-delete") as store, BlockStore(client, "late-delete", deadline=1e-9) as hasty:
        assert store.put_many(keys, [b"x"] * len(keys)).all()
        for key in keys:
            try:
                assert hasty.delete(key), "it was there"
            except OSError as error:
                assert error.errno == errno.ETIMEDOUT
                late.append(key)
        assert late
        there = dict(zip(keys, store.exists(keys).tolist(), strict=True))
        assert not [key for key in keys if there[key] and key not in late]
        with pytest.raises(OSError, match=os.strerror(errno.ETIMEDOUT)):
            for _ in range(1000):
                hasty.delete_many(keys)


def test_a_daemon_that_says_nothing_is_no_hang_and_no_lost_connection(mount: KvfuseMount) -> None:
    """Little time is given to the silent daemon alone: what a store of many hosts takes is another matter."""
    make_relaxed(mount.point / "silent")
    (mount.point / "silent" / "link").symlink_to("nowhere")  # so the daemon is asked for absent keys
    with (
        connect(mount.point, deadline=2.0) as client,
        BlockStore(client, "silent") as store,
        BlockStore(client, "silent", deadline=0.1) as hasty,
    ):
        session = client.session
        store.put("key", b"x" * 1000)
        hasty.get_into("key", bytearray(1000))  # it has the block's arena
        hasty.get_into("absent", bytearray(1000))  # it has its ring, and memory, from here on
        with stopped(mount.pid):
            started = time.monotonic()
            assert hasty.get_into("key", bytearray(1000)) == 1000  # nobody is asked
            assert hasty.get_into("absent", bytearray(1000)) is None
            assert time.monotonic() - started < 5
            assert not hasty.is_silent
            assert hasty.get("key") is None
        wait_until(lambda: hasty.is_silent, "what came late")
        assert client.session is session
        assert not session.has_ended
        assert bytes(store.get("key") or b"") == b"x" * 1000


def test_a_store_works_again_after_the_daemon_came_back(mount: KvfuseMount) -> None:
    with connect(mount.point) as client, BlockStore(client, "again") as store:
        in_place = client.iov(1000).array
        in_place[:] = 5
        store.put("key", b"x" * 1000)
        view = store.get("key")
        mount.kill()
        for _ in range(2):
            with pytest.raises(Disconnected):
                store.get("key")
        mount.mount()
        client.reconnect()
        assert view == b"x" * 1000, "the memory of the daemon that died"
        store.put("key", in_place)
        assert store.get_into("key", bytearray(1000)) == 1000
        assert store.get("key") == in_place.tobytes()
        wait_until(lambda: not client.session.unpins or bool(store.exists(["key"]).all()), "pins of the new daemon")
