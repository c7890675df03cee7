"""kill -9 of the daemon at random moments of a mixed load: what was fsynced is there, all else whole or absent.

The clients (``crash_client``) are processes of their own and log what they are about to do and what has
returned. From the log follows what a crash may show: a floor that must be there, and what may be besides.
"""

from __future__ import annotations

import json
import os
import random
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from crash_client import KINDS, LARGE_PIECE, PAGE, PAGES, block, page, stream
from mounting import PATIENCE_S, KvfuseMount, wait_until
from places import LABS
from posix_calls import opened
from scale import scaled

pytestmark = pytest.mark.ring(3)

ROUNDS = int(os.environ.get("KVFUSE_CRASH_ROUNDS", scaled(16)))
WORDS = ("volume.capacity=256MiB", "volume.segment_size=64MiB", "cache.staging_size=24MiB")
CLIENT = LABS / "crash_client.py"

Event = dict[str, object]


class Client:
    """A process that works in a folder of its own, and the log of what it did."""

    def __init__(self, kind: str, folder: Path, seed: int, log: Path) -> None:
        self.kind = kind
        self.folder = folder
        self._log = log
        folder.mkdir()
        with opened(folder.parent, os.O_RDONLY) as descriptor:  # it is there, however soon the daemon is killed
            os.fsync(descriptor)
        log.touch()
        command = [sys.executable, "-S", str(CLIENT), kind, str(folder), str(seed), str(log)]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL)

    def end(self) -> None:
        self._process.kill()
        self._process.wait(PATIENCE_S)

    def has_begun(self) -> bool:
        return self._log.stat().st_size > 0

    def events(self) -> list[Event]:
        lines = self._log.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]  # the last may be cut off by the kill


class Lab:
    """One volume, mounted again and again."""

    def __init__(self, base: Path, rng: random.Random, words: Sequence[str]) -> None:
        self.base = base
        self.rng = rng
        self.mount = KvfuseMount(base, (*WORDS, *words))
        self.round = 0
        self.clients: list[Client] = []
        self.mount.mount()
        self.free = self.free_bytes()

    def free_bytes(self) -> int:
        status = os.statvfs(self.mount.point)
        return status.f_bfree * status.f_frsize

    def start_clients(self) -> None:
        self.round += 1
        self.clients = [
            Client(kind, self.mount.point / kind, self.rng.randrange(1 << 30), self.base / f"{kind}.{self.round}.log")
            for kind in KINDS
        ]
        wait_until(lambda: all(client.has_begun() for client in self.clients), "the clients")
        select.select([], [], [], self.rng.random() ** 2 * 0.8)

    def end_clients(self) -> None:
        for client in self.clients:
            client.end()

    def check(self) -> None:
        """The unmounted volume is clean, every byte of it."""
        self.mount.fsck(verify=True)

    def remount(self, everything: Collection[str] = ()) -> None:
        """Mount what a crash left, compare, and remove it all: then no slot may be missing.

        ``everything``: of these kinds of clients all that returned must be there, not only what was fsynced.
        """
        self.mount.mount()
        for client in self.clients:
            CHECKS[client.kind](client.folder, client.events(), client.kind in everything)
            shutil.rmtree(client.folder)
        wait_until(lambda: self.free_bytes() == self.free, "the space of removed files")


@pytest.fixture
def lab(rng: random.Random) -> Iterator[Lab]:
    with temporary_lab(rng) as lab:
        yield lab


@contextmanager
def temporary_lab(rng: random.Random, *words: str) -> Iterator[Lab]:
    base = Path(tempfile.mkdtemp(prefix="kvfuse-crash-"))
    lab = Lab(base, rng, words)
    try:
        yield lab
        if lab.mount.is_mounted:
            lab.mount.unmount()
        lab.check()
    finally:
        lab.end_clients()
        lab.mount.remove()
        shutil.rmtree(base)


# -- what each kind of client may find ---------------------------------------------------------------


def check_blocks(folder: Path, events: list[Event], everything: bool) -> None:
    states: dict[object, list[int | None]] = {}
    for event in events:
        history = states.setdefault(event.get("name"), [None])
        if event.get("do") == "publish":
            history.append(event["version"])
        elif event.get("do") == "remove":
            history.append(None)
        elif "done" in event and (everything or event.get("durable")):
            del history[:-1]
    for name, history in states.items():
        assert version_of(folder / str(name), str(name)) in history, f"{name}: none of {history}"
    for path in folder.iterdir():  # temporary names may hold anything that can be read; links are whole
        data = path.read_bytes()
        if path.name.startswith("linked."):
            assert version_of(path, path.name.removeprefix("linked.")) is not None
        elif path.name in states:
            assert data


