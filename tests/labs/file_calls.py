"""Random calls on folders of blocks that several mounts have, one after the other on each: all have to say the same.

Each call is drawn from a seed, and made on every side. What it returns, or its errno, is compared at once; now and then
all that is there is: names, attributes without times, and bytes. Rings put and delete blocks beside. Half of the calls
are on a folder that keeps to blocks, in which C answers most.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import random
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from mounting import wait_until
from posix_calls import as_user, fallocate, renameat2

from kvfuse.checksum import crc32c
from kvfuse.usrbio.client import BlockStore

NAMES = (
    "a",
    "b",
    "c",
    "d",
    "e",
    "tmp.1",
    "tmp.2",
    "%41",
    "x" * 255,
    "y" * 256,
    "below",
    "below/a",
    "below/b",
    "other/a",
)
SIZES = (0, 1, 100, 4095, 4096, 5000, 65_536, 300_000)
OFFSETS = (0, 1, 4095, 4096, 50_000, 299_999, 400_000)
MODES = (0o000, 0o400, 0o444, 0o600, 0o644)
FLAGS = (
    0, 0, 0, os.O_CREAT, os.O_CREAT | os.O_EXCL, os.O_CREAT | os.O_TRUNC, os.O_TRUNC, os.O_APPEND, os.O_DIRECT,
    os.O_NOFOLLOW,
)  # fmt: skip
SLOTS = 6
PLAIN_SLOTS = 4
"""the slots behind those: of files of the folder that keeps to blocks"""
PLAIN = (
    "open open open close read read fsync stat_file seek chmod_file lose_pages store read_whole read_whole stat stat "
    "stat access rename unlink chmod utime list as_user put put put get delete"
)
"""kinds of calls after which blocks are blocks"""
WHOLE = 60
"""calls between two comparisons of all that is there"""


class Side:
    """One mount's folder, and what is open there."""

    def __init__(self, point: Path, stores: dict[str, BlockStore]) -> None:
        self.point = point
        self.stores = stores
        """of folders of blocks"""
        self.files: dict[int, int] = {}
        """slot -> descriptor"""
        self.regular: set[int] = set()
        """slots of files of the volume"""
        self.mappings: dict[int, mmap.mmap] = {}

    def path(self, name: str) -> Path:
        return self.point / (name if name.startswith(("other/", "plain/")) else f"kv/{name}")

    def close(self, slot: int) -> None:
        if slot in self.mappings:
            self.mappings.pop(slot).close()
        if slot in self.files:
            os.close(self.files.pop(slot))

    def settle(self) -> None:
        """The kernel tells of closes a moment after they return; until then rings may be overtaken by them."""
        stats, count = self.point / ".kvfuse/stats", len(self.regular & self.files.keys())
        wait_until(lambda: json.loads(stats.read_bytes())["fs"]["open_handle_count"] == count, "closes")

    def close_all(self) -> None:
        for slot in list(self.files):
            self.close(slot)


def shown(status: os.stat_result) -> tuple[int, ...]:
    """Without times and numbers. A directory's size means nothing."""
    size = 0 if stat.S_ISDIR(status.st_mode) else status.st_size
    return status.st_mode, status.st_nlink, status.st_uid, status.st_gid, size


def outcome(call: Callable[[], Any]) -> tuple[str, Any]:
    try:
        return "ok", call()
    except OSError as error:
        return "failed", errno.errorcode[error.errno or 0]


def whole(root: Path) -> dict[str, Any]:
    """All that is in the folders of a mount, by path."""

    def look(path: Path) -> tuple[object, ...]:
        status = path.lstat()
        return shown(status), path.read_bytes() if stat.S_ISREG(status.st_mode) else None

    tops = [root / name for name in ("kv", "plain", "other")]
    paths = [Path(folder, name) for top in tops for folder, _, names in os.walk(top) for name in names]
    return {str(path.relative_to(root)): outcome(lambda path=path: look(path)) for path in paths}


