"""One caller of a mount under test: a random mix of calls, each logged with its times on the machine's clock.

``schedule_client.py POINT KIND ACTOR SEED LOG``: until the standard input ends. The log has a line before each call and
one after it. ``schedule_history`` judges what was found.
"""

from __future__ import annotations

import errno
import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from schedule_calls import Caller, Unmounted
from schedule_content import (
    ACTORS,
    BLOCKS,
    CELL,
    CHILDREN,
    FOLDERS,
    LINKS,
    OWNERS,
    PAGES,
    SIZES,
    cell_of,
    size_of,
    stream,
    version_of,
)

from kvfuse.errors import Disconnected
from kvfuse.usrbio.client import BlockStore

LOG_CELLS = 64
"""appended to a log before the next one is begun"""
RING_SECONDS = 2.0
"""the deadline of calls through rings"""
PAUSE_SECONDS = 0.05
"""at most, between two calls"""


class Files:
    """Calls of the file system, all of them relative to the folder that is open: nothing is done beside the mount."""

    def __init__(self, caller: Caller) -> None:
        self.caller = caller
        self.rng = caller.rng
        self._folders: dict[str, int] = {}
        self._logs: dict[str, int] = {}

    def step(self) -> None:
        """Any operation in any folder."""
        folder = self.rng.choice(FOLDERS)
        works: list[tuple[int, Callable[[str, int], None]]] = [
            (6, self.put), (8, self.read), (2, self.stat), (1, self.unlink), (1, self.move), (1, self.link),
            (3, self.append), (3, self.change), (3, self.cells), (1, self.children), (1, self.list),
        ]  # fmt: skip
        (work,) = self.rng.choices([work for _, work in works], [weight for weight, _ in works])
        work(folder, self._folder(folder))

    def close(self) -> None:
        """Let go of the folders."""
        for descriptor in self._folders.values():
            os.close(descriptor)
        self._folders.clear()

    def _folder(self, name: str) -> int:
        if name not in self._folders:
            with self.caller.operation("folder", name, ""):
                path = self.caller.point / name
                self._folders[name] = self.caller.call("open folder", lambda: os.open(path, os.O_RDONLY))
        if name not in self._folders:
            raise Unmounted(errno.ENOTCONN, "not mounted")
        return self._folders[name]

    def _open(self, name: str, flags: int, folder: int) -> int:
        return self.caller.call("open", lambda: os.open(name, flags, dir_fd=folder))

    @contextmanager
    def _closing(self, file: int) -> Iterator[int]:
        """The file is closed at the end; only after success does it matter how."""
        try:
            yield file
        except BaseException:
            self._quietly(lambda: os.close(file))
            raise
        self.caller.call("close", lambda: os.close(file))

    def _quietly(self, function: Callable[[], None]) -> None:
        try:
            self.caller.call("clean up", function)
        except OSError:
            pass

    # -- blocks --------------------------------------------------------------------------------------

    def _store(self, temporary: str, version: int, folder: int, *, sync: bool) -> None:
        file = self._open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, folder)
        with self._closing(file):
            data = memoryview(stream(version, size_of(version)))
            while data:
                data = data[self.caller.call("write", lambda: os.write(file, data)) :]  # noqa: B023
            if sync:
                self.caller.call("fsync", lambda: os.fsync(file))

    def put(self, folder: str, at: int) -> None:
        """Temporary name, write, close, rename; perhaps an fsync of the folder after it."""
        version, name = self.caller.new_version(), self.rng.choice(BLOCKS)
        temporary = f"tmp-{version}"
        early, durable = self.rng.random() < 0.2, self.rng.random() < 0.3
        with self.caller.operation("put", folder, name, version=version) as result:
            try:
                self._store(temporary, version, at, sync=early)
                self.caller.call("rename", lambda: os.rename(temporary, name, src_dir_fd=at, dst_dir_fd=at))
            except OSError:
                self._quietly(lambda: os.unlink(temporary, dir_fd=at))
                raise
            if durable:
                result["acknowledged"] = time.monotonic()
                self.caller.call("fsync", lambda: os.fsync(at))
                result["durable"] = True

    def read(self, folder: str, at: int) -> None:
        """As a whole or in ranges, which have to be of one version."""
        self.read_block(folder, at, self.rng.choice(BLOCKS + (LINKS if folder == "strict" else ())))

    def read_block(self, folder: str, at: int, name: str) -> None:
        with self.caller.operation("read", folder, name) as result:
            try:
                file = self._open(name, os.O_RDONLY, at)
            except FileNotFoundError:
                result["found"] = None
                return
            with self._closing(file):
                result["found"] = self._content(file)

    def _range(self, file: int, start: int, end: int) -> bytes:
        """Short at the end of the file alone: a call may be short where the next one fails."""
        found = b""
        while start + len(found) < end:
            at = start + len(found)
            data = self.caller.call("read", lambda: os.pread(file, end - at, at))  # noqa: B023
            if not data:
                break
            found += data
        return found

    def _whole(self, file: int) -> bytes:
        return self._range(file, 0, 2 * max(SIZES))

    def _content(self, file: int) -> int | str:
        if self.rng.random() < 0.6:
            return version_of(self._whole(file))
        version = int.from_bytes(self._range(file, 0, 8), "little")
        expected = stream(version, size_of(version))
        for _ in range(3):
            start = self.rng.randrange(len(expected))
            end = self.rng.randrange(start, len(expected)) + 1
            data = self._range(file, start, end)
            if data != expected[start:end]:
                return f"{start}-{end} of {version}, {len(expected)} bytes: {len(data)} that begin {data[:32]!r}"
        return version

    def stat(self, folder: str, at: int) -> None:
        name = self.rng.choice(BLOCKS)
        with self.caller.operation("stat", folder, name) as result:
            try:
                result["size"] = self.caller.call("stat", lambda: os.stat(name, dir_fd=at)).st_size
            except FileNotFoundError:
                result["found"] = None

    def unlink(self, folder: str, at: int) -> None:
        name = self.rng.choice(BLOCKS + (LINKS if folder == "strict" else ()))
        with self.caller.operation("unlink", folder, name):
            self.caller.call("unlink", lambda: os.unlink(name, dir_fd=at))

    def move(self, folder: str, at: int) -> None:
        """One public name over another."""
        name, to = self.rng.sample(BLOCKS, 2)
        with self.caller.operation("move", folder, name, to=to):
            self.caller.call("rename", lambda: os.rename(name, to, src_dir_fd=at, dst_dir_fd=at))

    def link(self, folder: str, at: int) -> None:
        """A file gets a public name beside its own, which goes then."""
        if folder != "strict":
            return
        version, name = self.caller.new_version(), self.rng.choice(LINKS)
        temporary = f"tmp-{version}"
        with self.caller.operation("link", folder, name, version=version):
            try:
                self._store(temporary, version, at, sync=False)
                self.caller.call("link", lambda: os.link(temporary, name, src_dir_fd=at, dst_dir_fd=at))
            finally:
                self._quietly(lambda: os.unlink(temporary, dir_fd=at))

    # -- cells ---------------------------------------------------------------------------------------

    def append(self, folder: str, at: int) -> None:
        """Records at the end of a log of this caller's own."""
        number = self._logs.get(folder, 0)
        name = f"log-{self.caller.actor}-{number}"
        versions = [self.caller.new_version() for _ in range(self.rng.randrange(1, 4))]
        with self.caller.operation("append", folder, name, versions=versions) as result:
            file = self._open(name, os.O_CREAT | os.O_WRONLY | os.O_APPEND, at)
            with self._closing(file):
                size = self.caller.call("stat", lambda: os.fstat(file)).st_size
                result["size"] = size
                for version in versions:
                    self.caller.call("write", lambda: os.write(file, stream(version, CELL)))  # noqa: B023
                if self.rng.random() < 0.5:
                    self.caller.call("fsync", lambda: os.fsync(file))
                    result["durable"] = True
            if size >= LOG_CELLS * CELL:
                self._logs[folder] = number + 1

    def change(self, folder: str, at: int) -> None:
        """Cells of a file that all callers change, each its own."""
        name = self.rng.choice([*PAGES])
        own = range(self.caller.actor % ACTORS, PAGES[name], OWNERS)
        places = {index: self.caller.new_version() for index in self.rng.sample(own, min(len(own), 2))}
        with self.caller.operation("change", folder, name, places=places) as result:
            file = self._open(name, os.O_RDWR, at)
            with self._closing(file):
                for index, version in places.items():
                    data = stream(version, CELL)
                    self.caller.call("write", lambda: os.pwrite(file, data, index * CELL))  # noqa: B023
                if self.rng.random() < 0.5:
                    self.caller.call("fsync", lambda: os.fsync(file))
                    result["durable"] = True

    def cells(self, folder: str, at: int) -> None:
        """Read a log, or a file that is changed in place: which version has each cell?"""
        logs = [f"log-{actor}-{number}" for actor in range(OWNERS) for number in range(self._logs.get(folder, 0) + 1)]
        self.read_cells(folder, at, self.rng.choice([*PAGES, *PAGES, self.rng.choice(logs)]))

    def read_cells(self, folder: str, at: int, name: str) -> None:
        with self.caller.operation("cells", folder, name) as result:
            try:
                file = self._open(name, os.O_RDONLY, at)
            except FileNotFoundError:
                return
            with self._closing(file):
                data = self._whole(file)
                result["cells"] = [cell_of(data[start : start + CELL]) for start in range(0, len(data), CELL)]

    def read_all(self, folder: str) -> None:
        """Whatever the folder holds."""
        at = self._folder(folder)
        self.list(folder, at)
        for name in (*BLOCKS, *LINKS):
            self.read_block(folder, at, name)
        for name in os.listdir(at):
            if name.startswith("log-") or name in PAGES:
                self.read_cells(folder, at, name)

    # -- folders -------------------------------------------------------------------------------------

    def children(self, folder: str, at: int) -> None:
        name = self.rng.choice(CHILDREN)
        if self.rng.random() < 0.5:
            with self.caller.operation("mkdir", folder, name, version=self.caller.new_version()):
                self.caller.call("mkdir", lambda: os.mkdir(name, dir_fd=at))
        else:
            with self.caller.operation("rmdir", folder, name):
                self.caller.call("rmdir", lambda: os.rmdir(name, dir_fd=at))

    def list(self, folder: str, at: int) -> None:
        with self.caller.operation("list", folder, "") as result:
            names = self.caller.call("list", lambda: os.listdir(at))
            result["names"] = [name for name in names if name in BLOCKS + LINKS + CHILDREN]


