"""``attack_metadata.py UID MOUNT KIND``: fill the volume with records that hold no bytes, until it is refused.

Says how many were made and with what error it ended; then, for each word, removes half of what it made and fills again.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from attacker_kit import PUT, Attacker, become, memfd, say, sqe, wait_for_word

Step = Callable[[], object]
"""makes one more; its result undoes that"""


def names(folder: Path, length: int) -> Iterator[Path]:
    number = 0
    while True:
        yield folder / f"{number:0{length}d}"
        number += 1


def making(folder: Path, make: Callable[[Path], object], undo: Callable[[Path], object], length: int) -> Step:
    fresh = names(folder, length)

    def step() -> object:
        path = next(fresh)
        make(path)
        return lambda: undo(path)

    return step


def attributes(folder: Path) -> Step:
    """16 of them for each file, of many sizes."""
    number = 0
    path = folder / "0"

    def step() -> object:
        nonlocal number, path
        if number % 16 == 0:
            path = folder / str(number)
            path.touch()
        name = f"user.{number}"
        os.setxattr(path, name, os.urandom((number * 997) % 65536))
        number += 1
        return lambda place=path: os.removexattr(place, name)

    return step


def links(folder: Path) -> Step:
    """Of many files, as one has a limited number."""
    fresh = names(folder, 200)
    first: list[Path] = []
    made = 0

    def step() -> object:
        nonlocal made
        path = next(fresh)
        if made % 1000 == 0:
            path.touch()
            first[:] = [path]
        else:
            os.link(first[0], path)
        made += 1
        return path.unlink if first[0] != path else None

    return step


def deep(folder: Path) -> Step:
    """Directories one in the other, of which each has one file."""
    here = os.open(folder, os.O_RDONLY)

    def step() -> object:
        nonlocal here
        os.close(os.open("f" * 255, os.O_CREAT, dir_fd=here))
        parent = here
        made = os.dup(parent)
        os.mkdir("d", dir_fd=parent)
        here = os.open("d", os.O_RDONLY, dir_fd=parent)
        os.close(parent)

        def undo() -> None:
            os.unlink("f" * 255, dir_fd=made)
            os.close(made)

        return undo if made < 500 else os.close(made)

    return step


def puts(client: Attacker, folder: Path) -> Step:
    """Empty blocks through a ring, with names of 200 bytes, as many at once as the ring takes."""
    ring = client.ring(256)
    iov = client.iov(memfd(4096), 4096)
    space = client.namespace(folder)
    number = 0

    def step() -> object:
        nonlocal number
        keys = [b"%0200d" % (number + index) for index in range(16)]
        number += 16
        for index, key in enumerate(keys):
            ring.map[ring.aux + 256 * index : ring.aux + 256 * index + len(key)] = key
        ring.push(
            *[
                sqe(PUT, handle=space, iov=iov, key_offset=256 * index, key_length=200, user_data=index)
                for index in range(16)
            ]
        )
        results = {row[0]: row[1] for row in ring.wait(16)}
        refused = [-result for result in results.values() if result < 0]
        if refused:
            raise OSError(refused[0], os.strerror(refused[0]))

    return step


def step_of(kind: str, client: Attacker, folder: Path) -> Step:
    kinds: dict[str, Callable[[], Step]] = {
        "attributes": lambda: attributes(folder),
        "files": lambda: making(folder, Path.touch, Path.unlink, 30),
        "names": lambda: making(folder, Path.touch, Path.unlink, 255),
        "directories": lambda: making(folder, Path.mkdir, Path.rmdir, 100),
        "symlinks": lambda: making(folder, lambda path: path.symlink_to("t" * 4000), Path.unlink, 20),
        "links": lambda: links(folder),
        "deep": lambda: deep(folder),
        "puts": lambda: puts(client, folder),
    }
    return kinds[kind]()


def fill(step: Step, undo: list[Callable[[], object]]) -> tuple[int, int]:
    """(how many were made, errno that ended it)"""
    made = 0
    while True:
        try:
            undone = step()
        except OSError as error:
            return made, error.errno or 0
        made += 1
        if callable(undone):
            undo.append(undone)


def main() -> None:
    uid, mount, kind = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    become(uid)
    folder = Path(mount) / "attack"
    client = Attacker(mount)
    step = step_of(kind, client, folder)
    undo: list[Callable[[], object]] = []
    made, error = fill(step, undo)
    say(made=made, error=error)
    while wait_for_word():
        half = undo[::2]
        undo[:] = undo[1::2]
        for call in half:
            call()
        made, error = fill(step, undo)
        say(removed=len(half), made=made, error=error)


if __name__ == "__main__":
    main()
