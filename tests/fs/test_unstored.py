"""What was answered is there after the death of the daemon, though nothing of it was stored."""

from __future__ import annotations

import errno
import os
import random
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from handover_lab import ROOT, WHO, Daemon, Mount
from pyfuse3 import FUSEError
from volume_lab import MIB, Chaos, lab_options

from kvfuse.kept import log as kept_log
from kvfuse.kept.log import KeptLog
from kvfuse.volume.api import DirEntry

pytestmark = pytest.mark.ring(1)

KIB = 1024
MODES = 0o644, 0o600, 0o755


@dataclass
class File:
    ino: int
    data: bytearray = field(default_factory=bytearray)
    mode: int = 0o644
    nlink: int = 1
    attributes: dict[bytes, bytes] = field(default_factory=dict)
    handles: list[int] = field(default_factory=list)


@dataclass
class Model:
    """What there is to be."""

    folders: dict[int, dict[bytes, File | int]] = field(default_factory=lambda: {ROOT: {}})
    """directory -> name -> file, or the inode of a directory"""
    files: dict[int, File] = field(default_factory=dict)
    """that have a name or a handle"""


def fields(**wanted: bool) -> Any:
    names = ("mode", "uid", "gid", "size", "atime", "mtime", "ctime")
    return SimpleNamespace(**{f"update_{name}": wanted.get(name, False) for name in names})


