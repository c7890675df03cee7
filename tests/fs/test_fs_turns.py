"""Workers that read the kernel's requests take turns: one at a time, none forgotten, the others not starved."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyfuse3
import pytest
import trio
from mounting import temporary_mount

from kvfuse.fs import turns
from kvfuse.fs.turns import TurnLock, retry_reads
from kvfuse.fs.wakefulness import Wakefulness
from kvfuse.usrbio.client import BlockStore

pytestmark = pytest.mark.ring(1)

ASLEEP = Wakefulness(wanted=False)
WORKERS = 12
ROUNDS = 2_000

COUNTING = """
import os, sys
import pyfuse3, trio
from kvfuse_bench import barefs
from kvfuse.fs import turns
from kvfuse.fs.wakefulness import Wakefulness

taken = 0

class Counting(turns.TurnLock):
    async def __aenter__(self):
        global taken
        taken += 1
        await super().__aenter__()

turns.TurnLock = Counting
turns.take_turns(Wakefulness(wanted=False))
turns.take_turns(Wakefulness(wanted=False))
trio.run(barefs.serve, sys.argv[1])
print(taken)
"""
"""A file system of pyfuse3's that says in the end how often a worker wanted to read a request."""

KILLINGS = 150
KILLING = """
import os, random, signal, sys

folder, seed = sys.argv[1:]
rng = random.Random(seed)

def ask(name):
    try:
        os.stat(f"{folder}/{name}")
    except FileNotFoundError:
        pass

def begin(number):
    reader, writer = os.pipe()
    caller = os.fork()
    if caller == 0:
        for count in range(1 << 30):
            ask(f"{os.getpid()}.{count}")
            if count == 0:
                os.write(writer, b"x")
        os._exit(0)
    os.read(reader, 1)
    os.close(reader)
    os.close(writer)
    return caller

for line in sys.stdin:
    callers = [begin(number) for number in range(3)]
    for count in range(rng.randrange(50)):
        ask(f"{line.strip()}.{count}")
    for caller in callers:
        os.kill(caller, signal.SIGKILL)
    for caller in callers:
        os.waitpid(caller, 0)
    print("killed", flush=True)
"""
"""For each line of its input: processes ask for absent names of a folder, and are killed meanwhile."""


