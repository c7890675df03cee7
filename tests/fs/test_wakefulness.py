"""Idle processors do not sleep while requests come one after the other, and do again afterwards."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest
import trio

from kvfuse.fs import wakefulness
from kvfuse.fs.turns import Requests
from kvfuse.fs.wakefulness import ANY_LATENCY, BUSY_WAITS, SHORT_SECONDS, Wakefulness

pytestmark = pytest.mark.ring(1)

QUESTIONS = 40 * BUSY_WAITS


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In the place of the kernel's, on a machine whose processors are a guest's."""
    monkeypatch.setattr(wakefulness, "IDLE_DRIVER", tmp_path / "driver")
    (tmp_path / "driver").write_text("haltpoll\n")
    (tmp_path / "latency").touch()
    return tmp_path / "latency"


def wishes(device: Path) -> list[int]:
    """All that were made, in their order."""
    return [latency for (latency,) in struct.iter_unpack("=i", device.read_bytes())]


def be_busy(kept: Wakefulness, count: int = BUSY_WAITS) -> None:
    for _ in range(count):
        kept.note_wait(SHORT_SECONDS / 2)


def test_it_takes_many_short_waits_in_a_row(device: Path) -> None:
    kept = Wakefulness(wanted=True, device=device)
    for _ in range(3):
        be_busy(kept, BUSY_WAITS - 1)
        assert not kept.is_kept
        kept.note_wait(SHORT_SECONDS)
    be_busy(kept, 3 * BUSY_WAITS)
    assert kept.is_kept
    assert wishes(device) == [0]
    kept.allow_sleep()
    assert not kept.is_kept
    assert wishes(device) == [0, ANY_LATENCY]
    be_busy(kept, BUSY_WAITS - 1)
    assert not kept.is_kept
    be_busy(kept, 1)
    assert wishes(device) == [0, ANY_LATENCY, 0]
    kept.close()
    assert not kept.is_kept


def test_other_processors_may_sleep_lightly(device: Path) -> None:
    wakefulness.IDLE_DRIVER.write_text("intel_idle\n")
    kept = Wakefulness(wanted=True, device=device)
    be_busy(kept)
    assert wishes(device) == [wakefulness.LATENCY_US]
    kept.close()


@pytest.mark.parametrize("lacking", ["wish", "driver", "device", "space"])
def test_who_may_not_goes_on_without(device: Path, lacking: str) -> None:
    """No descriptor is kept of what does not help."""
    if lacking == "driver":
        wakefulness.IDLE_DRIVER.unlink()
    elif lacking == "device":
        device.unlink()
    descriptors = len(os.listdir("/proc/self/fd"))
    kept = Wakefulness(wanted=lacking != "wish", device=Path("/dev/full") if lacking == "space" else device)
    for _ in range(3):
        be_busy(kept)
        assert not kept.is_kept
        assert len(os.listdir("/proc/self/fd")) == descriptors
        kept.allow_sleep()
    kept.close()


async def test_it_ends_when_no_request_comes(device: Path, autojump_clock: trio.testing.MockClock) -> None:
    reader, writer = os.pipe()
    kept = Wakefulness(wanted=True, device=device)
    requests = Requests(kept)
    be_busy(kept)
    assert kept.is_kept
    async with trio.open_nursery() as nursery:
        nursery.start_soon(requests.wait_for_request, reader)
        await trio.sleep(wakefulness.LINGER_SECONDS / 2)
        assert kept.is_kept
        await trio.sleep(wakefulness.LINGER_SECONDS)
        assert not kept.is_kept
        os.write(writer, b"x")
    kept.close()
    os.close(reader)
    os.close(writer)