class Player:
    """Does something at random, in the daemon and the model."""

    def __init__(self, rng: random.Random, mount: Mount, size_max: int) -> None:
        self.rng, self.mount, self.size_max = rng, mount, size_max
        self.model = Model()
        self.count = 0
        self.log: list[str] = []

    def pick_file(self) -> tuple[int, bytes, File] | None:
        found = [
            (folder, name, one)
            for folder, names in self.model.folders.items()
            for name, one in names.items()
            if isinstance(one, File)
        ]
        return self.rng.choice(found) if found else None

    def pick_open(self) -> tuple[File, int] | None:
        found = [(one, fh) for one in self.model.files.values() for fh in one.handles]
        return self.rng.choice(found) if found else None

    def new_name(self) -> bytes:
        self.count += 1
        return b"name %d" % self.count

    def lose(self, one: File) -> None:
        one.nlink -= 1
        if not one.nlink and not one.handles:
            del self.model.files[one.ino]

    def choose(self) -> tuple[str, tuple[Any, ...], Any] | None:
        """(request, its arguments, what it does to the model with its answer)"""
        rng, model = self.rng, self.model
        folder = rng.choice(list(model.folders))
        kind = rng.choices(
            [
                "create",
                "write",
                "cut",
                "mode",
                "xattr",
                "release",
                "open",
                "rename",
                "link",
                "unlink",
                "mkdir",
                "rmdir",
                "fsync",
                "move",
            ],
            [6, 14, 3, 2, 3, 3, 2, 5, 2, 4, 2, 1, 0.7, 1],
        )[0]
        found, opened = self.pick_file(), self.pick_open()
        if kind == "create":
            name = self.new_name()

            def created(answer: Any) -> None:
                fh, ino = answer
                one = model.files[ino] = File(ino, handles=[fh])
                model.folders[folder][name] = one

            return "create", (folder, name), created
        if kind == "mkdir":
            name = self.new_name()

            def made(answer: Any) -> None:
                model.folders[answer.st_ino] = {}
                model.folders[folder][name] = int(answer.st_ino)

            return "mkdir", (folder, name, 0o755, WHO), made
        if kind == "rmdir":
            empty = [
                (above, name, ino)
                for above, names in model.folders.items()
                for name, ino in names.items()
                if isinstance(ino, int) and not model.folders[ino]
            ]
            if not empty:
                return None
            above, gone, ino = rng.choice(empty)

            def removed(answer: Any) -> None:
                del model.folders[above][gone], model.folders[ino]

            return "rmdir", (above, gone, WHO), removed
        if kind == "write" and opened is not None:
            one, fh = opened
            size = rng.choice([1, 100, 4096, 10_000, 100_000, self.size_max])
            offset = rng.choice([0, len(one.data), rng.randrange(len(one.data) + 1), rng.randrange(self.size_max)])
            data = rng.randbytes(rng.randint(1, size))

            def written(answer: Any) -> None:
                assert answer == len(data)
                one.data.extend(bytes(max(0, offset - len(one.data))))
                one.data[offset : offset + len(data)] = data

            return "write", (fh, offset, data), written
        if kind in ("fsync", "release") and opened is not None:
            one, fh = opened

            def let_go(answer: Any) -> None:
                if kind == "release":
                    one.handles.remove(fh)
                    if not one.nlink and not one.handles:
                        del model.files[one.ino]

            return kind, (fh, False) if kind == "fsync" else (fh,), let_go
        if kind in ("cut", "mode") and found is not None:
            one = found[2]
            size, mode = rng.randrange(len(one.data) + 5000), rng.choice(MODES)

            def changed(answer: Any) -> None:
                if kind == "cut":
                    one.data[size:] = b""
                    one.data.extend(bytes(size - len(one.data)))
                else:
                    one.mode = mode

            attributes = SimpleNamespace(st_size=size, st_mode=mode)
            for name_ in ("st_uid", "st_gid", "st_atime_ns", "st_mtime_ns", "st_ctime_ns"):
                setattr(attributes, name_, 0)
            return "setattr", (one.ino, attributes, fields(size=kind == "cut", mode=kind == "mode"), None, WHO), changed
        if kind == "xattr" and found is not None:
            one, key = found[2], b"user.%d" % rng.randrange(3)
            if key in one.attributes and rng.random() < 0.5:
                return "removexattr", (one.ino, key, WHO), lambda answer: one.attributes.pop(key)
            value = rng.randbytes(rng.randrange(50))
            return "setxattr", (one.ino, key, value, WHO), lambda answer: one.attributes.update({key: value})
        if kind == "open" and found is not None:
            one = found[2]
            return "open", (one.ino, os.O_RDWR, WHO), lambda answer: one.handles.append(answer)
        if kind == "rename" and found is not None:
            old_folder, old, one = found
            others = [name for name, other in model.folders[folder].items() if isinstance(other, File)]
            name = rng.choice(others) if others and rng.random() < 0.5 else self.new_name()
            if model.folders[folder].get(name) is one:
                return None

            def renamed(answer: Any) -> None:
                replaced = model.folders[folder].get(name)
                del model.folders[old_folder][old]
                model.folders[folder][name] = one
                if isinstance(replaced, File):
                    self.lose(replaced)

            return "rename", (old_folder, old, folder, name, 0, WHO), renamed
        if kind == "move":
            moving = [
                (above, name, ino)
                for above, names in model.folders.items()
                for name, ino in names.items()
                if isinstance(ino, int)
            ]
            if not moving:
                return None
            above, old, ino = rng.choice(moving)
            here = folder
            while here not in (ROOT, ino):
                here = next(up for up, names in model.folders.items() if here in names.values())
            if here == ino:
                return None
            name = self.new_name()

            def moved(answer: Any) -> None:
                del model.folders[above][old]
                model.folders[folder][name] = ino

            return "rename", (above, old, folder, name, 0, WHO), moved
        if kind == "link" and found is not None:
            one, name = found[2], self.new_name()

            def linked(answer: Any) -> None:
                model.folders[folder][name] = one
                one.nlink += 1

            return "link", (one.ino, folder, name, WHO), linked
        if kind == "unlink" and found is not None:
            above, name, one = found

            def unlinked(answer: Any) -> None:
                del model.folders[above][name]
                self.lose(one)

            return "unlink", (above, name, WHO), unlinked
        return None

    async def ask(self, daemon: Daemon, kind: str, args: tuple[Any, ...], again: int | None = None) -> Any:
        if kind == "create":
            return await daemon.create(args[1], parent=args[0], **({} if again is None else {"again": again}))
        if kind == "open":
            return await daemon.open(args[0], args[1], **({} if again is None else {"again": again}))
        return await daemon.ask(kind, *args, again=again)

    async def ask_again(self, daemon: Daemon, kind: str, args: tuple[Any, ...], number: int) -> Any:
        """As the kernel does: where a daemon does not know an inode by number, it looks the path up, and asks anew."""
        try:
            return await self.ask(daemon, kind, args, number)
        except FUSEError as error:
            if error.errno != errno.ESTALE:
                raise
        for folder, names in self.model.folders.items():
            for name in names:
                await daemon.lookup(name, folder)
        try:
            return await self.ask(daemon, kind, args)
        except FUSEError as error:
            if (kind, error.errno) != ("removexattr", errno.ENODATA):  # it was done before
                raise

    async def play(self, daemon: Daemon, steps: int) -> None:
        for _ in range(steps):
            chosen = self.choose()
            if chosen is not None:
                kind, args, note = chosen
                self.say(kind, args)
                note(await self.ask(daemon, kind, args))

    def say(self, kind: str, args: tuple[Any, ...]) -> None:
        shown = [f"<{len(one)}>" if isinstance(one, bytes) and len(one) > 20 else one for one in args]
        self.log.append(f"{kind} {shown}")

    async def compare(self, daemon: Daemon) -> None:
        """All is as it is to be."""
        volume = daemon.volume
        for folder, names in self.model.folders.items():
            rows: list[DirEntry] = []
            while len(rows) % 100 == 0:
                more = await volume.tree.list_directory(folder, rows[-1].cookie if rows else 0, 100)
                rows += more
                if not more:
                    break
            assert {row.name: row.attributes.ino for row in rows} == {
                name: one.ino if isinstance(one, File) else one for name, one in names.items()
            }
            for name, one in names.items():
                if isinstance(one, File):
                    assert (await volume.tree.lookup(folder, name)).ino == one.ino
                    volume.tree.forget(one.ino, 1)
        for one in self.model.files.values():
            if one.nlink:
                attributes = await volume.inodes.attributes(one.ino)
                assert (attributes.size, attributes.nlink) == (len(one.data), one.nlink), one.ino
                assert attributes.mode & 0o7777 == one.mode
                fh = await daemon.open(one.ino, os.O_RDONLY)
            elif one.handles:
                fh = one.handles[0]
            data = bytes(await daemon.ask("read", fh, 0, len(one.data) + 10))
            assert len(data) == len(one.data), one.ino
            assert data == one.data, (one.ino, next(at for at in range(len(data)) if data[at] != one.data[at]))
            found = await volume.inodes.list_xattrs(one.ino)
            assert sorted(name for name in found if name.startswith(b"user.")) == sorted(one.attributes)
            for name, value in one.attributes.items():
                assert await volume.inodes.get_xattr(one.ino, name) == value
            if one.nlink:
                await daemon.ask("release", fh)


