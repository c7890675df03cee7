"""Hostile clients: the daemon lives, stays small, keeps to the memory it was given, and serves the others."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import socket
import threading
from collections.abc import Iterator
from errno import EBADF, ETIMEDOUT

import numpy as np
import pytest
from mounting import FOREGROUND, KvfuseMount, stopped, temporary_mount, wait_until
from posix_calls import as_user
from ring_clients import content
from ring_fuzzer import SECRET
from ring_lab import Process, RawClient, RawRing, nothing_left_behind, resident_size, stats, wait_for_rings, witness
from scale import scaled

from kvfuse.usrbio.client import connect
from kvfuse.usrbio.protocol.wire import SQE, SQE_STRUCT, Flag, Message, Op, Request, Word

MIB = 1 << 20
WORDS = (
    "allow_other", "volume.capacity=512MiB", "volume.segment_size=64MiB", "cache.tier_size=64MiB",
    "publish.window=0.05",
)  # fmt: skip
FUZZ_S = float(os.environ.get("KVFUSE_FUZZ_SECONDS", scaled(5)))
GROWTH_MAX = 400 * MIB
"""of the daemon's memory under the fuzzer"""
USER = 65534
HANGING = 60
"""descriptors that never answer, of the 64 that the daemon waits for at once"""


@pytest.fixture(scope="module")
def mount() -> Iterator[KvfuseMount]:
    with temporary_mount(WORDS) as mount:
        wait_for_rings(mount)
        yield mount


# -- random -----------------------------------------------------------------------------------------


def prepare(mount: KvfuseMount) -> None:
    """What everybody may use, and what the fuzzer may not read."""
    public, private = mount.point / "public", mount.point / "private"
    (public / "sub").mkdir(parents=True)
    private.mkdir()
    for number in range(4):
        (public / f"f{number}").write_bytes(content("f", number, MIB).tobytes())
        (public / f"b{number}").write_bytes(content("b", number, 100_000).tobytes())
    for name in ("secret", "b0", "b1", "b2"):
        path = private / name
        path.write_bytes(SECRET * 5000)
        path.chmod(0o600)
    for path in [public, public / "sub", *public.iterdir()]:
        os.chown(path, USER, USER)


@pytest.mark.root
@pytest.mark.timeout(FUZZ_S + 300)
def test_nothing_that_a_client_does_matters_to_others(seed: int) -> None:
    with temporary_mount(WORDS) as mount:
        wait_for_rings(mount)
        prepare(mount)
        pid = stats(mount)["pid"]
        with nothing_left_behind(mount):
            with witness(mount, seed % 1000):
                size = resident_size(mount)
                fuzzer = Process("ring_fuzzer.py", mount.point, seed, USER)
                report = fuzzer.ask(seconds=FUZZ_S)
                fuzzer.end()
                growth = resident_size(mount) - size
            with connect(mount.point) as client:  # what is in the tier serves those who may read it
                assert client.namespace("private").inode
        print(report, f"grown by {growth >> 20} MiB")
        assert report["found"] == 0
        assert set(report["done"]) | set(report["refused"]) >= {"do_submit", "do_scribble", "do_ask_anything"}
        assert growth < GROWTH_MAX
        assert stats(mount)["pid"] == pid
        assert all((mount.point / "private" / name).read_bytes() == SECRET * 5000 for name in ("secret", "b0", "b1"))


# -- by design --------------------------------------------------------------------------------------


def submit(ring: RawRing, op: int, **fields: int) -> None:
    """One entry, into its place, and the bell."""
    sq = ring.memory.sq
    row = sq.place(sq.position)
    for name in row.dtype.names:
        row[name] = fields.get(name, 0)
    row["op"] = op
    sq.publish(1)
    os.set_blocking(ring.daemon_bell, False)
    os.eventfd_write(ring.daemon_bell, 1)


def result_of(ring: RawRing) -> int:
    """The next completion's."""
    cq = ring.memory.cq
    wait_until(lambda: cq.given > cq.position, "a completion")
    row = cq.read(1)[0]
    cq.take(1)
    return int(row["result"])


def registered_file(raw: RawClient, mount: KvfuseMount, name: str, size: int = MIB) -> int:
    path = mount.point / name
    path.write_bytes(content(name, 0, size).tobytes())
    with open(path, "rb+") as file:
        return raw.handle(Request.ADD_FILE, 3, descriptors=[file.fileno()])


