"""Memory of every kind as the rings' client takes it: copied or used in place, alone and as columns."""

from __future__ import annotations

import errno
import os
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from ring_calls import PATIENCE_S, SIZE, done

from kvfuse.usrbio.client import Client, Iov
from kvfuse.usrbio.client.iov import bytes_of

pytestmark = pytest.mark.engines("lmdb+file")  # about memory that is shared with clients: below it one pair is enough


def check_wrapped(client: Client, iov: Iov, memory: np.ndarray, path: Path, data: bytes) -> None:
    """Read into ``memory`` and write from it through the iov, alone and as columns."""
    path.write_bytes(data)
    size = len(memory)
    with client.file(path, "rw") as file, client.ring(8) as ring:
        ring.prep_read(iov, 5, file, 100, size - 5)
        assert done(ring) == {0: size - 5}
        assert memory[5:].tobytes() == data[100 : 100 + size - 5]
        ring.prep_reads(iov, [0, 50], file, [7, 8], 50, [1, 2])
        assert done(ring, 2) == {1: 50, 2: 50}
        assert memory[:100].tobytes() == data[7:57] + data[8:58]
        memory[:] = 7
        ring.prep_write(iov, 1, file, 0, size - 1)
        memory[:] = 8  # what counts is what it is at submit
        assert done(ring) == {0: size - 1}
        ring.prep_writes(iov, 0, file, [SIZE, SIZE + 10], 10)
        ring.submit()
        assert ring.wait(2, PATIENCE_S)["result"].tolist() == [10, 10]
    assert path.read_bytes() == bytes([8]) * (size - 1) + data[size - 1 :] + bytes([8]) * 20


def test_plain_memory_is_copied(client: Client, path: Path, data: bytes) -> None:
    memory = np.zeros(10_000, np.uint8)
    with client.wrap(memory) as iov:
        assert not iov.in_place
        check_wrapped(client, iov, memory, path, data)
        assert client.locate(bytes_of(memory)) is None


def test_a_shared_memory_is_used_in_place_even_unlinked(client: Client, path: Path, data: bytes) -> None:
    shared = SharedMemory(create=True, size=3 * 4096)
    memory = np.frombuffer(shared.buf, np.uint8)
    iov = client.wrap(shared)
    try:
        shared.unlink()
        assert iov.in_place
        check_wrapped(client, iov, memory, path, data)
    finally:
        iov.close()
        del memory
        shared.close()


def test_a_part_of_shared_memory_is_used_in_place(client: Client, path: Path, data: bytes) -> None:
    with client.iov(100_000) as whole:
        part = whole.array[5000:20_000]
        with client.wrap(part) as iov:
            assert iov.in_place
            assert iov.base == 5000
            check_wrapped(client, iov, part, path, data)


def test_a_descriptor_of_shared_memory_is_mapped(client: Client, path: Path, data: bytes) -> None:
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, 20_000)
    with client.wrap(descriptor) as iov:
        os.close(descriptor)
        assert iov.in_place
        check_wrapped(client, iov, iov.array, path, data)


def test_a_tensor_is_wrapped_by_its_address(client: Client, path: Path, data: bytes) -> None:
    memory = np.zeros(6000, np.uint8)
    tensor = SimpleNamespace(
        device=SimpleNamespace(type="cpu"),
        is_contiguous=lambda: True,
        numel=lambda: 3000,
        element_size=lambda: 2,
        data_ptr=lambda: memory.ctypes.data,
    )
    with client.wrap(tensor) as iov:
        assert iov.size == 6000
        check_wrapped(client, iov, memory, path, data)
    tensor.device.type = "cuda"
    with pytest.raises(ValueError):
        client.wrap(tensor)


def test_read_only_memory_may_be_written_from_only(client: Client, path: Path) -> None:
    with client.wrap(b"read-only bytes") as iov, client.file(path, "rw") as file, client.ring(8) as ring:
        assert not iov.writable
        ring.prep_write(iov, 0, file, 0, iov.size, user_data=1)
        assert done(ring) == {1: 15}
        ring.prep_read(iov, 0, file, 0, 5, user_data=2)
        assert done(ring) == {2: -errno.EACCES}
    assert path.read_bytes() == b"read-only bytes"


def test_memory_that_is_given_back_while_it_is_read_into(client: Client, path: Path, data: bytes) -> None:
    """Whatever became of the read, the ring lives on."""
    with client.ring(8) as ring, client.iov(SIZE) as other:
        for number in range(60):
            part = path.with_name(f"{path.name}.{number}")
            part.write_bytes(data)
            with client.file(part) as file:  # of which no map shows anything yet: the event loop has to look
                iov = client.iov(SIZE)
                ring.prep_read(iov, 0, file, 0, SIZE, user_data=1)
                ring.submit()
                iov.close()
                assert done(ring)[1] in (SIZE, -errno.ECANCELED, -errno.EFAULT)
                ring.prep_read(other, 0, file, 0, 4096, user_data=2)
                assert done(ring) == {2: 4096}
            part.unlink()


def test_buffers_in_iovs_are_located(client: Client) -> None:
    with client.iov(10_000) as first, client.iov(20_000) as second:
        assert client.locate(bytes_of(first.buffer)) == (first, 0)
        assert client.locate(bytes_of(first.array[9_000:])) == (first, 9_000)
        assert client.locate(bytes_of(second.array.view(np.float32)[10:20])) == (second, 40)
        assert client.locate(bytes_of(bytearray(10))) is None
        kept = second.array
    assert client.locate(bytes_of(kept)) is None, "it is not registered any more"


def test_memory_is_touched_by_its_owner(client: Client) -> None:
    """Else its pages would be charged to the daemon, which has a limit for that. What is in it stays."""
    descriptor = os.memfd_create("touched")
    try:
        os.ftruncate(descriptor, 1 << 20)
        os.pwrite(descriptor, b"x" * 5000, 7)
        with client.wrap(descriptor) as iov:
            assert os.fstat(descriptor).st_blocks * 512 == 1 << 20
            assert bytes(iov.array[:5010]) == bytes(7) + b"x" * 5000 + bytes(3)
        with client.iov(1 << 20) as iov:
            assert iov.in_place
    finally:
        os.close(descriptor)