CHUNKS = {"small": (16 * KIB, 300_000), "large": (MIB, 2_000_000)}
SOME_CHUNKS = ("small", pytest.param("large", marks=pytest.mark.ring(3)))


@pytest.mark.parametrize("chunk", SOME_CHUNKS)
@pytest.mark.parametrize("strict", [False, True])
async def test_all_that_was_answered_is_there_after_kills(rng: random.Random, chunk: str, strict: bool) -> None:
    chunk_size, size_max = CHUNKS[chunk]
    mount = Mount(lab_options(capacity=128 * MIB, chunk=chunk_size, strict=strict))
    player = Player(rng, mount, size_max)
    try:
        for _ in range(8):
            async with mount.daemon(Chaos(rng, delay=rng.choice([0, 0.3]), tears=False)) as daemon:
                await player.compare(daemon)
                await player.play(daemon, rng.randrange(60))
                mount.kill()
            player.log.append("-- killed")
            await mount.check()
        async with mount.daemon() as daemon:
            await player.compare(daemon)
            for one in list(player.model.files.values()):
                for fh in one.handles:
                    await daemon.ask("release", fh)
        await mount.check()
    except BaseException:
        print("\n".join(player.log))
        raise


@pytest.mark.parametrize("chunk", SOME_CHUNKS)
@pytest.mark.parametrize("is_in_seal", [False, True])
async def test_what_was_not_answered_is_done_once(
    rng: random.Random, chunk: str, is_in_seal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each daemon is killed somewhere within a request, which the next one gets again; or right before one of the
    stores with which something is kept."""
    chunk_size, size_max = CHUNKS[chunk]
    mount = Mount(lab_options(capacity=128 * MIB, chunk=chunk_size))
    player = Player(rng, mount, size_max)
    cut = Cut(mount, monkeypatch)
    again: tuple[str, tuple[Any, ...], Any, int] | None = None
    try:
        for _ in range(12):
            async with mount.daemon(Chaos(rng, delay=rng.choice([0, 0.3]), tears=False)) as daemon:
                if again is not None:
                    kind, args, note, number = again
                    note(await player.ask_again(daemon, kind, args, number))
                    again = None
                await player.compare(daemon)
                await player.play(daemon, rng.randrange(40))
                chosen = player.choose()
                if chosen is not None:
                    again = await _killed_within(mount, player, daemon, chosen, cut if is_in_seal else None)
                else:
                    mount.kill()
            player.log.append("-- killed")
            await mount.check()
        async with mount.daemon() as daemon:
            if again is not None:
                kind, args, note, number = again
                note(await player.ask_again(daemon, kind, args, number))
            await player.compare(daemon)
            for one in list(player.model.files.values()):
                for fh in one.handles:
                    await daemon.ask("release", fh)
        await mount.check()
    except BaseException:
        print("\n".join(player.log))
        raise


class Cut:
    """Kills the daemon of a mount right before a store into what is kept."""

    def __init__(self, mount: Mount, monkeypatch: pytest.MonkeyPatch) -> None:
        self.mount = mount
        self.left = 0
        """stores before which it goes on; 0: it is not to be killed"""
        self.counts: Counter[str] = Counter()
        monkeypatch.setattr(kept_log, "SHORT", 3000)  # so that areas change often
        for name in ("_store_word", "_store_bytes", "write_bytes"):
            monkeypatch.setattr(KeptLog, name, self.before(name, getattr(KeptLog, name)))

    def before(self, name: str, store: Any) -> Any:
        def cut(log: KeptLog, place: int, value: Any) -> None:
            if self.left:
                self.left -= 1
                if not self.left:
                    self.mount.kill()
                    self.counts[f"{name} {place}" if name == "_store_word" else name] += 1
            store(log, place, value)

        return cut


async def _killed_within(mount: Mount, player: Player, daemon: Daemon, chosen: Any, cut: Cut | None) -> Any:
    """The request to send again; None: it was answered."""
    kind, args, note = chosen
    player.say(f"(killed within) {kind}", args)
    answers: list[Any] = []

    async def ask() -> None:
        try:
            answers.append(await player.ask(daemon, kind, args))
        except FUSEError as error:
            answers.append(error)

    number = mount.unique + 2
    if cut is not None:
        cut.left = player.rng.choice([1, 2, 2, 3, 3, 4, 6])
        await ask()
        is_answered = cut.left > 0
        if is_answered:
            mount.kill()
        cut.left = 0
    else:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            for _ in range(player.rng.randrange(6)):
                await trio.lowlevel.checkpoint()
            mount.kill()
            is_answered = bool(answers)
    if not is_answered:
        return kind, args, note, number
    note(answers[0])
    return None
