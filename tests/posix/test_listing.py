"""Directory listings: complete, each name once, whatever else happens meanwhile."""

import os
import random
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from engine_pairs import Engines
from posix_calls import Directory, opened


def make(folder: Path, names: set[str]) -> None:
    for name in names:
        os.close(os.open(folder / name, os.O_CREAT | os.O_WRONLY))


def test_an_empty_directory(folder: Path) -> None:
    assert os.listdir(folder) == []


def test_dot_and_dot_dot_come_once(folder: Path) -> None:
    make(folder, {"a", "b"})
    listing = Directory(folder)
    names = list(iter(listing.read, None))
    listing.close()
    assert sorted(names) == [b".", b"..", b"a", b"b"]


@pytest.mark.parametrize("count", [1, 127, 128, 129, 1000])
def test_every_name_once(folder: Path, count: int) -> None:
    names = {f"name-{number}" for number in range(count)}
    make(folder, names)
    assert sorted(os.listdir(folder)) == sorted(names)


def test_kinds_and_inode_numbers_are_right(folder: Path) -> None:
    (folder / "file").touch()
    (folder / "directory").mkdir()
    (folder / "link").symlink_to("file")
    os.mkfifo(folder / "fifo")
    with os.scandir(folder) as entries:
        for entry in entries:
            status = os.lstat(folder / entry.name)
            assert entry.inode() == status.st_ino
            assert entry.is_file(follow_symlinks=False) == stat.S_ISREG(status.st_mode)
            assert entry.is_dir(follow_symlinks=False) == stat.S_ISDIR(status.st_mode)
            assert entry.is_symlink() == stat.S_ISLNK(status.st_mode)


def test_what_a_listing_shows_can_be_used_at_once(folder: Path) -> None:
    """A listing hands attributes to the kernel: they must be as good as a lookup's."""
    for number in range(200):
        (folder / f"{number}").write_bytes(b"x" * number)
    with os.scandir(folder) as entries:
        for entry in entries:
            assert entry.stat().st_size == int(entry.name)
            os.unlink(entry.path)
    assert os.listdir(folder) == []


def test_rewinding_shows_what_is_new(folder: Path) -> None:
    make(folder, {"old"})
    with opened(folder, os.O_RDONLY) as fd:
        assert os.listdir(fd) == ["old"]
        make(folder, {"new"})
        assert sorted(os.listdir(fd)) == ["new", "old"]


def test_positions_can_be_told_and_returned_to(folder: Path) -> None:
    make(folder, {f"name-{number}" for number in range(1000)})
    listing = Directory(folder)
    positions, names = [], []
    while True:
        position = listing.tell()
        name = listing.read()
        if name is None:
            break
        positions.append(position)
        names.append(name)
    for index in (0, 1, 2, 3, 500, len(names) - 1, 129, 7):
        listing.seek(positions[index])
        assert listing.read() == names[index]
    listing.close()


CHURN = """
import os, random, sys
folder, seed = sys.argv[1], int(sys.argv[2])
rng = random.Random(seed)
print("started", flush=True)
number = 0
while os.path.exists(f"{folder}/../churn"):
    number += 1
    name = f"{folder}/passing-{rng.randrange(300)}"
    try:
        if rng.random() < 0.5:
            os.close(os.open(name, os.O_CREAT | os.O_WRONLY))
        elif rng.random() < 0.5:
            os.unlink(name)
        else:
            os.rename(name, f"{folder}/passing-{rng.randrange(300)}")
    except FileNotFoundError:
        pass
"""


def test_stable_names_come_exactly_once_while_others_change(folder: Path, engines: Engines, seed: int) -> None:
    inside = folder / "inside"
    inside.mkdir()
    count = 600 if engines.is_shared else 10_000  # where each may be a round trip to servers
    stable = {f"stable-{number}" for number in range(count)}
    make(inside, stable)
    (folder / "churn").touch()
    churner = subprocess.Popen([sys.executable, "-c", CHURN, str(inside), str(seed)], stdout=subprocess.PIPE)
    try:
        assert churner.stdout is not None
        assert churner.stdout.readline() == b"started\n"
        for _ in range(5):
            names = os.listdir(inside)
            assert sorted(name for name in names if name in stable) == sorted(stable)
            assert len(names) == len(set(names))
    finally:
        (folder / "churn").unlink()
        assert churner.wait(30) == 0
        churner.stdout.close()


def test_a_slow_reader_sees_each_stable_name_once(folder: Path, rng: random.Random) -> None:
    """Half of the names go, and as many others come, while a listing stands in the middle."""
    stable = {f"stable-{number}" for number in range(300)}
    going = {f"going-{number}" for number in range(300)}
    make(folder, stable | going)
    listing = Directory(folder)
    seen = [listing.read() for _ in range(200)]
    for name in sorted(going, key=lambda _: rng.random()):
        os.unlink(folder / name)
        os.close(os.open(folder / f"new-{name}", os.O_CREAT | os.O_WRONLY))
    seen += list(iter(listing.read, None))
    listing.close()
    found = [os.fsdecode(name) for name in seen if name and os.fsdecode(name) in stable]
    assert sorted(found) == sorted(stable)
