"""How many of our functions a block calls on its way. ``scripts/trace-store`` prints the table.

Calls of functions, methods and lambdas of this package are counted, at the volume's contract and below it: a coroutine
that goes on is no new call, nor is a comprehension. Engines (``remote/``) are not counted.
"""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import kvfuse
from kvfuse.errors import NotFound
from kvfuse.options.options import CacheOptions, MountOptions, Options, PublishOptions, VolumeOptions
from kvfuse.volume.api import ROOT_INODE, Caller
from kvfuse.volume.opening.format import format_volume
from kvfuse.volume.volume import Volume, open_volume

SIZE = 64 << 10
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
        await volume.lookup(ROOT_INODE, temporary)
    handle, made = await volume.create(ROOT_INODE, temporary, 0o644, CALLER, os.O_WRONLY)
    await volume.write(handle, 0, block, by_kernel=True)
    await volume.release(handle)
    with suppress(NotFound):
        await volume.lookup(ROOT_INODE, name)
    await volume.rename(ROOT_INODE, temporary, ROOT_INODE, name, 0)
    await volume.journal.commit()
    volume.forget(made.ino, 1)


async def read(volume: Volume, name: bytes) -> None:
    """As an engine loads a block through files."""
    found = await volume.lookup(ROOT_INODE, name)
    handle = await volume.open(found.ino, os.O_RDONLY, CALLER)
    await volume.read(handle, 0, SIZE)
    await volume.release(handle)
    volume.forget(found.ino, 1)


async def shortest(work: Callable[[int], Awaitable[None]]) -> Trip:
    """Of some rounds: timers of the volume may run beside one."""
    trips = []
    for number in range(ROUNDS):
        with traced() as calls:
            await work(number)
        trips.append(Trip.of(calls))
    return min(trips)


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
            return {
                "store": await shortest(lambda number: store(volume, b"block-%d" % number, block)),
                "open, read, close": await shortest(lambda number: read(volume, b"first")),
            }


def table(found: dict[str, Trip]) -> str:
    """For people."""
    rows = [f"{'trip of 64 KiB':20}" + "".join(f"{field:>12}" for field in Trip._fields)]
    rows += [f"{name:20}" + "".join(f"{value:12}" for value in trip) for name, trip in found.items()]
    return "\n".join(rows)