@pytest.fixture
def raw(mount: KvfuseMount) -> Iterator[RawClient]:
    """A client that may do anything, after which everything must be as before, and all others served."""
    with nothing_left_behind(mount):
        with RawClient(mount.point) as raw:
            yield raw
        with connect(mount.point) as client, client.iov(4096) as iov, client.ring(8) as ring:
            ring.prep_read(iov, 0, client.file(mount.point / "other", "rw"), 0, 4096)
            ring.submit()
            assert ring.wait(1, 10.0)["result"].tolist() == [0]


def fill(bell: int) -> None:
    os.set_blocking(bell, False)
    with contextlib.suppress(OSError):
        os.write(bell, ((1 << 64) - 2).to_bytes(8, "little"))


def empty(bell: int) -> None:
    os.set_blocking(bell, False)
    with contextlib.suppress(OSError):
        while os.read(bell, 4096):
            pass


def test_a_bell_cannot_make_the_daemon_wait(mount: KvfuseMount, raw: RawClient) -> None:
    """Full, empty and set to wait: by a client that shares the descriptor's open file."""
    file = registered_file(raw, mount, "bell")
    iov, memory = raw.iov(MIB)
    ring = raw.ring()
    ring.memory.words[Word.CLIENT_SLEEPS] = 1
    sq, cq = ring.memory.sq, ring.memory.cq
    for _ in range(50):
        row = sq.place(sq.position)
        row["op"], row["handle"], row["iov"], row["length"] = Op.WRITE, file, iov, 5
        sq.publish(1)
        for bell in (ring.client_bell, ring.daemon_bell):
            fill(bell)
            os.set_blocking(bell, True)
        wait_until(lambda: cq.given == sq.position, "a completion")
        cq.take(1)
        for bell in (ring.client_bell, ring.daemon_bell):
            empty(bell)
            os.set_blocking(bell, True)
    assert stats(mount)["rings"]["rings"] == 1
    assert raw.error(Request.DROP_RING, ring.handle) == 0
    ring.close()
    os.close(memory)


def test_a_bell_that_is_emptied_by_its_owner_keeps_no_ring_alive(mount: KvfuseMount, raw: RawClient) -> None:
    ring = raw.ring()
    ended = threading.Event()

    def steal() -> None:
        while not ended.is_set():
            empty(ring.daemon_bell)

    thief = threading.Thread(target=steal)
    thief.start()
    try:
        for _ in range(20):
            other = raw.ring()
            assert raw.error(Request.DROP_RING, other.handle) == 0
            other.close()
        assert raw.error(Request.DROP_RING, ring.handle) == 0
    finally:
        ended.set()
        thief.join()
    ring.close()


def test_who_does_not_read_answers_gets_the_right_ones_later(mount: KvfuseMount, raw: RawClient) -> None:
    """Descriptors stay what they are until they are sent, however long that takes."""
    with connect(mount.point) as client, client.iov(MIB) as iov, client.ring(8) as ring:
        namespace = client.namespace("arena")
        ring.prep_put(iov, 0, namespace, b"a", MIB)
        ring.submit()
        assert ring.wait(1, 10.0)["result"].tolist() == [MIB]
    folder = os.open(mount.point / "arena", os.O_RDONLY)
    handle = raw.handle(Request.OPEN_NAMESPACE, 0o644, descriptors=[folder])
    os.close(folder)
    own = raw.ring()
    own.memory.aux[0] = ord("a")
    submit(own, Op.GET, handle=handle, flags=int(Flag.VIEW), key_length=1)
    wait_until(lambda: own.memory.cq.given == 1, "a view")
    arena = int(own.memory.cq.read(1)[0]["arena"])
    assert arena
    _, (first,) = raw.ask(Request.MAP_ARENA, arena)
    inode = os.fstat(first).st_ino
    os.close(first)
    raw.socket.settimeout(0.5)
    sent = 0
    try:
        while sent < 5000:
            raw.send(Message(Request.MAP_ARENA, sent, values=(arena,)).pack())
            sent += 1
    except (TimeoutError, BlockingIOError):
        pass
    assert sent > 100
    raw.socket.settimeout(10.0)
    for number in range(sent):
        reply, received = raw.receive()
        assert reply.number == number
        assert reply.status == 0
        (descriptor,) = received
        assert os.fstat(descriptor).st_ino == inode
        os.close(descriptor)
    own.close()