class Calls:
    """``step``: one call on each side. AssertionError where they differ."""

    def __init__(self, sides: Sequence[Side], seed: int) -> None:
        self.sides = sides
        self.rng = random.Random(seed)
        self.count = 0
        self.made: list[tuple[object, ...]] = []
        """calls and what they returned, for who looks into a difference"""
        self.kinds = [getattr(self, name) for name in vars(Calls) if name.startswith("do_")]
        self.plain = [getattr(self, f"do_{name}") for name in PLAIN.split()]
        self.is_plain = False
        """the call is one on the folder that keeps to blocks"""

    def step(self) -> None:
        self.count += 1
        self.is_plain = self.rng.random() < 0.5
        self.rng.choice(self.plain if self.is_plain else self.kinds)()
        if self.count % WHOLE == 0:
            self.all("all", lambda side: whole(side.point))

    def end(self) -> None:
        for side in self.sides:
            side.close_all()
        self.all("all at the end", lambda side: whole(side.point))

    def all(self, what: object, call: Callable[[Side], Any]) -> list[tuple[str, Any]]:
        found = [outcome(lambda side=side: call(side)) for side in self.sides]
        self.made.append((what, short(found[0])))
        assert all(one == found[0] for one in found), self.tell(found)
        return found

    def tell(self, found: list[tuple[str, Any]]) -> str:
        """What was called before a difference, for who looks into it."""
        if all(isinstance(one, dict) for _, one in found):
            names = {
                name
                for _, one in found
                for name in one
                if any(name not in other or other[name] != one[name] for _, other in found)
            }
            found = [("all", {name: short(one.get(name)) for name in sorted(names)}) for _, one in found]
        return "\n".join([*map(str, self.made[-200:]), *map(str, found)])

    def on_file(self, what: object, call: Callable[[int], Any]) -> None:
        slot = self.slot()
        if slot in self.sides[0].files:
            self.all((slot, what), lambda side: call(side.files[slot]))

    def on_name(self, what: object, call: Callable[[Path], Any]) -> None:
        name = self.name()
        self.all((what, name[:9]), lambda side: call(side.path(name)))

    def slot(self) -> int:
        return self.rng.randrange(SLOTS, SLOTS + PLAIN_SLOTS) if self.is_plain else self.rng.randrange(SLOTS)

    def name(self) -> str:
        if self.is_plain:
            return f"plain/{self.rng.choice(NAMES[:5])}"
        return self.rng.choice(NAMES[:5] if self.rng.random() < 0.6 else NAMES)

    def data(self) -> bytes:
        return self.rng.randbytes(self.rng.choice(SIZES[1:] if self.is_plain else SIZES))

    # -- open files --------------------------------------------------------------------------------------

    def do_open(self) -> None:
        rng, name, slot = self.rng, self.name(), self.slot()
        access = rng.choice([os.O_RDONLY, os.O_RDONLY, os.O_WRONLY, os.O_RDWR])
        flags, mode = access | rng.choice(FLAGS), rng.choice(MODES)
        if self.is_plain:
            flags = rng.choice([os.O_RDONLY, os.O_RDONLY, os.O_RDONLY, os.O_RDWR])
        for side in self.sides:
            side.close(slot)

        def open_it(side: Side) -> None:
            side.files[slot] = os.open(side.path(name), flags, mode)
            (side.regular.add if stat.S_ISREG(os.fstat(side.files[slot]).st_mode) else side.regular.discard)(slot)

        self.all(("open", slot, name[:9], oct(flags), oct(mode)), open_it)

    do_open_again = do_open

    def do_close(self) -> None:
        slot = self.slot()
        self.all(("close", slot), lambda side: side.close(slot))

    def do_read(self) -> None:
        size, offset = self.rng.choice(SIZES), self.rng.choice(OFFSETS)
        self.on_file(("read", size, offset), lambda file: os.pread(file, size, offset))

    do_read_again = do_read

    def do_write(self) -> None:
        data, offset = self.data(), self.rng.choice(OFFSETS)
        self.on_file(("write", len(data), offset), lambda file: os.pwrite(file, data, offset))

    def do_append(self) -> None:
        data = self.data()
        self.on_file(("append", len(data)), lambda file: os.write(file, data))

    def do_truncate_file(self) -> None:
        size = self.rng.choice(OFFSETS)
        self.on_file(("ftruncate", size), lambda file: os.ftruncate(file, size))

    def do_fsync(self) -> None:
        self.on_file("fsync", os.fsync)

    def do_stat_file(self) -> None:
        self.on_file("fstat", lambda file: shown(os.fstat(file)))

    def do_seek(self) -> None:
        whence, offset = self.rng.choice([os.SEEK_DATA, os.SEEK_HOLE, os.SEEK_END]), self.rng.choice(OFFSETS)
        self.on_file(("seek", whence, offset), lambda file: os.lseek(file, offset, whence))

    def do_fallocate(self) -> None:
        mode, offset, size = self.rng.choice([0, 1, 3]), self.rng.choice(OFFSETS), self.rng.choice(SIZES)
        self.on_file(("fallocate", mode, offset, size), lambda file: fallocate(file, mode, offset, size))

    def do_chmod_file(self) -> None:
        mode = self.rng.choice(MODES)
        self.on_file(("fchmod", oct(mode)), lambda file: os.fchmod(file, mode))

    def do_lose_pages(self) -> None:
        self.on_file("drop pages", lambda file: os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED))

    def do_map(self) -> None:
        slot, place = self.slot(), self.rng.randrange(300_000)
        byte = self.rng.randrange(1, 256)

        def change(side: Side) -> bytes:
            with mmap.mmap(side.files[slot], 0) as mapped:
                at = place % len(mapped)
                mapped[at] = byte
                mapped.flush()
                return mapped[max(at - 10, 0) : at + 10]

        def look(side: Side) -> bytes:
            with mmap.mmap(side.files[slot], 0, prot=mmap.PROT_READ) as mapped:
                return mapped[place % len(mapped) :][:5000]

        if slot not in self.sides[0].files:
            return
        _, size = self.all((slot, "size"), lambda side: os.fstat(side.files[slot]).st_size)[0]
        if isinstance(size, int) and size:
            self.all(("map", slot, place, byte), change if self.rng.random() < 0.5 else look)

    # -- names -------------------------------------------------------------------------------------------

    def do_store(self) -> None:
        """As engines do."""
        name, data = self.name() if self.is_plain else self.rng.choice(NAMES[:5]), self.data()

        def store(side: Side) -> None:
            path = side.path(name).with_name("stored.tmp")
            path.write_bytes(data)
            path.rename(side.path(name))

        self.all(("store", name, len(data)), store)

    do_store_again = do_store

    def do_write_whole(self) -> None:
        data = self.data()
        self.on_name(("write whole", len(data)), lambda path: path.write_bytes(data))

    def do_read_whole(self) -> None:
        self.on_name("read whole", lambda path: path.read_bytes())

    do_read_whole_again = do_read_whole

    def do_stat(self) -> None:
        self.on_name("stat", lambda path: shown(os.stat(path)))

    do_stat_again = do_stat

    def do_access(self) -> None:
        self.on_name("exists", lambda path: os.access(path, os.R_OK))

    def do_rename(self) -> None:
        one, other, flags = self.name(), self.name(), self.rng.choice([0, 0, 0, 1, 2])
        self.all(("rename", one[:9], other[:9], flags), lambda side: renameat2(side.path(one), side.path(other), flags))

    def do_link(self) -> None:
        one, other = self.name(), self.name()
        self.all(("link", one[:9], other[:9]), lambda side: os.link(side.path(one), side.path(other)))

    def do_symlink(self) -> None:
        target = self.name()
        self.on_name(("symlink to", target[:9]), lambda path: os.symlink(target, path))

    def do_unlink(self) -> None:
        self.on_name("unlink", os.unlink)

    def do_truncate(self) -> None:
        size = self.rng.choice(OFFSETS)
        self.on_name(("truncate", size), lambda path: os.truncate(path, size))

    def do_chmod(self) -> None:
        mode = self.rng.choice(MODES)
        self.on_name(("chmod", oct(mode)), lambda path: os.chmod(path, mode))

    def do_chown(self) -> None:
        owner = self.rng.choice([0, 12345])
        self.on_name(("chown", owner), lambda path: os.chown(path, owner, -1))

    def do_utime(self) -> None:
        seconds = self.rng.randrange(1 << 31)
        self.on_name(("utime", seconds), lambda path: os.utime(path, (seconds, seconds)))

    def do_xattr(self) -> None:
        self.on_name("setxattr", lambda path: os.setxattr(path, "user.one", b"value"))
        self.on_name("getxattr", lambda path: os.getxattr(path, "user.one"))
        self.on_name("listxattr", os.listxattr)

    def do_folder(self) -> None:
        if self.rng.random() < 0.5:
            self.on_name("mkdir", os.mkdir)
        else:
            self.on_name("rmdir", os.rmdir)
        self.all("mkdir below", lambda side: side.path("below").mkdir(exist_ok=True))

    def do_device(self) -> None:
        """A file of another kind, which no open waits for."""
        self.on_name("null", lambda path: os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 3)))

    def do_list(self) -> None:
        name = "plain" if self.is_plain else "kv"
        self.all(("list", name), lambda side: sorted(os.listdir(side.point / name)))

    def do_as_user(self) -> None:
        name, access = self.name(), self.rng.choice([os.O_RDONLY, os.O_WRONLY])

        def ask(side: Side) -> bytes:
            with as_user():
                file = os.open(side.path(name), access | os.O_NONBLOCK)
            try:
                return os.read(file, 100) if access == os.O_RDONLY else b""
            finally:
                os.close(file)

        self.all(("as user", name[:9], access), ask)

    # -- rings -------------------------------------------------------------------------------------------

    def by_ring(self, kind: str, call: Callable[[BlockStore, str], Any]) -> None:
        name, folder = self.rng.choice(NAMES[:5]), "plain" if self.is_plain else "kv"
        for side in self.sides:
            side.settle()
        self.all((kind, folder, name), lambda side: call(side.stores[folder], name))

    def do_put(self) -> None:
        data = self.data() or b"one"
        self.by_ring(f"put {len(data)}", lambda store, name: store.put(name, data))

    def do_get(self) -> None:
        self.by_ring("get", lambda store, name: bytes(store.get(name) or b""))

    def do_delete(self) -> None:
        self.by_ring("delete", lambda store, name: store.delete(name))


def short(found: object) -> str:
    text = repr(found)
    return text if len(text) < 300 else f"{text[:60]}... {len(text)} characters, {crc32c(text.encode()):x}"


@contextmanager
def made_side(point: Path) -> Iterator[Side]:
    """New folders of a mount: two of blocks, and one of files."""
    (point / "other").mkdir()
    with ExitStack() as stack:
        stores = {}
        for name in ("kv", "plain"):
            folder = point / name
            folder.mkdir()
            os.setxattr(folder, "user.kvfuse.namespace", b"kind=blocks")
            folder.chmod(0o777)
            stores[name] = stack.enter_context(BlockStore(point, name))
        (point / "kv" / "below").mkdir()
        side = Side(point, stores)
        yield side
        side.close_all()
