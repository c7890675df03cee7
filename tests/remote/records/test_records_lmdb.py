"""What only the LMDB engine promises: other processes, kill -9, full disks, bounded memory, a loop that goes on."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import lmdb
import pytest
import trio

import kvfuse
from kvfuse.errors import Corrupt, EngineError, EngineFull, ReadOnly
from kvfuse.remote import mapguard
from kvfuse.remote.records.backlog import BACKLOG_MAX
from kvfuse.remote.records.lmdb.store import LmdbRecords

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(next(iter(kvfuse.__path__))).parent)}

READER = """
import sys, trio
from kvfuse.remote.records.lmdb.store import LmdbRecords
async def main():
    store = LmdbRecords.open(sys.argv[1], read_only=True)
    for line in sys.stdin:
        rows = await store.scan(line.strip().encode())
        print(*sorted({row.value.decode() for row in rows}), len(rows), flush=True)
trio.run(main)
"""

WRITER = """
import sys, trio
from kvfuse.remote.records.lmdb.store import LmdbRecords
async def main():
    store = LmdbRecords.open(sys.argv[1])
    (row,) = await store.get([b"round"])
    number = int(row.value) if row else 0
    while True:
        number += 1
        value = b"%d" % number
        await store.commit({b"round": value, **{b"k%03d" % i: value for i in range(100)}}, durable=number % 3 == 0)
        print(number, flush=True)
trio.run(main)
"""


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[LmdbRecords]:
    store = LmdbRecords.open(tmp_path / "records")
    yield store
    await store.aclose()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 4 MiB."""
    point = tmp_path / "small"
    point.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", point], check=True)
    yield point
    subprocess.run(["umount", "--lazy", point], check=True)  # a failed test may hold it


