"""Programs with files open, and changes of names under way, while the daemon of their mount is killed over and over."""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
from mounting import FOREGROUND, KvfuseMount, temporary_mount
from test_outlive import OUTLIVE, daemon_of, kill_daemon, settle

from kvfuse.native import fusewire

T = TypeVar("T")
CALM = ("publish.window=600", "publish.mode=relaxed", "outlive_size=0")
"""nothing is stored before somebody asks for it"""


@pytest.fixture
def mount() -> Iterator[KvfuseMount]:
    with temporary_mount(OUTLIVE) as mounted:
        yield mounted


def test_open_files_go_on(mount: KvfuseMount) -> None:
    point = mount.point
    (point / "file").write_bytes(b"0123456789" * 1000)
    (point / "gone").write_bytes(b"g" * 100_000)
    settle(mount)
    reader = os.open(point / "file", os.O_RDONLY)
    appender = os.open(point / "log", os.O_CREAT | os.O_RDWR | os.O_APPEND)
    os.write(appender, b"one\n")
    gone = os.open(point / "gone", os.O_RDWR)
    mapping = mmap.mmap(reader, 10_000, prot=mmap.PROT_READ)
    os.fsync(appender)
    os.unlink(point / "gone")
    settle(mount)
    for number in range(3):
        kill_daemon(mount)
        os.posix_fadvise(reader, 0, 0, os.POSIX_FADV_DONTNEED)
        assert os.pread(reader, 10, number * 10) == b"0123456789"
        assert mapping[9990:] == b"0123456789"
        assert os.fstat(reader).st_size == 10_000
        os.write(appender, b"more\n")
        os.fsync(appender)
        assert os.fstat(gone).st_nlink == 0
        os.posix_fadvise(gone, 0, 0, os.POSIX_FADV_DONTNEED)
        assert os.pread(gone, 200_000, 0) == b"g" * 100_000
    assert (point / "log").read_bytes() == b"one\n" + 3 * b"more\n"
    assert os.pwrite(gone, b"G", 50_000) == 1
    assert os.pread(gone, 3, 49_999) == b"gGg"
    mapping.close()
    for descriptor in (reader, appender, gone):
        os.close(descriptor)


def test_lost_bytes_are_heard_of_once() -> None:
    with temporary_mount((*OUTLIVE, *CALM)) as mount:
        point = mount.point
        (point / "file").write_bytes(b"stored")
        settle(mount)
        writer = os.open(point / "file", os.O_RDWR)
        appender = os.open(point / "file", os.O_RDWR | os.O_APPEND)
        reader = os.open(point / "file", os.O_RDONLY)
        os.pwrite(writer, b"STORED and lost", 0)
        assert os.pread(reader, 100, 0) == b"STORED and lost"
        kill_daemon(mount)
        for descriptor in (writer, appender):
            with pytest.raises(OSError) as caught:
                os.fsync(descriptor)
            assert caught.value.errno == errno.EIO
            os.fsync(descriptor)
        assert os.pread(reader, 100, 0) == b"stored"
        assert os.fstat(reader).st_size == 6
        os.write(appender, b" anew")
        assert os.pread(reader, 100, 0) == b"stored anew"
        for descriptor in (writer, appender, reader):
            os.close(descriptor)


def test_what_a_mapping_has_is_not_lost() -> None:
    """Its pages are the kernel's, which writes them back by a handle that is to hear of what was lost."""
    with temporary_mount((*OUTLIVE, *CALM)) as mount:
        file = mount.point / "file"
        file.write_bytes(bytes(8192))
        settle(mount)
        descriptor = os.open(file, os.O_RDWR)
        mapping = mmap.mmap(descriptor, 8192)
        os.pwrite(descriptor, b"lost", 0)
        mapping[4096:4100] = b"kept"
        kill_daemon(mount)
        with pytest.raises(OSError) as caught:
            mapping.flush()
        assert caught.value.errno == errno.EIO
        mapping.flush()
        assert file.read_bytes() == bytes(4096) + b"kept".ljust(4096, b"\0")
        mapping.close()
        os.close(descriptor)


