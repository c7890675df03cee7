"""Workers that read the kernel's requests take turns: one at a time, none forgotten, the others not starved."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from kvfuse.fs import turns
from kvfuse.fs.turns import TurnLock

WORKERS = 12
ROUNDS = 2_000

COUNTING = """
import os, sys
import pyfuse3, trio
from kvfuse.bench import barefs
from kvfuse.fs import turns

taken = 0

class Counting(turns.TurnLock):
    async def __aenter__(self):
        global taken
        taken += 1
        await super().__aenter__()

turns.TurnLock = Counting
turns.take_turns()
turns.take_turns()
trio.run(barefs.serve, sys.argv[1])
print(taken)
"""
"""A file system of pyfuse3's that says in the end how often a worker wanted to read a request."""


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
        requests = turns.Requests()
        await requests.wait(readable)
        before = others
        for _ in range(100):
            await requests.wait(readable)
        assert (others - before >= 99) if turn == 0 else (others == before)
        nursery.cancel_scope.cancel()


async def test_without_a_request_it_waits() -> None:
    reader, writer = os.pipe()
    requests = turns.Requests()
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(requests.wait, reader)
            await trio.testing.wait_all_tasks_blocked()
            os.write(writer, b"x")
        await requests.wait(reader)  # it is still there
    os.close(reader)
    os.close(writer)


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
