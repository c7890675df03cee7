"""Block devices for tests: loop devices over files."""

from __future__ import annotations

import fcntl
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

LOOP_SET_STATUS64, LOOP_GET_STATUS64, LOOP_INFO_SIZE = 0x4C04, 0x4C05, 232
LIMIT = slice(32, 40)
"""``lo_sizelimit`` in the kernel's struct"""


@contextmanager
def loop_device(image: Path, size: int) -> Iterator[Path]:
    """A device of ``size`` bytes of zeros, whose bytes are in the file ``image``. Skips where there are none."""
    with loop_devices(image, size, 1, direct=False) as devices:
        yield devices[0]


@contextmanager
def loop_devices(image: Path, size: int, count: int, *, direct: bool = True) -> Iterator[list[Path]]:
    """As `loop_device`, ``count`` of them over one file: so as many hosts see one device, if ``direct``."""
    with image.open("wb") as file:
        file.truncate(size)
    if os.geteuid() != 0:
        pytest.skip("only root makes loop devices")
    command = ["losetup", "--find", "--show", f"--direct-io={'on' if direct else 'off'}", image]
    with ExitStack() as stack:
        stack.callback(image.unlink, missing_ok=True)  # what was written there may be much
        devices = []
        for _ in range(count):
            try:
                made = subprocess.run(command, capture_output=True, text=True, check=True)
            except (OSError, subprocess.CalledProcessError) as error:
                pytest.skip(f"no loop devices here: {getattr(error, 'stderr', error)}")
            devices.append(Path(made.stdout.strip()))
            stack.callback(subprocess.run, ["losetup", "--detach", devices[-1]], check=True)
        yield devices


def set_limit(device: Path, size: int) -> None:
    """Have only the first ``size`` bytes of the file in the device; 0: all. The file stays as it is."""
    with device.open("rb") as file:
        state = bytearray(LOOP_INFO_SIZE)
        fcntl.ioctl(file, LOOP_GET_STATUS64, state)
        state[LIMIT] = size.to_bytes(8, "little")
        fcntl.ioctl(file, LOOP_SET_STATUS64, state)


def resize(device: Path, image: Path, size: int) -> None:
    """Of 0 bytes: the device is gone, as a disk that was pulled out."""
    os.truncate(image, size)
    subprocess.run(["losetup", "--set-capacity", device], check=True)