def test_memory_may_vanish_at_any_time(mount: KvfuseMount, raw: RawClient, rng: random.Random) -> None:
    """Sealed by its owner against the seal that would keep it, and cut while it is read and written."""
    file = registered_file(raw, mount, "vanish")
    descriptor = os.memfd_create("vanishing", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, MIB)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)
    iov = raw.handle(Request.ADD_IOV, MIB, descriptors=[descriptor])
    ring = raw.ring()
    ended = threading.Event()

    def cut() -> None:
        while not ended.is_set():
            os.ftruncate(descriptor, 0)
            os.ftruncate(descriptor, MIB)

    cutter = threading.Thread(target=cut)
    cutter.start()
    answers = set()
    try:
        for _ in range(500):
            op = rng.choice([Op.READ, Op.WRITE])
            submit(ring, op, handle=file, iov=iov, length=rng.choice([100, 4096, 300_000]), iov_offset=8192)
            answers.add(min(result_of(ring), 1))
    finally:
        ended.set()
        cutter.join()
    os.ftruncate(descriptor, 0)
    for op in (Op.READ, Op.WRITE):
        submit(ring, op, handle=file, iov=iov, length=4096)
        assert result_of(ring) == -14
    assert answers <= {-14, 0, 1}
    ring.close()
    os.close(descriptor)


@pytest.mark.parametrize("place", [0, 8, 12, 24, 63, int(Word.SQ_TAIL) * 8 + 7, int(Word.CQ_HEAD) * 8 + 7])
def test_who_breaks_its_header_is_disconnected(raw: RawClient, place: int) -> None:
    ring = raw.ring()
    ring.memory.bytes[min(place, 55) if place < 64 else place] ^= 0x55
    submit_blindly(ring)
    with pytest.raises(ConnectionError):
        raw.receive()
    ring.close()


def submit_blindly(ring: RawRing) -> None:
    if ring.memory.words[Word.SQ_TAIL] == 0:
        ring.memory.words[Word.SQ_TAIL] = 1
    os.eventfd_write(ring.daemon_bell, 1)


def test_there_are_limits(mount: KvfuseMount, raw: RawClient) -> None:
    rings = []
    try:
        while True:
            rings.append(raw.ring(8, 0))
    except OSError as error:
        assert error.errno == 22
    assert len(rings) == 256
    for ring in rings:
        ring.close()
    for entries, aux_size in ((0, 0), (3, 0), (1 << 17, 0), ((1 << 64) - 1, 0), (8, (64 << 20) + 1), (8, 1 << 63)):
        assert raw.error(Request.ADD_RING, entries, aux_size) == 22
    descriptor = os.memfd_create("small")
    os.ftruncate(descriptor, 4096)
    for size in (0, 1 << 41, 1 << 63, (1 << 64) - 1):
        assert raw.error(Request.ADD_IOV, size, descriptors=[descriptor]) == 22
    assert raw.error(Request.ADD_IOV, 4097, descriptors=[descriptor]) == 14
    for _ in range(1000):
        raw.handle(Request.ADD_IOV, 4096, descriptors=[descriptor])
    assert stats(mount)["rings"]["iovs"] == 1000
    os.close(descriptor)


def test_descriptors_of_the_wrong_kind(mount: KvfuseMount, raw: RawClient) -> None:
    left, right = socket.socketpair()
    kinds = {
        "directory": os.open(mount.point, os.O_RDONLY), "path": os.open(mount.point, os.O_PATH),
        "elsewhere": os.open("/proc/self/status", os.O_RDONLY), "null": os.open("/dev/null", os.O_RDWR),
        "event": os.eventfd(0), "memory": os.memfd_create("m"), "socket": left.detach(), "closed": right.detach(),
        "stats": os.open(mount.point / ".kvfuse/stats", os.O_RDONLY), "root": os.open("/", os.O_RDONLY),
        "control": os.open(mount.point / ".kvfuse/control.sock", os.O_PATH),
    }  # fmt: skip
    folders = {"directory", "path"}
    for kind, descriptor in kinds.items():
        assert raw.error(Request.ADD_FILE, 1, descriptors=[descriptor]), kind
        assert bool(raw.error(Request.OPEN_NAMESPACE, 0, descriptors=[descriptor])) == (kind not in folders), kind
        assert raw.error(Request.ADD_IOV, 4096, descriptors=[descriptor]), kind
        for request in (Request.HELLO, Request.ADD_RING, Request.DROP_IOV, Request.MAP_ARENA, 11):
            assert raw.error(request, 1, descriptors=[descriptor]) == 22
        for request in (Request.ADD_FILE, Request.ADD_IOV, Request.OPEN_NAMESPACE):
            assert raw.error(request, 1) == 22
            assert raw.error(request, 1, descriptors=[descriptor] * 2) == 22
            assert raw.error(request, 1, descriptors=[descriptor] * 200) == 22
        os.close(descriptor)


