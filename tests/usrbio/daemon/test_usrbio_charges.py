"""What the daemon does with clients' memory that has holes, and with limits for it: without a daemon."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import random
from collections.abc import Iterator

import numpy as np
import pytest

from kvfuse.access.client_process import ClientProcess
from kvfuse.options.options import UsrbioOptions
from kvfuse.usrbio.daemon.charges import CHARGE_MIN, Charge, Charges
from kvfuse.usrbio.daemon.client_memory import LOOK_BYTES, PAGE, MappedIov

pytestmark = pytest.mark.root

SIZE = 2 * LOOK_BYTES
LIMIT = 64 * PAGE
PUNCH_HOLE = 3
libc = ctypes.CDLL(None, use_errno=True)


@pytest.fixture
def charges(monkeypatch: pytest.MonkeyPatch) -> Charges:
    monkeypatch.setattr("kvfuse.usrbio.daemon.charges.LOOKS_SECONDS", 0.0)
    charges = Charges(UsrbioOptions(user_charged_size=LIMIT))
    charges.group = None  # it pays for the shared memory of other tests, too
    return charges


@pytest.fixture
def charge(charges: Charges) -> Charge:
    return charges.get_charge(ClientProcess(1, 65533, 65533, frozenset()))


@pytest.fixture(params=["sealed", "not sealed"])
def iov(request: pytest.FixtureRequest, charge: Charge) -> Iterator[MappedIov]:
    descriptor = memory(SIZE, sealed=request.param == "sealed")
    found = MappedIov(descriptor, SIZE, charge)
    yield found
    found.close()


def memory(size: int, *, sealed: bool = True) -> int:
    descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING if sealed else 0)
    os.ftruncate(descriptor, size)
    if sealed:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return descriptor


def there(iov: MappedIov) -> int:
    return os.fstat(iov.descriptor).st_blocks * 512


def punch(descriptor: int, offset: int, size: int) -> None:
    assert libc.fallocate(descriptor, PUNCH_HOLE, ctypes.c_long(offset), ctypes.c_long(size)) == 0


def test_zeros_change_what_is_there_and_nothing_else(iov: MappedIov, charges: Charges, rng: random.Random) -> None:
    model = bytearray(SIZE)
    for _ in range(100):
        start = rng.randrange(SIZE)
        length = rng.randint(1, SIZE - start)
        if rng.random() < 0.7:
            model[start : start + min(length, 100)] = b"x" * min(length, 100)
            os.pwrite(iov.descriptor, b"x" * min(length, 100), start)
        else:
            before = there(iov)
            iov.clear(start, length)
            model[start : start + length] = bytes(length)
            assert there(iov) == before
        assert os.pread(iov.descriptor, SIZE, 0) == model
    assert charges.size == 0


def test_pages_that_were_there_cost_nothing(iov: MappedIov, charges: Charges) -> None:
    os.pwrite(iov.descriptor, bytes(10 * PAGE), 5 * PAGE)
    iov.write(0, memoryview(b"x" * 20 * PAGE))
    assert charges.size == max(CHARGE_MIN, 10 * PAGE)
    iov.write(PAGE, memoryview(b"y" * 19 * PAGE))
    assert charges.size == max(CHARGE_MIN, 10 * PAGE)


def test_many_ranges_count_as_one_by_one(iov: MappedIov, charges: Charges) -> None:
    offsets = np.array([0, 3 * PAGE, 40 * PAGE])
    assert iov.charge_many(offsets, np.array([2 * PAGE, 30 * PAGE, PAGE]))
    assert charges.size == 33 * PAGE
    assert not iov.charge_many(np.array([0, SIZE - PAGE]), np.array([PAGE, PAGE]))


def test_beyond_the_limit_nothing_is_written(iov: MappedIov, charges: Charges) -> None:
    iov.write(0, memoryview(b"x" * LIMIT))
    with pytest.raises(OSError, match="charged") as caught:
        iov.write(LIMIT, memoryview(b"x"))
    assert caught.value.errno == errno.EDQUOT
    assert there(iov) == LIMIT
    punch(iov.descriptor, 0, LIMIT // 2)
    iov.write(LIMIT, memoryview(b"x" * PAGE))
    assert charges.size == LIMIT // 2 + PAGE


def test_dropped_memory_counts_as_long_as_somebody_has_it(charges: Charges, charge: Charge) -> None:
    own = memory(SIZE)
    iov = MappedIov(os.dup(own), SIZE, charge)
    iov.write(0, memoryview(b"x" * LIMIT))
    iov.close()
    other = MappedIov(memory(SIZE), SIZE, charge)
    with pytest.raises(OSError, match="charged"):
        other.write(0, memoryview(b"x"))
    os.close(own)
    other.write(0, memoryview(b"x"))
    assert charges.size == CHARGE_MIN
    other.close()


def test_all_users_have_a_limit_together(charges: Charges) -> None:
    while charges.pool.free >= LIMIT:
        assert charges.pool.take(min(LIMIT, charges.pool.free))
    iov = MappedIov(memory(SIZE), SIZE, charges.get_charge(ClientProcess(1, 65532, 65532, frozenset())))
    with pytest.raises(OSError, match="all users") as caught:
        iov.write(0, memoryview(b"x" * LIMIT))
    assert caught.value.errno == errno.ENOMEM
    iov.close()


def test_reading_from_holes_brings_no_page(iov: MappedIov) -> None:
    os.pwrite(iov.descriptor, b"x" * PAGE, 3 * PAGE)
    target = np.full(10 * PAGE, 7, np.uint8)
    iov.read(0, target)
    assert target.tobytes() == bytes(3 * PAGE) + b"x" * PAGE + bytes(6 * PAGE)
    assert there(iov) == PAGE


def test_a_ring_counts_whole_while_it_is_there_and_then_until_nobody_holds_it() -> None:
    """However fast one follows the other: what was let go of is never what refuses a ring."""
    charge = Charges(UsrbioOptions(user_charged_size=LIMIT)).get_charge(ClientProcess(1, 65533, 65533, frozenset()))
    first, second = memory(LIMIT), memory(LIMIT)
    with charge.hold_ring(first, LIMIT, is_left=False):
        with (
            pytest.raises(OSError, match="unmap and close rings") as raised,
            charge.hold_ring(second, LIMIT, is_left=False),
        ):
            pass
        assert raised.value.errno == errno.EDQUOT, "it counts, although no page of it is there"
    os.pwrite(first, bytes(LIMIT), 0)
    with pytest.raises(OSError), charge.hold_ring(second, LIMIT, is_left=False):
        pass
    os.close(first)
    with charge.hold_ring(second, LIMIT, is_left=False):
        pass
    with charge.hold_ring(second, LIMIT, is_left=True):
        pass  # that of a daemon before this one goes on
    os.close(second)
