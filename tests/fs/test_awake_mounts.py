"""Processors of this machine do not sleep while a mount is asked, and do again afterwards."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator

import pytest
from mounting import temporary_mount, wait_until

from kvfuse.fs import wakefulness
from kvfuse.fs.wakefulness import BUSY_WAITS, IDLE_DRIVER, LATENCY_DEVICE

pytestmark = [pytest.mark.root, pytest.mark.alone]

QUESTIONS = 40 * BUSY_WAITS


@pytest.fixture
def latency() -> Iterator[int]:
    """A descriptor that tells of the machine's. Opening it wishes nothing."""
    if not (IDLE_DRIVER.exists() and LATENCY_DEVICE.exists()):
        pytest.skip("the processors of this machine know one way to idle")
    descriptor = os.open(LATENCY_DEVICE, os.O_RDONLY)
    if told(descriptor) <= wakefulness.LATENCY_US:
        pytest.skip("another process keeps the processors awake")
    yield descriptor
    os.close(descriptor)


def told(descriptor: int) -> int:
    return int(struct.unpack("=i", os.pread(descriptor, 4, 0))[0])


@pytest.mark.parametrize("wanted", [True, False])
def test_a_mount_keeps_processors_awake_while_it_is_asked(latency: int, wanted: bool) -> None:
    before = told(latency)
    seen = set()
    with temporary_mount(["volume.capacity=64MiB", f"keep_awake={str(wanted).lower()}"]) as mount:
        for number in range(QUESTIONS):
            assert not os.path.exists(f"{mount.point}/{number}")
            seen.add(told(latency))
        wait_until(lambda: told(latency) == before, "the processors may sleep again")
    assert (min(seen) <= wakefulness.LATENCY_US) == wanted


def test_nothing_is_left_of_it_after_the_mount(latency: int) -> None:
    before = told(latency)
    with temporary_mount(["volume.capacity=64MiB"]) as mount:
        is_kept = False
        for number in range(QUESTIONS):
            is_kept = is_kept or told(latency) != before
            assert not os.path.exists(f"{mount.point}/{number}")
    assert is_kept
    assert told(latency) == before