@pytest.mark.parametrize("data", [b"", b"x", bytes(63), bytes(64), bytes(64 + 1025), bytes(60_000)])
def test_what_is_no_message_ends_the_connection(mount: KvfuseMount, raw: RawClient, data: bytes) -> None:
    with RawClient(mount.point) as other:
        other.send(data)
        if len(data) == 64:  # a message, of a request that there is not
            assert other.receive()[0].status == -22
        else:
            with pytest.raises(ConnectionError):
                other.receive()
    with RawClient(mount.point, hello=False) as other:
        assert other.error(Request.ADD_RING, 8, 0) == 22
        assert other.error(Request.HELLO, 99) == 95


# -- as much as there is ----------------------------------------------------------------------------


def test_copies_of_huge_writes_are_bounded(mount: KvfuseMount, raw: RawClient) -> None:
    """Memory of a client costs it nothing where nothing is in it; a copy of it would cost the daemon all it has."""
    file = registered_file(raw, mount, "huge")
    size = resident_size(mount)
    descriptor = os.memfd_create("huge", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, 1 << 40)
    iov = raw.handle(Request.ADD_IOV, 1 << 40, descriptors=[descriptor])
    ring = raw.ring(64, MIB)
    folder = os.open(mount.point, os.O_RDONLY)
    handle = raw.handle(Request.OPEN_NAMESPACE, 0o644, descriptors=[folder])
    os.close(folder)
    for op in (Op.READ, Op.WRITE):
        submit(ring, op, handle=file, iov=iov, length=1 << 40, offset=0)
        assert result_of(ring) == -22
    for op in (Op.GET, Op.PUT):
        submit(ring, op, handle=handle, iov=iov, length=1 << 40, key_offset=0, key_length=1)
        assert result_of(ring) == -22
    assert resident_size(mount) - size < 64 * MIB
    ring.close()
    os.close(descriptor)


def test_pins_are_bounded(mount: KvfuseMount, raw: RawClient) -> None:
    """Whoever holds as many as there may be gets copies."""
    with connect(mount.point) as client, client.ring(8) as ring:
        (mount.point / "pinned").mkdir()
        (mount.point / "pinned" / "a").write_bytes(b"x" * 5000)
        ring.prep_prefetch(client.namespace("pinned"), [b"a"])
        ring.submit()
        assert ring.wait(1, 10.0)["result"].tolist() == [1]
    folder = os.open(mount.point / "pinned", os.O_RDONLY)
    handle = raw.handle(Request.OPEN_NAMESPACE, 0o644, descriptors=[folder])
    os.close(folder)
    iov, memory = raw.iov(8192)
    ring = raw.ring(1024)
    ring.memory.aux[0] = ord("a")
    fields = (Op.GET, 0, int(Flag.VIEW), handle, 0, 1, 0, 0, 0, 0, 0, 0, 0)
    entries = np.frombuffer(SQE_STRUCT.pack(*fields) * 512, SQE)
    arenas = 0
    sq, cq = ring.memory.sq, ring.memory.cq
    for _ in range(150):
        sq.write(entries)
        sq.publish(512)
        os.eventfd_write(ring.daemon_bell, 1)
        wait_until(lambda: cq.given == sq.position, "completions")
        rows = cq.read(512)
        cq.take(512)
        assert set(rows["result"].tolist()) <= {5000, -90}
        arenas += int(np.count_nonzero(rows["arena"]))
    assert stats(mount)["rings"]["pins"] == arenas == 65536
    submit(ring, Op.GET, handle=handle, iov=iov, flags=int(Flag.VIEW), length=8192, key_length=1)
    assert result_of(ring) == 5000
    assert os.pread(memory, 8192, 0) == b"x" * 5000 + bytes(3192)
    ring.close()
    os.close(memory)


