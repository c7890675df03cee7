"""A client that does everything wrong: ``python ring_fuzzer.py MOUNT SEED UID``, one JSON line answers another.

``{"seconds": 5}``: for so long it sends random messages, writes random bytes and random entries into rings, takes
memory away while it is in use, passes descriptors of all kinds, and looks through all memory that it has for the
secret, which this user may not read. It answers with how often it did what, and how often it found the secret.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import random
import socket
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
import numpy.typing as npt
from posix_calls import fallocate
from ring_lab import RawClient, RawRing

from kvfuse.usrbio.protocol.wire import (
    CQE,
    FILE_OPS,
    MANY_KEY_OPS,
    MESSAGE_SIZE_MAX,
    PARENTS_MAX,
    SQE,
    Flag,
    Message,
    Op,
    Request,
    Word,
)

SECRET = b"\x5e\xc4\xe7\x91the secret\x07\x13"
KIB, MIB = 1 << 10, 1 << 20
PUNCH = 3
"""FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE"""
CLIENTS_MAX, RINGS_MAX, THINGS_MAX = 6, 3, 12
NUMBERS = (
    0, 1, 2, 3, 7, 8, 63, 64, 255, 256, 4095, 4096, 4097, 65535, 65536, MIB - 1, MIB, MIB + 1, 4 * MIB, 1 << 30,
    (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 40, (1 << 40) + 1, 1 << 62, (1 << 62) - 1,
    (1 << 63) - 1, 1 << 63, (1 << 64) - 4096, (1 << 64) - 1,
)  # fmt: skip
SEALS = (fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW, fcntl.F_SEAL_WRITE, 0x10, fcntl.F_SEAL_SEAL)
KEYS = (b"secret", b".", b"..", b"/", b"\0", b"%41", b".kvfuse", b"sub", b"x" * 255)


class Client:
    """A connection, and what came of it."""

    def __init__(self, mount: Path) -> None:
        self.raw = RawClient(mount)
        self.rings: list[RawRing] = []
        self.iovs: list[tuple[int, int, mmap.mmap]] = []
        """(handle, descriptor, mapping of its first page)"""
        self.handles: list[int] = [0, 1, 2, 3]
        self.files: list[int] = []
        self.namespaces: list[int] = []

    def close(self) -> None:
        self.raw.socket.close()
        for ring in self.rings:
            ring.close()
        for _, descriptor, mapping in self.iovs:
            mapping.close()
            os.close(descriptor)


class Fuzzer:
    """Actions are methods that begin with ``do_``; each ends with OSError or ValueError where it meets resistance."""

    def __init__(self, mount: Path, seed: int) -> None:
        self.mount = mount
        self.rng = random.Random(seed)
        self.clients: list[Client] = []
        self.pool = list(self.descriptors())
        self.actions = [getattr(self, name) for name in dir(self) if name.startswith("do_")]
        self.done: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.answers: Counter[int] = Counter()
        """errors of completions; 0: what was done"""
        self.found = 0

    def descriptors(self) -> list[int]:
        """Of every kind that there is."""
        folder = self.mount / "public"
        left, right = socket.socketpair()
        right.close()
        memory = os.memfd_create("fuzz", os.MFD_ALLOW_SEALING)
        os.ftruncate(memory, MIB)
        temporary, _ = tempfile.mkstemp()
        return [
            os.open(folder, os.O_RDONLY), os.open(folder, os.O_PATH), os.open(self.mount, os.O_RDONLY),
            os.open(self.mount / ".kvfuse", os.O_RDONLY), os.open(self.mount / ".kvfuse/stats", os.O_RDONLY),
            os.open(self.mount / ".kvfuse/control.sock", os.O_PATH), os.open(self.mount / "private", os.O_RDONLY),
            os.open(self.mount / "private/secret", os.O_PATH), os.open(folder / "sub", os.O_RDONLY),
            *(os.open(folder / "f0", flags) for flags in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR, os.O_PATH)),
            os.open(folder / "f1", os.O_RDWR | os.O_APPEND), os.open(folder / "b0", os.O_RDONLY),
            os.open(f"/proc/self/fd/{memory}", os.O_RDONLY), memory, temporary, left.detach(),
            *os.pipe(), os.eventfd(0), os.open("/dev/null", os.O_RDWR), os.open("/dev/zero", os.O_RDWR),
            os.open("/", os.O_RDONLY), os.open("/proc/self/status", os.O_RDONLY), os.open("/dev/shm", os.O_PATH),
        ]  # fmt: skip

    def run(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            action = self.rng.choice(self.actions)
            if not self.clients or (len(self.clients) < CLIENTS_MAX and self.rng.random() < 0.05):
                self.clients.append(Client(self.mount))
            client = self.rng.choice(self.clients)
            try:
                action(client)
                self.done[action.__name__] += 1
            except ConnectionError:
                if client in self.clients:
                    self.drop(client)
            except (OSError, ValueError, IndexError):
                self.refused[action.__name__] += 1
        while self.clients:
            self.drop(self.clients[0])

    def drop(self, client: Client) -> None:
        self.look(client)
        self.clients.remove(client)
        client.close()

    def look(self, client: Client) -> None:
        """For the secret, in all memory that the daemon may have written to."""
        areas = [bytes(ring.memory.bytes) for ring in client.rings]
        areas += [os.pread(descriptor, MIB, 0) for _, descriptor, _ in client.iovs]
        self.found += sum(SECRET in area for area in areas)

    def number(self) -> int:
        kind = self.rng.random()
        if kind < 0.5:
            return self.rng.choice(NUMBERS)
        return self.rng.randrange(2 * MIB) if kind < 0.8 else self.rng.getrandbits(64)

    def random_bytes(self, size: int) -> npt.NDArray[np.uint8]:
        return np.frombuffer(bytearray(self.rng.randbytes(size)), np.uint8)

    # -- messages ------------------------------------------------------------------------------------

    def do_close(self, client: Client) -> None:
        if self.rng.random() < 0.1:
            self.drop(client)

    def do_send_garbage(self, client: Client) -> None:
        if self.rng.random() < 0.9:  # it is the end of the connection
            return
        size = self.rng.choice([1, 7, 63, 64, 65, MESSAGE_SIZE_MAX, MESSAGE_SIZE_MAX + 1, 60_000])
        chosen = self.rng.sample(self.pool, self.rng.randrange(4)) if self.rng.random() < 0.5 else []
        client.raw.send(self.rng.randbytes(size), chosen)
        client.raw.receive()

    def do_ask_anything(self, client: Client) -> None:
        count = self.rng.choice([0, 0, 1, 1, 1, 2, 3, 4, 20])
        values = tuple(self.rng.choice([self.number(), *client.handles]) for _ in range(6))
        request = self.rng.choice([*Request, self.number() & 0xFFFFFFFF])
        message = Message(request, self.rng.getrandbits(32), self.rng.randrange(-5, 5), values, "text")
        client.raw.send(message.pack(), [self.rng.choice(self.pool) for _ in range(count)])
        reply, received = client.raw.receive()
        for descriptor in received:
            os.close(descriptor)
        if reply.status == 0:
            client.handles.append(reply.values[0])

    def do_do_not_read_the_answers(self, client: Client) -> None:
        if self.rng.random() < 0.95:
            return
        client.raw.socket.settimeout(0)
        try:
            for number in range(2000):
                client.raw.send(Message(self.rng.choice([3, 5, 6, 9, 10]), number, values=(self.number(),)).pack())
        finally:
            self.drop(client)

    def do_add_ring(self, client: Client) -> None:
        if len(client.rings) < RINGS_MAX:
            client.rings.append(client.raw.ring(self.rng.choice([1, 8, 64, 1024]), self.rng.choice([0, 4096, 70_000])))

    def do_add_iov(self, client: Client) -> None:
        if len(client.iovs) < THINGS_MAX:
            handle, descriptor = client.raw.iov(self.rng.choice([1, 4096, 5000, MIB, 1 << 32]))
            os.ftruncate(descriptor, max(os.fstat(descriptor).st_size, 4096))
            client.iovs.append((handle, descriptor, mmap.mmap(descriptor, 4096)))
            client.handles.append(handle)

    def do_add_file(self, client: Client) -> None:
        descriptor = os.open(self.mount / "public" / self.rng.choice(["f0", "f1", "b0"]), os.O_RDWR)
        try:
            access = self.rng.randrange(1, 4)
            client.files.append(client.raw.handle(Request.ADD_FILE, access, descriptors=[descriptor]))
        finally:
            os.close(descriptor)

    def do_add_namespace(self, client: Client) -> None:
        name = self.rng.choice(["public", "private"])
        folder = os.open(self.mount / name, os.O_RDONLY)
        try:
            client.namespaces.append(client.raw.handle(Request.OPEN_NAMESPACE, 0o644, descriptors=[folder]))
        finally:
            os.close(folder)

    def do_map_arena(self, client: Client) -> None:
        _, received = client.raw.ask(Request.MAP_ARENA, self.rng.choice([0, 1, 2, 3, self.number()]))
        for descriptor in received:
            self.found += SECRET in os.pread(descriptor, 64 * MIB, 0)
            os.close(descriptor)

    def do_change_things(self, client: Client) -> None:
        """Names and files that are in use, through the other door."""
        path = self.mount / "public" / self.rng.choice(["b0", "b1", "b2", "f0", "f1"])
        if self.rng.random() < 0.5:
            os.truncate(path, self.rng.choice([0, 1, 5000, MIB]))
        else:
            path.write_bytes(self.rng.randbytes(20_000))

    # -- rings ---------------------------------------------------------------------------------------

    def do_submit(self, client: Client) -> None:
        """Entries that are well formed, with fields of every kind."""
        ring = self.rng.choice(client.rings)
        sq = ring.memory.sq
        count = self.rng.randrange(1, len(sq) + 1)
        keys = [b"b%d" % self.rng.randrange(4), *self.rng.sample(KEYS, 2)]
        packed = np.array([len(key) for key in keys], "<u2").tobytes() + b"".join(keys)
        ring.memory.aux[: len(packed)] = np.frombuffer(packed, np.uint8)[: len(ring.memory.aux)]
        for index in range(min(count, 40)):
            self.fill(client, sq.place(sq.position + index), packed)
        sq.publish(min(count, 40))
        self.wake(ring)
        self.reap(ring)

    def fill(self, client: Client, row: np.void, packed: bytes) -> None:
        """An entry that makes sense, but for what chance puts into some of its fields."""
        rng = self.rng
        op = rng.choice(list(Op))
        handles = client.files if op in FILE_OPS else client.namespaces
        row["op"], row["priority"], row["flags"] = op, rng.randrange(3), 0
        row["parent"] = rng.choice((0, 0, 1, PARENTS_MAX))
        row["flags"] = rng.randrange(2) * (Flag.VIEW if op == Op.GET else Flag.PREFIX if op == Op.EXISTS else 0)
        row["handle"] = rng.choice([*(handles * 5), *client.handles]) & 0xFFFFFFFF
        row["iov"] = rng.choice([handle for handle, *_ in client.iovs] or [0])
        row["offset"], row["iov_offset"], row["length"] = rng.randrange(20_000), 0, rng.choice([1, 1000, 4096])
        row["key_offset"], row["key_length"] = 6, rng.choice([2, 2, 2, 1 + rng.randrange(len(packed) - 8)])
        row["user_data"], row["timeout_us"] = rng.randrange(4), rng.choice([0, 0, 0, 1, 50, 1000])
        if op in MANY_KEY_OPS:
            row["length"], row["key_offset"], row["key_length"], row["offset"] = 3, 0, len(packed), 1024
        if rng.random() < 0.4:
            field = rng.choice(SQE.names or ())
            row[field] = self.number() & ((1 << 8 * SQE[field].itemsize) - 1)

    def wake(self, ring: RawRing) -> None:
        os.set_blocking(ring.daemon_bell, False)
        os.eventfd_write(ring.daemon_bell, 1)

    def reap(self, ring: RawRing) -> None:
        """Take what is completed, as if it had all been asked for; sometimes not."""
        cq = ring.memory.cq
        count = cq.given - cq.position
        if not 0 < count <= len(cq) or self.rng.random() < 0.1:
            return
        rows = cq.read(count)
        cq.take(count)
        assert rows.dtype == CQE
        results = rows["result"]
        self.answers.update(results[(results < 0) & (results > -200)].tolist())
        self.answers[0] += int(np.count_nonzero((results >= 0) & (results <= MIB)))

    def do_reap(self, client: Client) -> None:
        self.reap(self.rng.choice(client.rings))

    def do_submit_bytes(self, client: Client) -> None:
        ring = self.rng.choice(client.rings)
        sq = ring.memory.sq
        count = self.rng.randrange(1, len(sq) + 1)
        rows = self.random_bytes(count * SQE.itemsize).view(SQE)
        rows["op"] %= 12
        sq.write(rows)
        sq.publish(count)
        self.wake(ring)
        self.reap(ring)

    def do_scribble(self, client: Client) -> None:
        """Anywhere: in the queues at any time, seldom in the header and the indices, for that is the end."""
        ring = self.rng.choice(client.rings)
        start = 0 if self.rng.random() < 0.05 else 4096
        position = self.rng.randrange(start, len(ring.memory.bytes))
        area = ring.memory.bytes[position : position + self.rng.randrange(1, 3000)]
        area[:] = self.random_bytes(len(area))
        self.wake(ring)

    def do_change_a_word(self, client: Client) -> None:
        ring = self.rng.choice(client.rings)
        word = self.rng.choice([Word.DAEMON_SLEEPS, Word.CLIENT_SLEEPS])
        if self.rng.random() < 0.05:
            word = self.rng.choice(list(Word))
        old = ring.memory.words[word]
        ring.memory.words[word] = self.rng.choice(
            [0, 1, self.number(), (old + self.rng.randrange(-70, 70)) % (1 << 64)]
        )
        self.wake(ring)

    def do_bells(self, client: Client) -> None:
        """Full, empty, waiting and not: whatever the daemon does with one must not wait."""
        ring = self.rng.choice(client.rings)
        for bell in (ring.daemon_bell, ring.client_bell):
            os.set_blocking(bell, False)
            for value in (b"\xfe" + b"\xff" * 7, b"\1" + b"\0" * 7):
                try:
                    if self.rng.random() < 0.5:
                        os.write(bell, value)
                    else:
                        os.read(bell, 8)
                except OSError:
                    pass
            os.set_blocking(bell, self.rng.random() < 0.5)

    # -- memory --------------------------------------------------------------------------------------

    def do_take_memory_away(self, client: Client) -> None:
        _, descriptor, _ = self.rng.choice(client.iovs)
        if self.rng.random() < 0.5:
            fallocate(descriptor, PUNCH, 0, 64 * KIB)
        os.ftruncate(descriptor, self.rng.choice([0, 1, 4096, MIB, 1 << 33]))

    def do_seal(self, client: Client) -> None:
        _, descriptor, _ = self.rng.choice(client.iovs)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, self.rng.choice(SEALS))

    def do_drop(self, client: Client) -> None:
        request = self.rng.choice([Request.DROP_FILE, Request.DROP_IOV, Request.CLOSE_NAMESPACE, Request.DROP_RING])
        if request == Request.DROP_RING and client.rings:
            ring = client.rings.pop()
            client.raw.error(request, ring.handle)
            ring.close()
        else:
            client.raw.error(request, self.rng.choice(client.handles + client.files + client.namespaces))


def main() -> None:
    mount, seed, uid = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
    fuzzer = Fuzzer(mount, seed)
    for line in sys.stdin:
        fuzzer.run(json.loads(line)["seconds"])
        report = {
            "done": dict(fuzzer.done), "refused": dict(fuzzer.refused), "answers": dict(fuzzer.answers),
            "found": fuzzer.found,
        }  # fmt: skip
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