@pytest.mark.skipif(fusewire.kernel() < (6, 16), reason="the kernel cannot be told to ask for all names")
def test_names_that_were_not_stored_are_gone() -> None:
    with temporary_mount((*OUTLIVE, *CALM)) as mount:
        point = mount.point
        (point / "former").write_bytes(b"x")
        (point / "removed").write_bytes(b"x")
        settle(mount)
        (point / "made").write_bytes(b"x")
        os.rename(point / "former", point / "renamed")
        os.unlink(point / "removed")
        assert (point / "made").exists()
        assert not (point / "removed").exists()
        kill_daemon(mount)
        found = {name: (point / name).exists() for name in ("made", "former", "renamed", "removed")}
        assert found == {"made": False, "former": True, "renamed": False, "removed": True}
        assert sorted(os.listdir(point)) == ["former", "removed"]


class Killing:
    """Kills the daemon again and again while the body runs."""

    def __init__(self, mount: KvfuseMount, chance: random.Random, kills: int) -> None:
        self.mount, self.chance, self.kills = mount, chance, kills

    def during(self, works: list[Callable[[threading.Event], None]]) -> None:
        """Each of ``works`` runs in a thread until its event is set."""
        end, failures = threading.Event(), list[BaseException]()

        def run(work: Callable[[threading.Event], None]) -> None:
            try:
                work(end)
            except BaseException as error:
                failures.append(error)
                end.set()

        threads = [threading.Thread(target=run, args=(work,)) for work in works]
        for thread in threads:
            thread.start()
        try:
            for _ in range(self.kills):
                if end.wait(self.chance.random()):
                    break
                os.kill(daemon_of(self.mount), signal.SIGKILL)
                os.statvfs(self.mount.point)
        finally:
            end.set()
            for thread in threads:
                thread.join()
        if failures:
            raise failures[0]


