"""``attack_siege.py UID MOUNT KIND SEED``: one way of being a nuisance, again and again until it is killed."""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import random
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from attacker_kit import GET, HELLO, PUT, READ, VIEW, Attacker, Ring, become, memfd, say, sqe

KIB, MIB = 1 << 10, 1 << 20
RINGS = 24
KEYS = 512
PUNCH_HOLE = 3
"""FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE"""
PEERS_MAX = 200
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None)
LIBC.fallocate64.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


class Siege:
    """One attacker with a folder of its own. Every method is one round."""

    def __init__(self, mount: str, folder: Path, rng: random.Random) -> None:
        self.mount = mount
        self.folder = folder
        self.rng = rng

    def garbage(self) -> None:
        """Random entries, then random messages, then indices that cannot be."""
        client = Attacker(self.mount)
        with suppress(ConnectionResetError, OSError):
            ring = client.ring(64)
            client.iov(memfd(MIB), MIB)
            for _ in range(200):
                ring.push(*[self.rng.randbytes(64) for _ in range(32)])
                ring.reap()
            for _ in range(20):
                client.send(self.rng.randbytes(self.rng.randrange(1, 200)))
            ring.words[16] = self.rng.getrandbits(63)
            os.eventfd_write(ring.daemon_bell, 1)
            client.answer()
        client.close()

    def refused(self) -> None:
        """Many rings of entries that are refused at once."""
        self._busy(lambda client: sqe(READ, handle=99, iov=99, length=4096))

    def readers(self) -> None:
        """Many rings of small reads."""
        path = self.folder / "file"
        path.write_bytes(self.rng.randbytes(MIB))
        self._busy(lambda client: sqe(READ, handle=client.file(path), iov=client.iov(memfd(MIB), MIB), length=4096))

    def _busy(self, make: Callable[[Attacker], bytes]) -> None:
        client = Attacker(self.mount)
        with suppress(ConnectionResetError, OSError):
            entry = make(client)
            rings = [client.ring(64) for _ in range(RINGS)]
            for ring in itertools.islice(itertools.cycle(rings), 20_000):
                ring.push(*[entry] * max(0, 64 - (ring.words[16] - ring.words[32])))
                ring.reap()
        client.close()

    def lingering(self) -> None:
        """Sockets that take an hour to close, where no descriptor belongs."""
        for place in range(3):
            stuck = _stuck_socket()
            client = Attacker(self.mount, hello=place > 0)
            with suppress(OSError):
                if place == 0:
                    client.request(HELLO, 1, descriptors=[stuck])
                elif place == 1:
                    client.send(b"garbage", [stuck])
                else:
                    client.iov(stuck, MIB)
            _close_beside(stuck)
            client.close()

    def hoarding(self) -> None:
        """As many iovs, rings, views as there are to be had."""
        client = Attacker(self.mount)
        with suppress(OSError):
            memory = memfd(64 * KIB)
            for _ in range(2000):
                client.iov(memory, 64 * KIB)
        rings: list[Ring] = []
        with suppress(OSError):
            namespace = client.namespace(self.folder)
            iov = client.iov(memfd(MIB), MIB)
            for _ in range(64):
                rings.append(client.ring(64, 4 * MIB))
            for size in range(64):
                self._key(rings[0], size)
                entry = {"handle": namespace, "key_offset": 0, "key_length": 8, "length": 4 * KIB * (size + 1)}
                rings[0].push(sqe(PUT, iov=iov, **entry), sqe(GET, flags=VIEW, **entry))
                rings[0].wait(2)
        client.close()

    def memory(self) -> None:
        """Reads of a hole, and of a file, into memory that is not there; punched out again."""
        sparse, full = self.folder / "sparse", self.folder / "full"
        with sparse.open("wb") as file:
            file.truncate(64 << 30)
        full.write_bytes(self.rng.randbytes(16 * MIB))
        client = Attacker(self.mount)
        with suppress(ConnectionResetError, OSError):
            size = 1 << 30
            descriptor = memfd(size)
            iov, ring = client.iov(descriptor, size), client.ring(64)
            for path, length in ((sparse, 64 * MIB), (full, 16 * MIB)):
                handle = client.file(path)
                for start in range(0, size, length):
                    ring.push(sqe(READ, handle=handle, iov=iov, iov_offset=start, length=length))
                    ring.wait()
                    LIBC.fallocate64(descriptor, PUNCH_HOLE, start, length)
        client.close()

    def putting(self) -> None:
        """Blocks over blocks, and their removal."""
        client = Attacker(self.mount)
        with suppress(ConnectionResetError, OSError):
            namespace, ring = client.namespace(self.folder), client.ring(64)
            iov = client.iov(memfd(64 * KIB), 64 * KIB)
            for number in range(KEYS):
                self._key(ring, number)
                ring.push(sqe(PUT, handle=namespace, iov=iov, key_length=8, length=64 * KIB))
                ring.wait()
        client.close()
        for number in range(KEYS):
            with suppress(FileNotFoundError):
                (self.folder / f"key{number:05d}").unlink()

    def naming(self) -> None:
        """Names, attributes, and files that stay open, until there is no room; then all goes."""
        descriptors = []
        try:
            for number in range(2000):
                path = self.folder / f"name-{number}-{'x' * 200}"
                descriptors.append(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
                os.write(descriptors[-1], b"x")
                for attribute in range(4):
                    os.setxattr(path, f"user.{attribute}", self.rng.randbytes(4000))
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EMFILE):
                raise
        for descriptor in descriptors:
            os.close(descriptor)
        for path in list(self.folder.iterdir()):
            path.unlink()

    def _key(self, ring: Ring, number: int) -> None:
        ring.map[ring.aux : ring.aux + 8] = b"key%05d" % number


def _stuck_socket() -> int:
    """A TCP socket with unsent data and SO_LINGER: whoever closes it last waits for an hour."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client = socket.socket()
        client.connect(server.getsockname())
        PEERS.append(server.accept()[0])
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 3600))
    client.setblocking(False)
    with suppress(BlockingIOError):
        while True:
            client.send(bytes(65536))
    if len(PEERS) > PEERS_MAX:
        PEERS.pop(0).close()
    return client.detach()


def _close_beside(stuck: int) -> None:
    """Whoever has it last waits for an hour. Where that is this process, the attack goes on meanwhile."""
    threading.Thread(target=os.close, args=(stuck,), daemon=True).start()


PEERS: list[socket.socket] = []
"""whose other ends were passed on"""
KINDS = ("garbage", "refused", "readers", "lingering", "hoarding", "memory", "putting", "naming")


def main() -> None:
    uid, mount, kind, seed = int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
    become(uid)
    folder = Path(mount, f"attacker-{uid}")
    for rounds in itertools.count(1):
        siege = Siege(mount, folder, random.Random(f"{seed} {rounds}"))
        if kind == "lingering":
            siege.lingering()  # in this process, whose sockets last
        else:
            _in_a_child(getattr(siege, kind))
        say(rounds=rounds)


def _in_a_child(attack: Callable[[], None]) -> None:
    """It takes what it has with it: an attacker that runs out of descriptors attacks no more."""
    child = os.fork()
    if not child:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        try:
            attack()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    if status:
        raise SystemExit(f"the attack ended with status {status}")


if __name__ == "__main__":
    main()
