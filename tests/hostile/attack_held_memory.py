"""``attack_held_memory.py UID MOUNT KIND FOLDER``: goes on to hold what the daemon has given back.

A line each round, for a word each: ``arenas`` maps all arenas of blocks in its own folder, and then closes the folder
to others, which ends them; ``holes`` reads all of such arenas, also where no block is; ``index`` does so with the
index of the folder, a namespace of blocks; ``indexes`` maps those of many folders in it; ``rings`` drops a ring that
it goes on to map, until it gets no more. ``free`` as a word: closes all that it holds.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Callable
from errno import EDQUOT
from pathlib import Path

from attacker_kit import DROP_RING, GET, MAP_ARENA, PUT, VIEW, Attacker, become, memfd, say, sqe, wait_for_word

MIB = 1 << 20
MAP_INDEX = 14
BLOCKS = 8
AUX_SIZE = 4 * MIB
RINGS = 64
CONNECTIONS, INDEXES = 24, 64
CLIENTS: list[Attacker] = []


class Patient(Attacker):
    """Its daemon may be killed."""

    def answer(self) -> tuple[int, tuple[int, ...], list[int]]:
        return self.last_answer()


HELD: list[mmap.mmap] = []
DESCRIPTORS: list[int] = []


def hold(descriptor: int, size: int, prot: int = mmap.PROT_READ) -> None:
    HELD.append(mmap.mmap(descriptor, size, prot=prot))
    DESCRIPTORS.append(descriptor)


def again(ask: Callable[[], int]) -> int:
    """A daemon that was killed meanwhile had taken the request: ask the next one."""
    while True:
        try:
            return ask()
        except InterruptedError:
            pass


def arenas(mount: Path, folder: Path) -> None:
    map_arenas(mount, folder, [2 * MIB] * BLOCKS)
    close_and_open(folder)


def holes(mount: Path, folder: Path) -> None:
    map_arenas(mount, folder, [4096 * (number + 1) for number in range(BLOCKS)])
    for mapping in HELD:
        assert not sum(mapping[8 * MIB :: 4096])
        mapping.close()
    HELD.clear()


def map_arenas(mount: Path, folder: Path, sizes: list[int]) -> None:
    client, memory = Patient(mount), memfd(2 * MIB)
    namespace = again(lambda: client.namespace(folder, 0o644))
    iov, ring = again(lambda: client.iov(memory, 2 * MIB)), client.ring(8)
    known = set()
    for number, size in enumerate(sizes):
        ring.map[ring.aux] = number + 1
        for entry in (
            sqe(PUT, handle=namespace, iov=iov, length=size, key_length=1),
            sqe(GET, handle=namespace, iov=iov, length=2 * MIB, key_length=1, flags=VIEW),
        ):
            ring.push(entry)
            _, result, _, arena, _ = ring.wait()[0]
            assert result == size, result
        if arena and arena not in known:
            known.add(arena)
            client.request(MAP_ARENA, arena)
            error, values, descriptors = client.answer()
            assert not error
            hold(descriptors[0], values[0])
    client.close()


def index(mount: Path, folder: Path) -> None:
    (folder / "block").write_bytes(b"x" * 5000)
    client = Attacker(mount)
    client.request(MAP_INDEX, client.namespace(folder, 0o644), 0)
    error, values, descriptors = client.answer()
    assert not error
    hold(descriptors[0], values[0])
    DESCRIPTORS.append(descriptors[1])
    client.close()
    close_and_open(folder)


def indexes(mount: Path, folder: Path) -> None:
    """As many as it gets."""
    folders = [folder / str(number) for number in range(INDEXES)]
    for path in folders:
        path.mkdir()
        (path / "block").write_bytes(b"x")
    for _ in range(CONNECTIONS):
        client = Attacker(mount)
        CLIENTS.append(client)
        for path in folders:
            client.request(MAP_INDEX, client.namespace(path, 0o644), 0)
            error, _, descriptors = client.answer()
            for descriptor in descriptors:
                os.close(descriptor)
            if error:
                assert error == EDQUOT, error
                return
    raise AssertionError("it gets all that it asks for")


def close_and_open(folder: Path) -> None:
    """The daemon gives all that others could see of the folder back."""
    for mode in (0o711, 0o755):
        folder.chmod(mode)


def rings(mount: Path, _: Path) -> None:
    client = Attacker(mount)
    try:
        for _ in range(RINGS):
            client.request(5 + 1, 8, AUX_SIZE, 0)  # ADD_RING
            error, values, descriptors = client.answer()
            if error:
                raise OSError(error, os.strerror(error))
            hold(descriptors[0], values[1], mmap.PROT_READ | mmap.PROT_WRITE)
            for bell in descriptors[1:]:
                os.close(bell)
            HELD[-1][4096 : values[1]] = bytes(values[1] - 4096)  # all of it is there
            client.ask(DROP_RING, values[0])
    except OSError as error:
        assert error.errno == EDQUOT, error
    client.close()


def main() -> None:
    uid, mount, kind, folder = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    become(uid)
    word = "again"
    while word == "again":
        {"arenas": arenas, "holes": holes, "index": index, "indexes": indexes, "rings": rings}[kind](mount, folder)
        say(count=len(HELD))
        while (word := wait_for_word()) in ("look", "free"):
            if word == "free":
                for mapping in HELD:
                    mapping.close()
                for descriptor in DESCRIPTORS:
                    os.close(descriptor)
                HELD.clear()
                DESCRIPTORS.clear()
            say(held=sum(os.fstat(descriptor).st_blocks * 512 for descriptor in DESCRIPTORS))


if __name__ == "__main__":
    main()