def python(code: str, path: Path) -> subprocess.Popen[str]:
    """Another process that runs ``code`` on the store at ``path``."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", code, str(path)]
    return subprocess.Popen(command, env=ENVIRONMENT, stdin=pipe, stdout=pipe, text=True, bufsize=1)


async def content(store: LmdbRecords) -> dict[bytes, bytes]:
    return {key: value for key, value, _ in await store.scan(b"", limit=1_000_000)}


# -- other processes ----------------------------------------------------------------------------------


async def test_another_process_reads_while_this_one_commits(store: LmdbRecords, tmp_path: Path) -> None:
    await store.commit({b"k%d" % i: b"0" for i in range(500)})
    with python(READER, tmp_path / "records") as reader:
        assert reader.stdin is not None
        assert reader.stdout is not None
        for number in range(20):
            await store.commit({b"k%d" % i: b"%d" % number for i in range(500)})
            print("k", file=reader.stdin)
            answer = await trio.to_thread.run_sync(reader.stdout.readline)
            assert answer.split() == [str(number), "500"]
        reader.stdin.close()
    assert reader.returncode == 0


async def test_a_killed_writer_leaves_whole_batches_and_all_it_was_told_of(tmp_path: Path, rng: random.Random) -> None:
    last_known = 0
    for _ in range(5):
        with python(WRITER, tmp_path / "records") as writer:
            assert writer.stdout is not None
            for _ in range(rng.randint(1, 60)):
                last_known = int(await trio.to_thread.run_sync(writer.stdout.readline))
            writer.send_signal(signal.SIGKILL)
            rest = writer.stdout.read().splitlines(keepends=True)
        last_known = max([last_known, *(int(line) for line in rest if line.endswith("\n"))])
        store = LmdbRecords.open(tmp_path / "records")
        found = await content(store)
        assert len(found) == 101
        assert len(set(found.values())) == 1, "a torn batch"
        assert last_known <= int(found[b"round"]) <= last_known + 1
        await store.aclose()


# -- opening ------------------------------------------------------------------------------------------


async def test_a_read_only_store_reads_and_refuses_commits(store: LmdbRecords, tmp_path: Path) -> None:
    await store.commit({b"a": b"1"})
    await store.aclose()
    reader = LmdbRecords.open(tmp_path / "records", read_only=True)
    assert await content(reader) == {b"a": b"1"}
    with pytest.raises(ReadOnly):
        await reader.commit({b"a": b"2"})
    await reader.aclose()


def test_reading_what_is_not_there_is_an_error_and_makes_nothing(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="absent"):
        LmdbRecords.open(tmp_path / "absent", read_only=True)
    assert not (tmp_path / "absent").exists()


def test_a_damaged_store_is_corrupt(tmp_path: Path) -> None:
    (tmp_path / "data.mdb").write_bytes(b"not an environment" * 1000)
    with pytest.raises(Corrupt, match=str(tmp_path)):
        LmdbRecords.open(tmp_path)


def test_less_address_space_makes_a_smaller_map(tmp_path: Path) -> None:
    code = "import sys; from kvfuse.remote.records.lmdb.store import LmdbRecords; LmdbRecords.open(sys.argv[1])"
    limit = 16 << 30
    subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env=ENVIRONMENT,
        check=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )


# -- full ---------------------------------------------------------------------------------------------


async def fill(store: LmdbRecords) -> dict[bytes, bytes]:
    """Commit until EngineFull; return what is then expected."""
    model: dict[bytes, bytes] = {}
    for number in range(1000):
        batch = {b"%d-%d" % (number, i): bytes(1000) for i in range(50)}
        try:
            await store.commit(batch, durable=True)
        except EngineFull:
            return model
        model |= batch
    raise AssertionError("never full")


async def check_full_store(store: LmdbRecords, model: dict[bytes, bytes]) -> None:
    """Nothing of the failed commit is there, and a store with room again goes on."""
    assert await content(store) == model
    victims = list(model)[: len(model) // 2]
    assert await store.commit({}, victims, durable=True)
    assert await store.commit({b"new": b"1"}, durable=True)
    for victim in victims:
        del model[victim]
    assert await content(store) == model | {b"new": b"1"}


async def test_a_full_map_does_nothing(tmp_path: Path) -> None:
    store = LmdbRecords.open(tmp_path / "records", map_size=4 << 20)
    await check_full_store(store, await fill(store))
    await store.aclose()


@pytest.mark.root
async def test_a_full_disk_does_nothing(small_disk: Path) -> None:
    store = LmdbRecords.open(small_disk / "records")
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(1 << 20))
    model = await fill(store)
    assert await content(store) == model
    ballast.unlink()
    await check_full_store(store, model)
    await store.aclose()
    store = LmdbRecords.open(small_disk / "records")
    assert (await content(store))[b"new"] == b"1"
    await store.aclose()


# -- the daemon's memory and its loop -----------------------------------------------------------------


def resident_file_bytes() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssFile"].split()[0]) << 10


async def test_many_records_do_not_inflate_the_process(store: LmdbRecords, rng: random.Random) -> None:
    """250 MB of records, written, scanned and read at random, keep below 100 MiB resident - and stay right."""
    floor = resident_file_bytes()
    highest = 0
    keys = [b"%06d" % i for i in range(120_000)]
    for start in range(0, len(keys), 4000):
        await store.commit({key: key * 300 for key in keys[start : start + 4000]})
        highest = max(highest, resident_file_bytes() - floor)
    after = b""
    while rows := await store.scan(b"", after):
        after = rows[-1].key
        assert all(value == key * 300 for key, value, _ in rows)
        highest = max(highest, resident_file_bytes() - floor)
    for _ in range(100):
        chosen = rng.choices(keys, k=100)
        assert [row and row.value for row in await store.get(chosen)] == [key * 300 for key in chosen]
        highest = max(highest, resident_file_bytes() - floor)
    assert highest < 100 << 20


async def test_reads_go_on_being_right_while_pages_are_dropped(store: LmdbRecords, rng: random.Random) -> None:
    keys = [b"%04d" % i for i in range(3000)]
    done = trio.Event()
    await store.commit(dict.fromkeys(keys, b"0" * 500))

    def drop() -> None:
        while not done.is_set():
            store._mapped.drop()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.to_thread.run_sync, drop)
        for number in range(1, 30):
            value = b"%d" % number * 250
            await store.commit(dict.fromkeys(keys, value))
            assert {row.value for row in await store.get(keys) if row} == {value}
        done.set()


async def test_other_tasks_run_between_the_chunks_of_a_large_commit(store: LmdbRecords) -> None:
    turns = 0
    done = trio.Event()

    async def other() -> None:
        nonlocal turns
        while not done.is_set():
            turns += 1
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(other)
        await store.commit({b"%d" % i: b"" for i in range(10_000)})
        done.set()
    assert turns >= 10_000 // 512


async def test_a_watch_that_falls_behind_says_so(store: LmdbRecords) -> None:
    watch = store.watch(b"")
    size = store.limits.commit_operations_max
    for number in range(BACKLOG_MAX // size + 1):
        await store.commit({b"%d" % i: b"%d" % number for i in range(size)})
    with pytest.raises(EngineError, match="behind"):
        await anext(watch)
    fresh = store.watch(b"")
    await store.commit({b"k": b"v"})
    assert (await anext(fresh)).key == b"k"


async def test_a_commit_of_a_wrong_type_leaves_the_store_usable(store: LmdbRecords) -> None:
    text: Any = "text"
    with pytest.raises(TypeError):
        await store.commit({b"a": b"1", b"b": text})
    assert await content(store) == {}
    assert await store.commit({b"a": b"1"})


async def test_records_under_a_lease_that_was_not_given_back_are_found_again(tmp_path: Path) -> None:
    store = LmdbRecords.open(tmp_path / "records")
    await store.commit({b"a": b"1"}, lease=await store.lease(1))
    await store.aclose()
    store = LmdbRecords.open(tmp_path / "records")
    assert await content(store) == {b"a": b"1"}
    await store.aclose()


async def test_no_lease_without_time(store: LmdbRecords) -> None:
    with pytest.raises(ValueError):
        await store.lease(0)


# -- a file that is not whole ---------------------------------------------------------------------------


def wanted_size(path: Path) -> int:
    """Bytes that the header names."""
    with lmdb.open(str(path), readonly=True) as environment:
        return int(environment.info()["last_pgno"] + 1) * environment.stat()["psize"]


async def test_a_file_whose_last_pages_are_free_and_were_never_written_is_whole(
    tmp_path: Path, rng: random.Random
) -> None:
    data = tmp_path / "data.mdb"
    found = 0
    for _ in range(300):
        store = LmdbRecords.open(tmp_path)
        keys = [b"k%06d" % rng.randrange(3000) for _ in range(rng.choice([5, 50, 500]))]
        await store.commit({key: rng.randbytes(rng.choice([10, 300, 1500, 9000])) for key in keys})
        # pages that a transaction takes at the end of the file and gives back are not written
        await store.commit({b"big": rng.randbytes(60_000)}, keys)
        await store.commit({}, [b"big"])
        await store.aclose()
        found += data.stat().st_size < wanted_size(tmp_path)
        if found == 3:
            break
    assert found == 3


async def test_a_file_that_was_cut_is_refused(tmp_path: Path, rng: random.Random) -> None:
    store = LmdbRecords.open(tmp_path)
    for _ in range(10):
        await store.commit({b"k%06d" % rng.randrange(3000): rng.randbytes(500) for _ in range(300)})
    await store.aclose()
    data = tmp_path / "data.mdb"
    size, wanted = data.stat().st_size, wanted_size(tmp_path)
    for left in (size // 2, 8192, 4096 + 10, 100, 10):
        os.truncate(data, left)
        with pytest.raises(
            EngineError, match=rf"data\.mdb has {left} bytes of the \d+ that its header names"
        ) as caught:
            LmdbRecords.open(tmp_path, read_only=True)
        if left >= 8192:
            assert f" {wanted} " in str(caught.value)
    data.write_bytes(b"x" * size)
    with pytest.raises(Corrupt, match=r"data\.mdb"):
        LmdbRecords.open(tmp_path)


async def test_a_closed_store_takes_no_faults_of_what_is_mapped_in_its_place(tmp_path: Path) -> None:
    store = LmdbRecords.open(tmp_path)
    address = store._mapped.address
    await store.aclose()
    assert not any(guarded.holds(address) for made in mapguard._guarded.values() if (guarded := made()))