@pytest.mark.root
def test_a_daemon_without_descriptors_lives_on() -> None:
    """Those who are there go on; whoever comes later waits until somebody goes."""
    limited = ("prlimit", "--nofile=200", *FOREGROUND)
    with temporary_mount(WORDS, limited) as mount:
        wait_for_rings(mount)
        with connect(mount.point) as client, client.iov(4096) as iov, client.ring(8) as ring:
            file = client.file(mount.point / "file", "rw")
            hogs = []
            for _ in range(12):
                hog = RawClient(mount.point, hello=False)
                hog.socket.settimeout(0.3)
                hogs.append(hog)
                try:
                    hog.ask(Request.HELLO, 1)
                    while True:
                        hog.ring(8, 0).close()
                except OSError:
                    pass
            for _ in range(20):
                ring.prep_write(iov, 0, file, 0, 4096)
                ring.submit()
                assert ring.wait(1, 10.0)["result"].tolist() == [4096]
            (mount.point / "file").read_bytes()
            for hog in hogs:
                hog.socket.close()
            wait_until(lambda: stats(mount)["rings"]["rings"] == 1, "the end of the others")
            with connect(mount.point) as other:
                other.ring(8).close()


@pytest.mark.root
def test_a_file_system_that_hangs_is_its_users_trouble_alone() -> None:
    """A descriptor of one may make whoever asks about it wait for ever."""
    with (
        temporary_mount((*WORDS, "attr_timeout=0")) as hanging,
        temporary_mount((*WORDS, "allow_other")) as mount,
    ):
        wait_for_rings(mount)
        descriptor = os.open(hanging.point, os.O_RDONLY)
        with nothing_left_behind(mount), connect(mount.point) as client, client.iov(4096) as iov:
            file, ring = client.file(mount.point / "file", "rw"), client.ring(8)
            with stopped(hanging.pid):
                with as_user():
                    hogs = [RawClient(mount.point) for _ in range(HANGING)]
                for hog in hogs:
                    message = Message(Request.ADD_FILE, 1, values=(1,))
                    hog.send(message.pack(), [descriptor])
                for _ in range(20):
                    ring.prep_write(iov, 0, file, 0, 4096)
                    ring.prep_fsync(file)
                    ring.submit()
                    assert (ring.wait(2, 10.0)["result"] >= 0).all()
                    (mount.point / "other").write_bytes(b"x")
                    client.iov(4096).close()
                    client.ring(8).close()
            for hog in hogs:
                assert hog.receive()[0].status in (-EBADF, -ETIMEDOUT)
                hog.socket.close()
            ring.close()
            file.close()
        os.close(descriptor)


def test_a_connection_that_breaks_while_a_file_of_the_mount_is_passed(mount: KvfuseMount, raw: RawClient) -> None:
    """To close it the kernel asks the daemon, which must be free to answer."""
    path = mount.point / "passed"
    path.write_bytes(b"x")
    ring = raw.ring()
    assert raw.error(Request.DROP_RING, ring.handle) == 0
    ring.close()
    for number in range(60):
        with RawClient(mount.point) as other, open(path, "rb+") as file:
            broken = other.ring()
            broken.memory.words[Word.CQ_HEAD] = number + 1
            submit_blindly(broken)
            with contextlib.suppress(ConnectionError):
                for _ in range(number % 4):
                    other.send(Message(Request.ADD_FILE, 1, values=(1,)).pack(), [file.fileno()])
                    other.send(Message(Request.OPEN_NAMESPACE, 1, values=(1,)).pack(), [file.fileno()])
            broken.close()
    assert path.read_bytes() == b"x"


def test_a_ring_that_is_dropped_while_another_one_is_broken_is_gone(mount: KvfuseMount, raw: RawClient) -> None:
    for _ in range(100):
        with RawClient(mount.point) as other:
            rings = [other.ring(8, 0) for _ in range(4)]
            rings[0].memory.words[Word.CQ_HEAD] = 1000
            with contextlib.suppress(ConnectionError):
                other.send(Message(Request.DROP_RING, 1, values=(rings[1].handle,)).pack())
                submit_blindly(rings[0])
                for ring in rings[2:]:
                    other.send(Message(Request.DROP_RING, 1, values=(ring.handle,)).pack())
                while True:
                    other.receive()
            for ring in rings:
                ring.close()