def version_of(path: Path, name: str) -> int | None:
    """Which version of a block a file holds, whole; None where there is no file."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    found_name, version, size = json.loads(data[:128])
    assert found_name == name, f"{path} holds {found_name}"
    assert data == block(name, version, size), f"{path} is torn"
    return int(version)


def check_log(folder: Path, events: list[Event], everything: bool) -> None:
    floor = most = 0
    for event in events:
        most = max(most, int(str(event.get("size", 0))))
        if "done" in event and (everything or event.get("durable")):
            floor = int(str(event["size"]))
    data = (folder / "log").read_bytes() if (folder / "log").exists() else b""
    assert floor <= len(data) <= most
    whole = stream("log", len(data))
    assert data[:floor] == whole[:floor]
    assert right_or_zero(data[floor:], whole[floor:])


def right_or_zero(data: bytes, right: bytes) -> bool:
    got, wanted = np.frombuffer(data, np.uint8), np.frombuffer(right, np.uint8)
    return bool(((got == wanted) | (got == 0)).all())


def check_pages(folder: Path, events: list[Event], everything: bool) -> None:
    versions: list[list[int]] = [[0] for _ in range(PAGES)]
    made = False
    for event in events:
        made = made or event.get("done") == "make"
        if event.get("do") == "page":
            versions[int(str(event["number"]))].append(int(str(event["version"])))
        elif event.get("done") == "sync" or (everything and event.get("done") == "page"):
            for history in versions:
                del history[:-1]
    if not made:
        return
    data = (folder / "pages").read_bytes()
    assert len(data) == PAGE * PAGES
    for number, history in enumerate(versions):
        got = np.frombuffer(data[number * PAGE : (number + 1) * PAGE], np.uint8)
        fits = np.zeros(PAGE, bool)
        for version in history:
            fits |= got == np.frombuffer(page(number, version), np.uint8)
        assert fits.all(), f"page {number} is of none of the versions {history}"


def check_large(folder: Path, events: list[Event], everything: bool) -> None:
    floor: dict[object, object] = {}
    for event in events:
        if event.get("done") == "large" and (everything or event.get("durable")):
            floor[event["name"]] = event["pieces"]
        elif event.get("do") == "drop":
            floor.pop(event["name"], None)
    for name, pieces in floor.items():
        assert (folder / str(name)).stat().st_size == int(str(pieces)) * LARGE_PIECE
    for path in folder.iterdir():
        data = path.read_bytes()
        count = -(-len(data) // LARGE_PIECE)
        right = b"".join(stream(f"{path.name}/{piece}", LARGE_PIECE) for piece in range(count))[: len(data)]
        assert data == right if path.name in floor else right_or_zero(data, right), path


def check_names(folder: Path, events: list[Event], everything: bool) -> None:
    floor: set[object] = set()
    for event in events:
        if event.get("done") == "mkdir":
            floor.add(event["name"])
        elif event.get("do") == "rmdir":
            floor.discard(event["name"])
    assert floor <= set(os.listdir(folder))
    for path in folder.rglob("*"):
        if path.is_file():
            assert set(path.read_bytes()) <= set(b"xyz\0"), path
            assert path.stat().st_nlink in (1, 2)


CHECKS: dict[str, Callable[[Path, list[Event], bool], None]] = {
    "publish": check_blocks,
    "append": check_log,
    "overwrite": check_pages,
    "large": check_large,
    "names": check_names,
}


# -- the tests ---------------------------------------------------------------------------------------


@pytest.mark.timeout(900)
def test_killed_under_load(lab: Lab) -> None:
    for number in range(ROUNDS):
        lab.start_clients()
        lab.mount.kill()
        lab.end_clients()
        lab.check()
        lab.remount()
        if number % 10 == 9:
            lab.mount.unmount()
            lab.check()
            lab.mount.mount()


@pytest.mark.timeout(300)
def test_killed_while_it_unmounts(lab: Lab) -> None:
    for _ in range(6):
        lab.start_clients()
        lab.end_clients()
        unmounting = subprocess.Popen(["umount", str(lab.mount.point)])
        select.select([], [], [], lab.rng.random() * 0.08)
        lab.mount.remove()
        unmounting.wait(PATIENCE_S)
        lab.check()
        lab.remount()


@pytest.mark.timeout(300)
def test_terminated_under_load(lab: Lab) -> None:
    """SIGTERM loses nothing that returned, fsynced or not."""
    for _ in range(4):
        lab.start_clients()
        lab.mount.terminate()
        lab.end_clients()
        lab.check()
        lab.remount(everything=KINDS)


@pytest.mark.timeout(300)
def test_killed_while_it_publishes_strictly(rng: random.Random) -> None:
    """A rename or an unlink that returned is in the store, without any fsync."""
    with temporary_lab(rng, "publish.mode=strict") as lab:
        for _ in range(8):
            lab.start_clients()
            lab.mount.kill()
            lab.end_clients()
            lab.check()
            lab.remount(everything=("publish",))
