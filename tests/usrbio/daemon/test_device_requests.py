"""What the daemon answers who passes it memory of a device, and what of that is left behind."""

from __future__ import annotations

import errno
import os
import random
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from adapter_daemon import ADAPTER_DAEMON, tell_adapter
from mounting import KvfuseMount, temporary_mount, wait_until
from posix_calls import as_user
from ring_lab import RawClient, registered_things

from kvfuse.peer.rdma_memories import missing
from kvfuse.usrbio.client import Way, connect
from kvfuse.usrbio.client.gpu.cpu import CpuDevice
from kvfuse.usrbio.protocol.wire import Request

SIZE = 1 << 20
USER = 65534
ROUNDS = 400


@pytest.fixture(scope="module")
def mount() -> Iterator[KvfuseMount]:
    with temporary_mount(["allow_other", "capacity=64MiB", "usrbio.user_iovs=3"], ADAPTER_DAEMON) as mount:
        yield mount


@contextmanager
def memory(size: int = SIZE) -> Iterator[int]:
    descriptor = os.memfd_create("device")
    os.ftruncate(descriptor, size)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@pytest.mark.skipif(
    missing() == "", reason="about hosts without RDMA; those that have it are tried in the virtual machine"
)
def test_a_host_without_rdma_says_so_in_a_line_and_the_next_way_is_taken() -> None:
    with temporary_mount(["capacity=64MiB"]) as mount:
        with RawClient(mount.point) as client, memory() as descriptor:
            reply, _ = client.ask(Request.ADD_DMABUF, 0, SIZE, descriptors=[descriptor])
            assert -reply.status == errno.EOPNOTSUPP
            assert reply.text == missing()
            assert "RDMA" in reply.text
            assert "\n" not in reply.text
            assert client.error(Request.ADD_IOV, SIZE, descriptors=[descriptor]) == 0
        device = CpuDevice(exports=True)
        with connect(mount.point) as client, client.iov_from_gpu(device.allocate(100), device=device) as iov:
            assert iov.way is Way.PINNED
            assert iov.why_not == {Way.DMABUF: missing()}


def test_memory_is_refused_that_is_none_or_too_small(mount: KvfuseMount) -> None:
    with RawClient(mount.point) as client, memory() as descriptor:
        for values in [(0, 0), (0, SIZE + 1), (SIZE, 1), (1, SIZE), (1 << 63, 1 << 63), (0, (1 << 40) + 1)]:
            assert client.error(Request.ADD_DMABUF, *values, descriptors=[descriptor]) == errno.EINVAL, values
        read_only = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY)
        assert client.error(Request.ADD_DMABUF, 0, SIZE, descriptors=[read_only]) == errno.EACCES
        os.close(read_only)
        assert client.error(Request.ADD_DMABUF, 0, SIZE) == errno.EINVAL
        assert client.error(Request.ADD_DMABUF, 0, SIZE, descriptors=[descriptor] * 2) == errno.EINVAL
        handle = client.handle(Request.ADD_DMABUF, 5, SIZE - 5, descriptors=[descriptor])
        assert client.error(Request.DROP_IOV, handle) == 0
        assert client.error(Request.DROP_IOV, handle) == errno.EBADF


@pytest.mark.root
def test_memory_of_devices_counts_as_iovs(mount: KvfuseMount) -> None:
    def ask() -> None:
        with RawClient(mount.point) as client, memory() as descriptor:
            handles = [client.handle(Request.ADD_DMABUF, 0, SIZE, descriptors=[descriptor]) for _ in range(2)]
            client.handle(Request.ADD_IOV, SIZE, descriptors=[descriptor])
            assert client.error(Request.ADD_DMABUF, 0, SIZE, descriptors=[descriptor]) == errno.EDQUOT
            assert client.error(Request.DROP_IOV, handles[0]) == 0
            assert client.error(Request.ADD_DMABUF, 0, SIZE, descriptors=[descriptor]) == 0

    as_user(USER, ask)


def things(folder: Path, stack: ExitStack) -> list[int]:
    """Descriptors of what memory of a device is not, and of some that is."""
    made = [stack.enter_context(memory(size)) for size in (1, 4096, SIZE)]
    made += [os.open(folder, os.O_RDONLY), os.open("/dev/null", os.O_RDWR), *os.pipe(), os.eventfd(0)]
    made += [os.open(folder / "file", os.O_RDWR | os.O_CREAT), os.open("/proc/self/maps", os.O_RDONLY)]
    made += [one.detach() for one in socket.socketpair()]
    for descriptor in made[3:]:
        stack.callback(os.close, descriptor)
    return made


def test_whatever_is_passed_is_answered_and_given_back(mount: KvfuseMount, rng: random.Random) -> None:
    """Random memory, ranges, and ends of clients."""
    answers: dict[int, int] = {}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        descriptors = things(Path(folder), stack)
        client = RawClient(mount.point)
        for _ in range(ROUNDS):
            numbers = (0, 1, 5, 4096, SIZE - 1, SIZE, SIZE + 1, 1 << 40, (1 << 64) - 1, rng.getrandbits(64))
            values = [rng.choice(numbers) for _ in range(rng.choice((2, 2, 2, 6)))]
            passed = rng.choices(descriptors, k=rng.choice((1, 1, 1, 1, 0, 2)))
            if rng.random() < 0.5:
                values, passed = [rng.randrange(SIZE // 2), rng.randrange(1, SIZE // 2)], descriptors[2:3]
            if rng.random() < 0.2:
                tell_adapter(mount, rng.choice(("", "refuse")))
            answer = client.error(Request.ADD_DMABUF, *values, descriptors=passed)
            answers[answer] = answers.get(answer, 0) + 1
            if rng.random() < 0.1:
                client.error(Request.DROP_IOV, rng.randrange(1, 20))
            if rng.random() < 0.05:
                client.socket.close()
                client = RawClient(mount.point)
        client.socket.close()
    print(answers)
    assert answers.keys() >= {0, errno.EINVAL, errno.EACCES, errno.EOPNOTSUPP}
    wait_until(lambda: not any(registered_things(mount).values()), "the end of all clients")
    held = [os.readlink(entry.path) for entry in os.scandir(f"/proc/{mount.pid}/fd")]
    assert not [name for name in held if "memfd:device" in name]
