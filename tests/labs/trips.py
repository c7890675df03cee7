"""How many of our functions a block calls on its way. ``scripts/trace-store`` prints the table.

Calls of functions, methods and lambdas of this package are counted, at the volume's contract and below it: a coroutine
that goes on is no new call, nor is a comprehension. Engines (``remote/``) are not counted.
"""

from __future__ import annotations

import itertools
import os
import random
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import inside
import trio.testing
from linked_volumes import linked_volumes
from ring_trips import RingClient, ring_client
from shared_lab import hosts, quiet
from soft_rdma import SoftNetwork
from volume_lab import Chaos

import kvfuse
from kvfuse.errors import NotFound
from kvfuse.options.options import CacheOptions, MountOptions, Options, PublishOptions, VolumeOptions
from kvfuse.usrbio.protocol.wire import Op
from kvfuse.volume.api import ROOT_INODE, Caller
from kvfuse.volume.opening.formatting import format_volume
from kvfuse.volume.running import open_volume
from kvfuse.volume.volume import Volume

SIZE = 64 << 10
EVICTED = 128
"""blocks that are evicted together"""
CALLER = Caller(0, 0)
PACKAGE = str(Path(kvfuse.__file__).parent) + "/"
COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
ROUNDS = 5


class Trip(NamedTuple):
    """What one block cost."""

    calls: int
    functions: int
    files: int
    changes: int
    """of the file, from one call to the next"""

    @classmethod
    def of(cls, calls: list[tuple[str, str]]) -> Trip:
        files = [file for file, _ in calls]
        changes = sum(before != after for before, after in itertools.pairwise(files))
        return cls(len(calls), len(set(calls)), len(set(files)), changes)


@contextmanager
def traced() -> Iterator[list[tuple[str, str]]]:
    """The calls of what runs meanwhile, in this thread and in those that begin: (file, function)."""
    calls: list[tuple[str, str]] = []
    frames: dict[int, FrameType] = {}

    def hook(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(PACKAGE) or code.co_qualname.endswith(COMPREHENSIONS):
            return
        file = code.co_filename.removeprefix(PACKAGE)
        if not file.startswith("remote/") and frames.get(id(frame)) is not frame:
            frames[id(frame)] = frame  # kept, so that no other one gets its number
            calls.append((file, code.co_qualname))

    threading.setprofile(hook)
    sys.setprofile(hook)
    try:
        yield calls
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


async def store(volume: Volume, name: bytes, block: bytes) -> None:
    """As an engine stores a block through files, and the commit that makes it durable."""
    temporary = name + b".part"
    with suppress(NotFound):
        await volume.tree.lookup(ROOT_INODE, temporary)
    handle, made = await volume.tree.create(ROOT_INODE, temporary, 0o644, CALLER, os.O_WRONLY)
    await volume.files.write(handle, 0, block, by_kernel=True)
    await volume.files.release(handle)
    with suppress(NotFound):
        await volume.tree.lookup(ROOT_INODE, name)
    await volume.tree.rename(ROOT_INODE, temporary, ROOT_INODE, name, 0)
    await inside.journal(volume).commit()
    volume.tree.forget(made.ino, 1)


async def read(volume: Volume, name: bytes) -> None:
    """As an engine loads a block through files."""
    found = await volume.tree.lookup(ROOT_INODE, name)
    handle = await volume.files.open(found.ino, os.O_RDONLY, CALLER)
    await volume.files.read(handle, 0, SIZE)
    await volume.files.release(handle)
    volume.tree.forget(found.ino, 1)


async def get_by_ring(client: RingClient) -> Trip:
    """What the ring's thread does to get a block that the connection knows: nobody else has to do anything."""
    client.submit(Op.GET, b"first", SIZE)
    with traced() as calls:
        client.thread.step()
    assert await client.result() == SIZE
    return Trip.of(calls)


async def put_by_ring(client: RingClient, volume: Volume, name: bytes) -> Trip:
    """What the event loop does of a put. The ring's thread has copied the block, and answers when all is done."""
    await trio.testing.wait_all_tasks_blocked()
    client.submit(Op.PUT, name, SIZE)
    client.thread.step()
    with traced() as calls:
        await trio.testing.wait_all_tasks_blocked()
    assert await client.result() == SIZE
    await inside.journal(volume).commit()
    return Trip.of(calls)


async def by_files(work: Awaitable[None]) -> Trip:
    """What all of it does."""
    with traced() as calls:
        await work
    return Trip.of(calls)


async def shortest(make: Callable[[int], Awaitable[Trip]]) -> Trip:
    """Of some rounds: timers of the volume may run beside one."""
    return min([await make(number) for number in range(ROUNDS)])


async def trips() -> dict[str, Trip]:
    """Of one 64 KiB block each way, in a relaxed folder of one host; others went before."""
    with tempfile.TemporaryDirectory(prefix="kvfuse-trips-") as folder:
        options = Options(
            volume=VolumeOptions(path=Path(folder) / "volume", capacity=256 << 20, segment_size=64 << 20),
            publish=PublishOptions(mode="relaxed", window=5.0),
            cache=CacheOptions(),
            mount=MountOptions(),
        )
        await format_volume(options)
        block = os.urandom(SIZE)
        async with open_volume(options) as volume:
            await store(volume, b"first", block)
            await read(volume, b"first")
            found = {
                "store": await shortest(lambda number: by_files(store(volume, b"block-%d" % number, block))),
                "open, read, close": await shortest(lambda number: by_files(read(volume, b"first"))),
            }
            async with ring_client(volume, SIZE) as client:
                client.submit(Op.GET, b"first", SIZE)
                assert await client.result() == SIZE
                found["ring GET"] = await shortest(lambda number: get_by_ring(client))
                found["ring PUT"] = await shortest(lambda number: put_by_ring(client, volume, b"put-%d" % number))
            return found


async def shared_trips() -> dict[str, Trip]:
    """Of two hosts, both sides together: engines answer at once, and time is the test's."""
    found = {}
    for mode in ("relaxed", "strict"):
        rng, chaos = random.Random(7), [Chaos(random.Random(number)) for number in range(2)]
        async with hosts(rng, 2, chaos, capacity=64 << 20, strict=mode == "strict") as volumes:

            async def one(number: int, volumes: list[Volume] = volumes) -> Trip:
                async def work() -> None:
                    await store(volumes[0], b"block-%d" % number, bytes(SIZE))
                    await quiet(*volumes)

                return await by_files(work())

            await one(-1)
            found[f"shared store, {mode}"] = await shortest(one)
    async with linked_volumes(random.Random(7), SoftNetwork()) as pair:

        async def peer_read(number: int) -> Trip:
            names = [b"block-%d" % number]
            await pair.put(names, SIZE, random.Random(number))
            with traced() as calls:
                assert await pair.bring(names) == [True]
            return Trip.of(calls)

        await peer_read(-1)
        found["read from a peer"] = await shortest(peer_read)
    return found


def table(found: dict[str, Trip]) -> str:
    """For people."""
    rows = [f"{'trip of 64 KiB':20}" + "".join(f"{field:>12}" for field in Trip._fields)]
    rows += [f"{name:20}" + "".join(f"{value:12}" for value in trip) for name, trip in found.items()]
    return "\n".join(rows)