async def test_one_holds_it_and_all_get_it_in_the_end(rng: random.Random) -> None:
    """Among workers that come, wait inside, wait outside, and are cancelled, at moments drawn at random."""
    lock, held, done = TurnLock(), 0, 0

    async def pause() -> None:
        for _ in range(rng.choice([0, 0, 0, 1, 3])):
            await trio.lowlevel.checkpoint()

    async def worker(scope: trio.CancelScope) -> None:
        nonlocal held, done
        with scope:
            async with lock:
                assert held == 0
                held += 1
                try:
                    await pause()
                finally:
                    held -= 1
            await pause()
        done += 1

    with trio.fail_after(60):
        for _ in range(ROUNDS // WORKERS):
            scopes = [trio.CancelScope() for _ in range(WORKERS)]
            async with trio.open_nursery() as nursery:
                for scope in scopes:
                    nursery.start_soon(worker, scope)
                for scope in rng.sample(scopes, rng.randrange(WORKERS)):
                    await pause()
                    scope.cancel()
            async with lock:  # free, and nobody is left in the queue
                assert held == 0
    assert done == ROUNDS // WORKERS * WORKERS


async def test_who_does_not_wait_keeps_the_turn() -> None:
    lock, order = TurnLock(), []

    async def worker(name: str) -> None:
        for _ in range(3):
            async with lock:
                order.append(name)
        await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery, lock:
        nursery.start_soon(worker, "a")
        nursery.start_soon(worker, "b")
        await trio.testing.wait_all_tasks_blocked()
    assert order in (["a"] * 3 + ["b"] * 3, ["b"] * 3 + ["a"] * 3)


@pytest.fixture
def readable() -> Iterator[int]:
    """A descriptor with a byte to read."""
    reader, writer = os.pipe()
    os.write(writer, b"x")
    yield reader
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize("turn", [0.0, 3600.0])
async def test_the_other_tasks_have_their_turn(readable: int, monkeypatch: pytest.MonkeyPatch, turn: float) -> None:
    """However many requests are there: at once where the turn is over, not before where it is not."""
    monkeypatch.setattr(turns, "TURN_SECONDS", turn)
    others = 0

    async def other() -> None:
        nonlocal others
        while True:
            others += 1
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(other)
        requests = turns.Requests(ASLEEP)
        await requests.wait_for_request(readable)
        before = others
        for _ in range(100):
            await requests.wait_for_request(readable)
        assert (others - before >= 99) if turn == 0 else (others == before)
        nursery.cancel_scope.cancel()


async def test_another_mount_has_requests_of_its_own(readable: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its descriptor may have the number of one that is closed; it must not block either."""

    async def loop() -> None: ...

    names = vars(pyfuse3)
    monkeypatch.setitem(names, "trio", trio)
    monkeypatch.setitem(names, "_session_loop", loop)
    for _ in range(2):
        os.set_blocking(readable, True)
        turns.take_turns(ASLEEP)
        await names["trio"].lowlevel.wait_readable(readable)
        assert not os.get_blocking(readable)
    assert names["_session_loop"].__wrapped__ is loop


async def test_without_a_request_it_waits() -> None:
    reader, writer = os.pipe()
    requests = turns.Requests(ASLEEP)
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(requests.wait_for_request, reader)
            await trio.testing.wait_all_tasks_blocked()
            os.write(writer, b"x")
        await requests.wait_for_request(reader)  # it is still there
    os.close(reader)
    os.close(writer)


async def test_a_request_that_went_meanwhile_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others' turn comes between the look and the read."""
    reader, writer = os.pipe()
    requests, is_told, turn = turns.Requests(ASLEEP), False, trio.lowlevel.checkpoint

    async def take_it_away() -> None:
        assert os.read(reader, 2) == b"x"
        await turn()

    async def wait() -> None:
        nonlocal is_told
        await requests.wait_for_request(reader)
        is_told = True

    monkeypatch.setattr(turns, "TURN_SECONDS", 0.0)
    monkeypatch.setattr(trio.lowlevel, "checkpoint", take_it_away)
    os.write(writer, b"x")
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await trio.testing.wait_all_tasks_blocked()
            assert not is_told, "there is nothing to read"
            with pytest.raises(BlockingIOError):
                os.read(reader, 1)
            os.write(writer, b"y")
    assert os.read(reader, 2) == b"y"
    os.close(reader)
    os.close(writer)


async def test_a_loop_that_found_nothing_to_read_begins_again() -> None:
    outcomes: list[OSError | None] = [
        BlockingIOError(errno.EAGAIN, "fuse_session_receive_buf failed with Resource temporarily unavailable"),
        None,
        BlockingIOError(errno.EAGAIN, "an operation's own"),
        OSError(errno.EIO, "fuse_session_receive_buf failed with Input/output error"),
    ]

    @retry_reads
    async def loop(*arguments: object) -> None:
        assert arguments == ("nursery", 1, 2)
        if error := outcomes.pop(0):
            raise error

    await loop("nursery", 1, 2)
    for message in ("own", "Input/output"):
        with pytest.raises(OSError, match=message):
            await loop("nursery", 1, 2)
    assert outcomes == []


@pytest.mark.root
def test_callers_that_are_killed_stop_nobody(seed: int) -> None:
    """Their requests may go before they are read. Rings ask the kernel for nothing that would wake the daemon."""
    with temporary_mount(["volume.capacity=64MiB"]) as mount, BlockStore(mount.point, "blocks", deadline=20.0) as store:
        store.put(b"a", b"1")
        command = [sys.executable, "-c", KILLING, mount.point, str(seed)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as killing:
            assert killing.stdin is not None
            assert killing.stdout is not None
            for number in range(KILLINGS):
                print(number, file=killing.stdin, flush=True)
                assert killing.stdout.readline() == "killed\n"
                assert store.exists([b"a"]).tolist() == [True]
            killing.stdin.close()


def test_pyfuse3_takes_turns(tmp_path: Path) -> None:
    """The installed pyfuse3 looks it up where `take_turns` puts it."""
    server = subprocess.Popen([sys.executable, "-c", COUNTING, tmp_path], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        assert server.stdout.readline() == "ready\n"
        for index in range(50):
            (tmp_path / str(index)).write_bytes(b"x")
        assert len(os.listdir(tmp_path)) == 50
    finally:
        server.terminate()
        said = server.stdout.read()
        server.stdout.close()
        assert server.wait(60) == 0
    assert int(said) > 200, "a create, a write, a flush and a release for each of 50 files"
