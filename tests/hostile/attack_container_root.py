"""``attack_container_root.py UID MOUNT FOLDER MAPS CAPABILITY...``: uid 0 that the kernel refuses what others may keep.

It keeps the capabilities with those numbers alone. MAPS "" leaves it in its user namespace, else it enters a child
namespace, where these ids ("0,65532") are mapped to themselves. In FOLDER it tries the same on each of the blocks, by
system calls and through a ring, and says where only one of them was allowed. Then it takes rings until it is refused.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from collections.abc import Callable, Iterator
from errno import EDQUOT
from pathlib import Path

from attacker_kit import DELETE, EXISTS, GET, OPEN_NAMESPACE, PREFETCH, PUT, VIEW, Attacker, Ring, memfd, say, sqe

CLONE_NEWUSER = 0x10000000
PR_SET_PDEATHSIG, PR_CAPBSET_DROP = 1, 24
CAPABILITY_VERSION = 0x20080522
CAPABILITY_COUNT = 41
SIGKILL = 9
SIZE = 4096
RINGS_MAX = 4
OTHER = 65532
FOLDERS = (
    (OTHER, OTHER, 0o700),
    (OTHER, OTHER, 0o711),
    (OTHER, OTHER, 0o1777),
    (OTHER, 0, 0o770),
    (0, OTHER, 0o755),
    (0, 0, 0o500),
)
"""owner, group and mode"""
FILES = (
    (OTHER, OTHER, 0o600),
    (OTHER, OTHER, 0o644),
    (OTHER, OTHER, 0o000),
    (OTHER, 0, 0o640),
    (OTHER, 0, 0o604),
    (0, 0, 0o600),
    (0, OTHER, 0o060),
)
COPIES = 5
"""of each block, one for a trial"""

libc = ctypes.CDLL(None, use_errno=True)


def keep_capabilities(wanted: set[int]) -> None:
    """Those of ``wanted`` that this process has."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    kept = {number for number in wanted if int(fields["CapPrm"], 16) >> number & 1}
    for number in range(CAPABILITY_COUNT):
        if number not in kept:
            libc.prctl(PR_CAPBSET_DROP, number, 0, 0, 0)
    mask = sum(1 << number for number in kept)
    low, high = mask & 0xFFFFFFFF, mask >> 32
    header = struct.pack("<II", CAPABILITY_VERSION, 0)
    assert libc.capset(header, struct.pack("<6I", low, low, 0, high, high, 0)) == 0, ctypes.get_errno()


def enter_child_namespace(ids: list[str]) -> None:
    """Return in a child process that is uid 0 of a user namespace of its own, with all capabilities there."""
    asks, answers = os.pipe(), os.pipe()
    child = os.fork()
    if child:
        os.read(asks[0], 1)
        for name in ("uid_map", "gid_map"):
            Path(f"/proc/{child}/{name}").write_text("".join(f"{number} {number} 1\n" for number in ids))
        os.write(answers[1], b"x")
        os._exit(os.waitpid(child, 0)[1] != 0)
    libc.prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)
    assert libc.unshare(CLONE_NEWUSER) == 0, ctypes.get_errno()
    os.write(asks[1], b"x")
    os.read(answers[0], 1)


class ByKernel:
    """Whether system calls may."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, name: str) -> bool:
        return _may(lambda: os.close(os.open(self._folder / name, os.O_RDONLY)))

    def exists(self, name: str) -> bool:
        return _may(lambda: os.stat(self._folder / name))

    def replace(self, name: str) -> bool:
        def rename() -> None:
            other = self._folder / f"{name}.new"
            os.close(os.open(other, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            os.rename(other, self._folder / name)

        return _may(rename)

    def delete(self, name: str) -> bool:
        return _may(lambda: os.unlink(self._folder / name))

    def list(self) -> bool:
        return _may(lambda: os.listdir(self._folder))


def _may(call: Callable[[], object]) -> bool:
    try:
        call()
    except PermissionError:
        return False
    return True


class ByRing:
    """Whether a ring may."""

    def __init__(self, client: Attacker, ring: Ring, iov: int, folder: Path) -> None:
        descriptor = os.open(folder, os.O_PATH)
        self._namespace = client.ask(OPEN_NAMESPACE, 0o600, descriptors=[descriptor])[0]
        os.close(descriptor)
        self._ring, self._iov = ring, iov
        self.had_view = False

    def read(self, name: str) -> bool:
        self._many(PREFETCH, name)
        _, result, _, arena, _ = self._one(GET, name.encode(), iov=self._iov, length=SIZE, flags=VIEW)
        self.had_view |= arena != 0
        return result >= 0

    def exists(self, name: str) -> bool:
        return self._many(EXISTS, name)

    def replace(self, name: str) -> bool:
        return self._one(PUT, name.encode(), iov=self._iov, length=16)[1] >= 0

    def delete(self, name: str) -> bool:
        return self._many(DELETE, name)

    def _many(self, operation: int, name: str) -> bool:
        keys = struct.pack("<H", len(name)) + name.encode()
        return self._one(operation, keys, length=1, offset=512)[1] >= 0

    def _one(self, operation: int, keys: bytes, **fields: int) -> tuple[int, ...]:
        self._ring.map[self._ring.aux : self._ring.aux + len(keys)] = keys
        self._ring.push(sqe(operation, handle=self._namespace, key_length=len(keys), **fields))
        return self._ring.wait(1)[0]


def trials(client: Attacker, top: Path) -> Iterator[tuple[str, bool, bool]]:
    """(what is tried, the kernel allows it, the ring allows it). Each block of the table is there for each trial."""
    ring, iov = client.ring(8), client.iov(memfd(SIZE), SIZE)
    for folder in range(len(FOLDERS)):
        kernel, by_ring = ByKernel(top / str(folder)), ByRing(client, ring, iov, top / str(folder))
        for file in range(len(FILES)):
            where = f"{FOLDERS[folder]}/{FILES[file]}"
            yield f"read {where}", kernel.read(f"{file}-0"), by_ring.read(f"{file}-0")
            yield f"stat {where}", kernel.exists(f"{file}-0"), by_ring.exists(f"{file}-0")
            yield f"replace {where}", kernel.replace(f"{file}-1"), by_ring.replace(f"{file}-2")
            yield f"delete {where}", kernel.delete(f"{file}-3"), by_ring.delete(f"{file}-4")
        if by_ring.had_view:
            yield f"view {FOLDERS[folder]}", kernel.list(), True


def rings_until_refused(client: Attacker) -> int:
    """How many, at most RINGS_MAX."""
    for count in range(RINGS_MAX):
        try:
            client.ring(8, 0)
        except OSError as error:
            assert error.errno == EDQUOT
            return count
    return RINGS_MAX


def main() -> None:
    mount, top, mapped, *kept = sys.argv[2:]
    os.setgroups([])
    if mapped:
        enter_child_namespace(mapped.split(","))
    keep_capabilities({int(number) for number in kept})
    client = Attacker(mount)
    rows = list(trials(client, Path(top)))
    say(
        allowed=sum(by_kernel for _, by_kernel, _ in rows),
        refused=sum(not by_kernel for _, by_kernel, _ in rows),
        unlike=[
            f"{what}: kernel {by_kernel}, ring {by_ring}" for what, by_kernel, by_ring in rows if by_kernel != by_ring
        ],
        rings=rings_until_refused(client),
    )


if __name__ == "__main__":
    main()