class Blocks:
    """Calls through a ring, of blocks in the same folders."""

    def __init__(self, caller: Caller) -> None:
        self.caller = caller
        self.rng = caller.rng
        self._stores: dict[str, BlockStore] = {}

    def step(self) -> None:
        folder = self.rng.choice(FOLDERS)
        store = self._store(folder)
        (work,) = self.rng.choices([self.put, self.get, self.exists, self.delete], [4, 8, 3, 1])
        try:
            work(folder, store)
        except Disconnected as error:
            self.close()
            raise Unmounted(errno.ENOTCONN, "disconnected") from error

    def close(self) -> None:
        stores, self._stores = self._stores, {}
        for store in stores.values():
            with suppress(OSError, Disconnected):  # the daemon is gone, and all it had of the store with it
                store.close()

    def _store(self, folder: str) -> BlockStore:
        if folder not in self._stores:
            try:
                with self.caller.operation("connect", folder, ""):
                    self._stores[folder] = self.caller.call(
                        "connect",
                        lambda: BlockStore(self.caller.point, folder, create=False, deadline=RING_SECONDS),
                    )
            except Disconnected as error:
                raise Unmounted(errno.ENOTCONN, "disconnected") from error
        if folder not in self._stores:
            raise Unmounted(errno.ENOTCONN, "not mounted")
        return self._stores[folder]

    def put(self, folder: str, store: BlockStore) -> None:
        version, name = self.caller.new_version(), self.rng.choice(BLOCKS)
        with self.caller.operation("put", folder, name, version=version, ring=True):
            self.caller.call("ring put", lambda: store.put(name, stream(version, size_of(version))))

    def get(self, folder: str, store: BlockStore) -> None:
        name = self.rng.choice(BLOCKS)
        with self.caller.operation("read", folder, name, ring=True) as result:
            view = self.caller.call("ring get", lambda: store.get(name))
            if view is not None:
                with view:
                    result["found"] = version_of(bytes(view))

    def exists(self, folder: str, store: BlockStore) -> None:
        with self.caller.operation("list", folder, "", ring=True) as result:
            found = self.caller.call("ring exists", lambda: store.exists(BLOCKS))
            result["names"] = [name for name, is_there in zip(BLOCKS, found.tolist(), strict=True) if is_there]

    def delete(self, folder: str, store: BlockStore) -> None:
        """That there was no such block is an answer; where the outcome is not known, the store raises."""
        name = self.rng.choice(BLOCKS)
        with self.caller.operation("unlink", folder, name, ring=True) as result:
            if not self.caller.call("ring delete", lambda: store.delete(name)):
                result["error"] = errno.ENOENT


KINDS = {"files": Files, "blocks": Blocks}


def has_ended(pause: float) -> bool:
    """Whether the standard input has, within ``pause`` seconds."""
    return bool(select.select([sys.stdin], [], [], pause)[0])


def main() -> None:
    point, kind, actor, seed, log = sys.argv[1:]
    caller = Caller(Path(point), int(actor), int(seed), Path(log))
    work = KINDS[kind](caller)
    pause = 0.0
    while not has_ended(pause):
        pause = caller.rng.random() * PAUSE_SECONDS
        try:
            work.step()
        except Unmounted:
            work.close()
            pause = 0.2


if __name__ == "__main__":
    main()