def changes(folder: Path, chance: random.Random) -> Callable[[threading.Event], None]:
    """Changes names in a strict folder, as a program of its own: none may fail, or be done twice, or not at all."""

    def work(end: threading.Event) -> None:
        folder.mkdir()
        names: dict[str, str] = {}
        """name -> "file" with that content, or "folder" """
        number = 0
        while not end.is_set():
            number += 1
            kind = chance.choice(["file", "file", "folder", "rename", "rename", "remove", "link"])
            name = f"{number}"
            if kind == "file":
                descriptor = os.open(folder / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
                os.close(descriptor)
                names[name] = "file"
            elif kind == "folder":
                (folder / name).mkdir()
                names[name] = "folder"
            elif names and kind == "rename":
                old = chance.choice(list(names))
                os.rename(folder / old, folder / name)
                names[name] = names.pop(old)
            elif names and kind == "remove":
                old = chance.choice(list(names))
                (os.unlink if names.pop(old) == "file" else os.rmdir)(folder / old)
            elif kind == "link" and "file" in names.values():
                old = chance.choice([one for one, what in names.items() if what == "file"])
                os.link(folder / old, folder / name)
                names[name] = "file"
            if number % 20 == 0:
                assert set(os.listdir(folder)) == set(names)
        found = {entry.name: "folder" if entry.is_dir() else "file" for entry in os.scandir(folder)}
        assert found == names

    return work


def walks(folder: Path, count: int) -> Callable[[threading.Event], None]:
    """Lists a folder that nobody changes: it is always whole."""

    def work(end: threading.Event) -> None:
        while not end.is_set():
            assert len({entry.name for entry in os.scandir(folder)}) == count
            assert (folder / str(count // 2)).stat().st_size == 3

    return work


def locks(folder: Path, taken: list[str], chance: random.Random) -> Callable[[threading.Event], None]:
    """Wants lock files that others want, too."""

    def work(end: threading.Event) -> None:
        number = 0
        while not end.is_set():
            name = f"{number}"
            try:
                os.close(os.open(folder / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            except FileExistsError:
                pass
            else:
                taken.append(name)
            number += chance.randint(0, 1)

    return work


@pytest.mark.ring(3)
@pytest.mark.parametrize("seed", [1, 2])
def test_everything_is_done_once(seed: int) -> None:
    print("seed", seed)
    chance = random.Random(seed)
    with temporary_mount((*OUTLIVE, "publish.mode=strict")) as mount:
        still, lock_files = mount.point / "still", mount.point / "locks"
        still.mkdir()
        lock_files.mkdir()
        for number in range(300):
            (still / f"{number}").write_bytes(b"abc")
        taken: list[str] = []
        works = [changes(mount.point / f"own-{number}", random.Random(chance.random())) for number in range(3)]
        works += [locks(lock_files, taken, random.Random(chance.random())) for _ in range(3)]
        Killing(mount, chance, 6).during([*works, walks(still, 300)])
        assert len(set(taken)) == len(taken)
        assert set(os.listdir(lock_files)) == set(taken)


def rename_exchange(one: Path, other: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(-100, os.fsencode(one), -100, os.fsencode(other), 2):
        raise OSError(ctypes.get_errno(), "renameat2")


@pytest.mark.ring(3)
def test_a_daemon_that_dies_before_it_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind of request is done, and then the daemon dies: the next one gets it again, and does not do it again."""
    monkeypatch.setenv("KVFUSE_TESTS_DEADLY", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "labs" / "deadly"))
    command = (*FOREGROUND, "-o", "publish.mode=strict")  # which is no command of a daemon that is forked
    with temporary_mount(OUTLIVE, command) as mount:
        point = mount.point
        for name in ("a", "b", "c", "d", "log"):
            (point / name).write_bytes(name.encode())
        (point / "folder").mkdir()
        (point / "empty").mkdir()
        os.setxattr(point / "a", "user.x", b"1")
        log = os.open(point / "log", os.O_WRONLY | os.O_APPEND)

        def dies(kind: str, do: Callable[[], T]) -> T:
            former = daemon_of(mount)
            (tmp_path / kind).touch()
            result = do()
            assert not (tmp_path / kind).exists(), f"there was no {kind}"
            assert daemon_of(mount) != former
            return result

        made = dies("create", lambda: os.open(point / "new", os.O_CREAT | os.O_EXCL | os.O_RDWR))
        assert os.write(made, b"new") == 3
        os.fsync(made)
        dies("mkdir", lambda: (point / "made").mkdir())
        dies("symlink", lambda: (point / "link").symlink_to("a"))
        dies("mknod", lambda: os.mkfifo(point / "fifo"))
        dies("link", lambda: os.link(point / "a", point / "second"))
        dies("unlink", lambda: (point / "b").unlink())
        dies("rmdir", lambda: (point / "empty").rmdir())
        dies("rename", lambda: os.rename(point / "c", point / "d"))
        dies("rename", lambda: rename_exchange(point / "a", point / "folder"))
        dies("setxattr", lambda: os.setxattr(point / "second", "user.y", b"2"))
        dies("removexattr", lambda: os.removexattr(point / "second", "user.x"))
        opened = dies("open", lambda: os.open(point / "d", os.O_RDONLY))
        dies("setattr", lambda: os.fchmod(opened, 0o600))
        os.fsync(opened)
        assert os.pread(opened, 10, 0) == b"c"
        assert os.fstat(made).st_size == 3
        os.close(opened)
        dies("release", lambda: (os.close(made), os.statvfs(point)))
        dies("write", lambda: os.write(log, b" and more"))
        os.close(log)
        assert (point / "log").read_bytes() == b"log and more"
        assert sorted(os.listdir(point)) == ["a", "d", "fifo", "folder", "link", "log", "made", "new", "second"]
        assert (point / "a").is_dir()
        assert (point / "folder").read_bytes() == b"a"
        assert (point / "folder").stat().st_nlink == 2
        assert os.listxattr(point / "folder") == ["user.y"]
        assert (point / "d").stat().st_mode & 0o777 == 0o600
        stats = json.loads((point / ".kvfuse" / "stats").read_text())
        assert stats["fs"]["open_handle_count"] == 0
