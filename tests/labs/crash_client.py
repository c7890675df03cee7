"""What the clients of ``test_crash`` do, each kind in a process of its own, until the mount dies.

Every byte they write is a function of its file's name, its place and a version, so that a reader knows
what it may be. The log says ``do`` before a call and ``done`` after it returned; ``durable`` that it was fsynced.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

PAGE = 16 << 10
PAGES = 96
LARGE_PIECE = 1 << 20


def stream(seed: str, length: int) -> bytes:
    """``length`` bytes that are a function of ``seed``."""
    word = blake2b(seed.encode(), digest_size=64).digest()
    return (word * (length // 64 + 1))[:length]


def block(name: str, version: int, size: int) -> bytes:
    """A whole block: it says what it is, and is nothing else."""
    head = json.dumps([name, version, size]).encode().ljust(128)
    return head + stream(f"{name}/{version}", size)


def page(number: int, version: int) -> bytes:
    """One page of the file that changes in place. Version 0: zeros."""
    return stream(f"page {number}/{version}", PAGE) if version else bytes(PAGE)


class Work:
    """A folder, a seed, and a log."""

    def __init__(self, folder: Path, seed: int, log: Path) -> None:
        self.folder = folder
        self.rng = random.Random(seed)
        self.log = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def say(self, **event: object) -> None:
        os.write(self.log, json.dumps(event).encode() + b"\n")

    def sync_folder(self) -> None:
        descriptor = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def publish(work: Work) -> None:
    """Blocks: temporary name, write, perhaps fsync, rename over what was there; some are removed or linked."""
    version = 0
    while True:
        version += 1
        name = f"b{work.rng.randrange(30)}"
        path = work.folder / name
        if work.rng.random() < 0.15 and path.exists():
            work.say(do="remove", name=name, version=version)
            path.unlink()
            work.say(done="remove", name=name, version=version)
            continue
        size = int(700_000 ** work.rng.random())
        data = memoryview(block(name, version, size))
        temporary = work.folder / f"tmp.{version}"
        descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        step = work.rng.choice([len(data), 65536, 10_000])
        for start in range(0, len(data), step):
            os.write(descriptor, data[start : start + step])
        if work.rng.random() < 0.2:
            os.fsync(descriptor)
        early = work.rng.random() < 0.3
        if not early:
            os.close(descriptor)
        work.say(do="publish", name=name, version=version)
        os.rename(temporary, path)
        durable = work.rng.random() < 0.2
        if durable and early:
            os.fsync(descriptor)
        elif durable:
            work.sync_folder()
        work.say(done="publish", name=name, version=version, durable=durable)
        if early:
            os.close(descriptor)
        if work.rng.random() < 0.1:
            other = work.folder / f"link.{version}"
            os.link(path, other)
            os.rename(other, work.folder / f"linked.{name}")


def append(work: Work) -> None:
    """Appends with fsync."""
    descriptor = os.open(work.folder / "log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    size = 0
    whole = stream("log", 64 << 20)
    while size < 60 << 20:
        count = int(200_000 ** work.rng.random())
        work.say(do="append", size=size + count)
        size += os.write(descriptor, whole[size : size + count])  # less, where the mount goes away in the middle
        durable = work.rng.random() < 0.3
        if durable:
            os.fsync(descriptor)
        work.say(done="append", size=size, durable=durable)


def overwrite(work: Work) -> None:
    """Pages of one file, in place, with fsync."""
    descriptor = os.open(work.folder / "pages", os.O_CREAT | os.O_RDWR)
    work.say(do="make")
    os.write(descriptor, bytes(PAGE * PAGES))
    os.fsync(descriptor)
    work.sync_folder()
    work.say(done="make")
    version = 0
    while True:
        version += 1
        number = work.rng.randrange(PAGES)
        work.say(do="page", number=number, version=version)
        os.pwrite(descriptor, page(number, version), number * PAGE)
        work.say(done="page", number=number, version=version)
        if work.rng.random() < 0.3:
            os.fsync(descriptor)
            work.say(done="sync", version=version)
        if work.rng.random() < 0.1:  # sealed at the close, unsealed by the next write
            os.close(descriptor)
            descriptor = os.open(work.folder / "pages", os.O_RDWR)


def large(work: Work) -> None:
    """Large files in sequence; the one before the last is removed."""
    number = 0
    while True:
        number += 1
        name = f"large.{number}"
        pieces = work.rng.randrange(2, 24)
        descriptor = os.open(work.folder / name, os.O_CREAT | os.O_WRONLY)
        work.say(do="large", name=name, pieces=pieces)
        for piece in range(pieces):
            os.write(descriptor, stream(f"{name}/{piece}", LARGE_PIECE))
        durable = work.rng.random() < 0.3
        if durable:
            os.fsync(descriptor)
        os.close(descriptor)
        work.say(done="large", name=name, pieces=pieces, durable=durable)
        if number > 2:
            old = f"large.{number - 2}"
            work.say(do="drop", name=old)
            os.unlink(work.folder / old)
            work.say(done="drop", name=old)


def names(work: Work) -> None:
    """Folders that come and go, files unlinked while open, moves out of dying folders, attributes."""
    number = 0
    while True:
        number += 1
        folder = work.folder / f"d{number % 7}"
        if folder.exists():
            work.say(do="rmdir", name=folder.name)
            for name in os.listdir(folder):
                (folder / name).unlink()
            folder.rmdir()
        work.say(do="mkdir", name=folder.name)
        folder.mkdir()
        if work.rng.random() < 0.3:
            work.sync_folder()
            work.say(done="mkdir", name=folder.name, durable=True)
        descriptor = os.open(folder / "open", os.O_CREAT | os.O_RDWR)
        os.write(descriptor, b"x" * 50_000)
        if work.rng.random() < 0.5:
            os.fsync(descriptor)
        os.setxattr(folder / "open", b"user.a", b"1" * 100)
        if work.rng.random() < 0.3:
            os.rename(folder / "open", work.folder / "moved")
        else:
            os.unlink(folder / "open")
        os.pwrite(descriptor, b"y" * 300_000, 25_000)
        (folder / "file").write_bytes(b"z" * int(100_000 ** work.rng.random()))
        os.link(folder / "file", folder / "second")
        os.close(descriptor)


KINDS: dict[str, Callable[[Work], None]] = {
    "publish": publish,
    "append": append,
    "overwrite": overwrite,
    "large": large,
    "names": names,
}


def main() -> None:
    kind, folder, seed, log = sys.argv[1:]
    work = Work(Path(folder), int(seed), Path(log))
    try:
        KINDS[kind](work)
    except OSError as error:
        work.say(ended=str(error), errno=error.errno)


if __name__ == "__main__":
    main()
