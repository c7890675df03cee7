"""A load on a mount whose content is checked, each kind in a process of its own: ``mixed_load.py KIND SEED FOLDER...``

A worker knows what every call that returned without an error did, and compares what it reads with that all the time,
and everything at the end, which is when its input is closed. Then it prints a `Report` as JSON. ``FOLDER...`` is one
folder, as one or more mounts have it.

What it expects is what a volume promises that publishes strictly: what returned is there. What was written but
neither fsynced nor closed may be lost, and then an fsync or close of the file says EIO once.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import random
import select
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

from crash_client import PAGE, block, page, stream

ERRORS_MAX = 10
"""after which a worker gives up"""
NAMES = 30
PAGES = 32
APPENDED_MAX = 4 << 20
"""after which the file is begun again"""

R = TypeVar("R")


class Report(NamedTuple):
    """What a worker tells at its end."""

    kind: str
    calls: int
    lost: int
    """times that a file said EIO as what was written to it, and not stored, is lost"""
    longest: float
    """seconds of the longest call"""
    errors: list[str]
    """none of which may be"""


class Wrong(Exception):
    """What is there is not what should be."""


class Work:
    """What all kinds of load share."""

    def __init__(self, kind: str, seed: int, folders: Sequence[Path]) -> None:
        self.kind = kind
        self.rng = random.Random(seed)
        self.folders = list(folders)
        self.calls = 0
        self.lost = 0
        self.longest = 0.0
        self.errors: list[str] = []

    @property
    def folder(self) -> Path:
        """As one of the mounts has it."""
        return self.rng.choice(self.folders)

    def call(self, function: Callable[..., R], *arguments: object, **words: object) -> R:
        began = time.monotonic()
        try:
            return function(*arguments, **words)
        finally:
            self.calls += 1
            self.longest = max(self.longest, time.monotonic() - began)

    def told_of_loss(self, function: Callable[..., object], *arguments: object) -> bool:
        """Whether a call says EIO for what is lost."""
        try:
            self.call(function, *arguments)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            self.lost += 1
            return True
        return False

    def run(self) -> Report:
        load = KINDS[self.kind](self)
        while len(self.errors) < ERRORS_MAX and not select.select([sys.stdin], [], [], 0)[0]:
            self._try(load.step)
        self._try(load.check)
        return Report(self.kind, self.calls, self.lost, self.longest, self.errors)

    def _try(self, function: Callable[[], None]) -> None:
        try:
            function()
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)
            lines = " < ".join(f"{frame.name}:{frame.lineno}" for frame in reversed(where[1:]))
            self.errors.append(f"{type(error).__name__}: {error} ({lines})")


def compare(what: object, found: object, expected: object) -> None:
    if found != expected:
        raise Wrong(f"{what}: {str(found)[:300]}, not {str(expected)[:300]}")


def mount_of(folder: Path) -> Path:
    return next(path for path in folder.parents if path.is_mount())


class Stores:
    """Blocks as engines store them: a temporary name, write, close, rename. Some are removed."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.content: dict[str, bytes] = {}
        self.version = 0

    def step(self) -> None:
        work, rng = self.work, self.work.rng
        name = f"b{rng.randrange(NAMES)}"
        chance = rng.random()
        if chance < 0.5:
            self.look(name)
        elif chance < 0.6 and name in self.content:
            work.call(os.unlink, work.folder / name)
            del self.content[name]
        else:
            self.store(name)

    def store(self, name: str) -> None:
        work, rng = self.work, self.work.rng
        self.version += 1
        data = block(name, self.version, int(700_000 ** rng.random()))
        temporary = work.folder / f"tmp.{self.version}"
        file = work.call(os.open, temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        is_lost = False
        step = rng.choice([len(data), 65536, 10_000])
        try:
            for start in range(0, len(data), step):
                is_lost |= work.told_of_loss(write_all, file, data[start : start + step])
            if rng.random() < 0.2:
                is_lost |= work.told_of_loss(os.fsync, file)
        finally:
            is_lost |= work.told_of_loss(os.close, file)
        if is_lost:
            with suppress(FileNotFoundError):  # in a folder of blocks the name is lost, too
                work.call(os.unlink, temporary)
            return
        work.call(os.rename, temporary, temporary.with_name(name))
        self.content[name] = data

    def look(self, name: str) -> None:
        path = self.work.folder / name
        try:
            found = self.work.call(path.read_bytes)
        except FileNotFoundError:
            found = None
        expected = self.content.get(name)
        if found != expected:
            compare(name, found and (len(found), found[:64]), expected and (len(expected), expected[:64]))
            raise Wrong(f"{name}: other bytes of the same length")

    def check(self) -> None:
        for number in range(NAMES):
            self.look(f"b{number}")
        for folder in self.work.folders:
            compare("names", {name for name in os.listdir(folder) if name[:4] != "tmp."}, set(self.content))


def write_all(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]


class Appends:
    """A file that stays open for appends, with an fsync now and then."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.whole = stream("log", APPENDED_MAX + (1 << 20))
        self.path = work.folders[0] / "log"
        self.begin()

    def begin(self) -> None:
        self.size = self.floor = 0
        self.file = self.work.call(os.open, self.path, os.O_CREAT | os.O_TRUNC | os.O_RDWR | os.O_APPEND)
        while self.work.told_of_loss(os.fsync, self.file):  # or what was cut off may be there again
            self.work.call(os.ftruncate, self.file, 0)

    def step(self) -> None:
        work, rng = self.work, self.work.rng
        if self.size > APPENDED_MAX:
            self.check()
            if self.work.told_of_loss(os.close, self.file):
                raise Wrong("an EIO for a file of which all was stored")
            self.begin()
        data = self.whole[self.size : self.size + int(200_000 ** rng.random())]
        if work.told_of_loss(write_all, self.file, data):
            self.after_loss(self.size + len(data))
            return
        self.size += len(data)
        if rng.random() < 0.3:
            if work.told_of_loss(os.fsync, self.file):
                self.after_loss(self.size)
            self.floor = self.size
        elif rng.random() < 0.2:
            self.look()

    def after_loss(self, most: int) -> None:
        """What was not stored may be there, or not; then all goes on from what was."""
        work = self.work
        size = work.call(os.fstat, self.file).st_size
        if not self.floor <= size <= most:
            raise Wrong(f"a log of {size} bytes, of which {self.floor} were stored and {most} written")
        data = work.call(os.pread, self.file, size, 0)
        compare("what was stored of the log", data[: self.floor] == self.whole[: self.floor], True)
        work.call(os.ftruncate, self.file, self.floor)
        while work.told_of_loss(os.fsync, self.file):  # of what was cut off; or the daemon was killed again
            work.call(os.ftruncate, self.file, self.floor)
        self.size = self.floor

    def look(self) -> None:
        """All that was written is seen, or the end of it was lost, which nobody has been told of yet."""
        size = self.work.call(os.fstat, self.file).st_size
        if not self.floor <= size <= self.size:
            raise Wrong(f"a log of {size} bytes, of which {self.floor} were stored and {self.size} written")
        data = self.work.call(os.pread, self.file, self.floor, 0)
        compare("what was stored of the log", data == self.whole[: self.floor], True)

    def check(self) -> None:
        if self.work.told_of_loss(os.fsync, self.file):
            self.after_loss(self.size)
        self.floor = self.size
        compare("size of the log", self.work.call(os.fstat, self.file).st_size, self.size)
        self.look()
        for folder in self.work.folders:
            compare("the log", self.work.call((folder / "log").read_bytes) == self.whole[: self.size], True)


class Pages:
    """Pages of one file that change in place: through memory of the process, or by writes."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.path = work.folders[0] / "pages"
        self.file = work.call(os.open, self.path, os.O_CREAT | os.O_RDWR)
        self.versions = [[0, 0] for _ in range(PAGES)]
        """of each page: which it may have"""
        self.version = 0
        self.sync(is_lost=True)
        self.memory = mmap.mmap(self.file, PAGE * PAGES)

    def step(self) -> None:
        work, rng = self.work, self.work.rng
        number = rng.randrange(PAGES)
        chance = rng.random()
        if chance < 0.5:
            self.version += 1
            self.versions[number].append(self.version)
            data, start = page(number, self.version), PAGE * number
            if rng.random() < 0.5:
                self.memory[start : start + PAGE] = data
            elif work.told_of_loss(os.pwrite, self.file, data, start):
                self.sync(is_lost=True)
        elif chance < 0.7:
            self.sync()
        else:
            self.look(number)

    def sync(self, *, is_lost: bool = False) -> None:
        """Where something is lost, each page is written again that may have been."""
        while is_lost or self.work.told_of_loss(os.fsync, self.file):
            is_lost = False
            for number, versions in enumerate(self.versions):
                if len(versions) > 1:
                    data = page(number, versions[-1])
                    is_lost |= self.work.told_of_loss(os.pwrite, self.file, data, PAGE * number)
        for versions in self.versions:
            del versions[:-1]

    def look(self, number: int) -> None:
        data = self.work.call(os.pread, self.file, PAGE, PAGE * number)
        versions = self.versions[number]
        fits = all(
            any(byte == page(number, version)[at] for version in versions)
            for at, byte in enumerate(data[:: PAGE // 64])
            for at in [at * (PAGE // 64)]
        )
        if len(versions) == 1:
            fits = data == page(number, versions[0])
        if len(data) != PAGE or not fits:
            raise Wrong(f"page {number} is of none of the versions {versions}: {data[:32]!r}")

    def check(self) -> None:
        self.sync()
        for number in range(PAGES):
            self.look(number)
        for folder in self.work.folders:
            data = self.work.call((folder / "pages").read_bytes)
            compare("pages", data == b"".join(page(n, v[0]) for n, v in enumerate(self.versions)), True)


class Names:
    """A tree of folders, files and links: made, renamed, walked, removed. All of it is compared with a plain model."""

    DEPTH_MAX, COUNT_MAX = 4, 120

    def __init__(self, work: Work) -> None:
        self.work = work
        self.tree: dict[str, str | None] = {"": None}
        """path -> None for a folder, or what it holds"""
        self.number = 0

    def folders(self) -> list[str]:
        return [path for path, content in self.tree.items() if content is None]

    def step(self) -> None:
        work, rng = self.work, self.work.rng
        self.number += 1
        chance = rng.random()
        root = work.folder
        parent = rng.choice([path for path in self.folders() if path.count("/") < self.DEPTH_MAX])
        path = f"{parent}/n{self.number}"
        others = [other for other in self.tree if other]
        if len(self.tree) > self.COUNT_MAX:
            chance = 0.99
        if chance < 0.2 or not others:
            work.call(os.mkdir, f"{root}{path}")
            self.tree[path] = None
        elif chance < 0.4:
            os.close(work.call(os.open, f"{root}{path}", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            self.tree[path] = "empty"
        elif chance < 0.5:
            work.call(os.symlink, f"to {self.number}", f"{root}{path}")
            self.tree[path] = f"link to {self.number}"
        elif chance < 0.75:
            self.rename(root, rng.choice(others), path)
        elif chance < 0.9:
            self.look(root)
        else:
            self.remove(root, rng.choice(others))

    def rename(self, root: Path, old: str, new: str) -> None:
        if new.startswith(f"{old}/"):
            return
        self.work.call(os.rename, f"{root}{old}", f"{root}{new}")
        self.tree = {
            (new + path[len(old) :] if path == old or path.startswith(f"{old}/") else path): content
            for path, content in self.tree.items()
        }

    def remove(self, root: Path, path: str) -> None:
        if self.tree[path] is not None:
            self.work.call(os.unlink, f"{root}{path}")
        elif any(other.startswith(f"{path}/") for other in self.tree):
            try:
                self.work.call(os.rmdir, f"{root}{path}")
            except OSError as error:
                if error.errno == errno.ENOTEMPTY:
                    return
                raise
            raise Wrong(f"{path}, which is not empty, was removed")
        else:
            self.work.call(os.rmdir, f"{root}{path}")
        del self.tree[path]

    def look(self, root: Path) -> None:
        found: dict[str, str | None] = {"": None}

        def walk(path: str) -> None:
            with os.scandir(f"{root}{path}") as entries:
                for entry in entries:
                    name = f"{path}/{entry.name}"
                    found[name] = "empty"
                    if entry.is_symlink():
                        found[name] = f"link {os.readlink(entry.path)}"
                    elif entry.is_dir(follow_symlinks=False):
                        found[name] = None
                        walk(name)

        self.work.call(walk, "")
        if found != self.tree:
            missing = sorted(set(self.tree) - set(found))[:5]
            more = sorted(set(found) - set(self.tree))[:5]
            raise Wrong(f"a tree of {len(found)} names: without {missing}, with {more}")

    def check(self) -> None:
        for folder in self.work.folders:
            self.look(folder)


class Rings:
    """Blocks by keys: put, got, looked at in place, removed."""

    SIZE_MAX = 300_000

    def __init__(self, work: Work) -> None:
        from kvfuse.usrbio.client import BlockStore

        self.work = work
        top = mount_of(work.folders[0])
        self.store = BlockStore(top, str(work.folders[0].relative_to(top)), deadline=120.0)
        self.content: dict[str, bytes] = {}
        self.held: list[tuple[str, memoryview, bytes]] = []
        self.version = 0

    def step(self) -> None:
        work, rng = self.work, self.work.rng
        name = f"k{rng.randrange(NAMES)}"
        key, chance = name.encode(), rng.random()
        if chance < 0.35:
            self.version += 1
            data = block(name, self.version, int(self.SIZE_MAX ** rng.random()))
            work.call(self.store.put, key, data)
            self.content[name] = data
        elif chance < 0.45:
            compare(f"{name} was there", work.call(self.store.delete, key), name in self.content)
            self.content.pop(name, None)
        elif chance < 0.6:
            names = [f"k{number}" for number in range(NAMES)]
            found = work.call(self.store.exists, [name.encode() for name in names])
            there = {name for name, is_there in zip(names, found, strict=True) if is_there}
            compare("keys", there, set(self.content))
        elif chance < 0.8:
            self.look(name)
        else:
            view = work.call(self.store.get, key)
            if view is None:
                compare(f"{name} is missing", name in self.content, False)
                return
            self.held.append((name, view, self.content.get(name, b"")))
            self.look_at_held()
            while len(self.held) > 8:
                del self.held[rng.randrange(len(self.held))]

    def look(self, name: str) -> None:
        buffer = bytearray(self.SIZE_MAX + 4096)
        size = self.work.call(self.store.get_into, name.encode(), buffer)
        expected = self.content.get(name)
        compare(f"size of {name}", size, None if expected is None else len(expected))
        if size is not None and expected is not None:
            compare(name, bytes(buffer[:size]) == expected, True)

    def look_at_held(self) -> None:
        """Bytes of a view do not change, whatever becomes of the block and the daemon."""
        for name, view, data in self.held:
            compare(f"the view of {name}", bytes(view) == data, True)

    def check(self) -> None:
        self.look_at_held()
        for number in range(NAMES):
            self.look(f"k{number}")
        self.held.clear()
        self.store.close()


class Clients:
    """Clients of rings that come and go: whatever they ask first, or last, a daemon may die over it."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.path = work.folders[0] / "file"
        self.version = 0
        while self.is_write_lost():
            pass

    def is_write_lost(self) -> bool:
        """In a folder of blocks what is written is lost with the daemon, until it is closed."""
        work = self.work
        file = work.call(os.open, self.path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        is_lost = work.told_of_loss(write_all, file, stream("file", 100_000))
        return work.told_of_loss(os.close, file) or is_lost

    def step(self) -> None:
        self.work.call(self.come_and_go)

    def come_and_go(self) -> None:
        from kvfuse.usrbio.client import BlockStore, connect

        work, top = self.work, mount_of(self.work.folders[0])
        name = str(work.folders[0].relative_to(top))
        self.version += 1
        data = block(name, self.version, int(100_000 ** work.rng.random()))
        with connect(top, deadline=120.0) as client:
            with BlockStore(client, f"{name}/blocks", deadline=120.0) as store:
                store.put(b"block", data)
                compare("the block", bytes(store.get(b"block") or b""), data)
            with client.iov(8192) as iov, client.ring(8) as ring:
                file = client.file(self.path)
                ring.prep_read(iov, 0, file, 5000, 8192)
                ring.submit()
                compare("a read", ring.wait(1, 120.0)["result"].tolist(), [8192])
                compare("the file", bytes(iov.array), stream("file", 100_000)[5000:13192])
                file.close()

    def check(self) -> None:
        self.step()


KINDS: dict[str, Callable[[Work], Stores | Appends | Pages | Names | Rings | Clients]] = {
    "stores": Stores,
    "appends": Appends,
    "pages": Pages,
    "names": Names,
    "rings": Rings,
    "clients": Clients,
}

if __name__ == "__main__":
    _, chosen, number, *places = sys.argv
    report = Work(chosen, int(number), [Path(place) for place in places]).run()
    print(json.dumps(report._asdict()), flush=True)
