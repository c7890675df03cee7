"""Block devices for tests: loop devices over files."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def loop_device(image: Path, size: int) -> Iterator[Path]:
    """A device of ``size`` bytes of zeros, whose bytes are in the file ``image``. Skips where there are none."""
    with image.open("wb") as file:
        file.truncate(size)
    if os.geteuid() != 0:
        pytest.skip("only root makes loop devices")
    try:
        made = subprocess.run(["losetup", "--find", "--show", image], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no loop devices here: {getattr(error, 'stderr', error)}")
    device = Path(made.stdout.strip())
    try:
        yield device
    finally:
        subprocess.run(["losetup", "--detach", device], check=True)


def resize(device: Path, image: Path, size: int) -> None:
    """Of 0 bytes: the device is gone, as a disk that was pulled out."""
    os.truncate(image, size)
    subprocess.run(["losetup", "--set-capacity", device], check=True)
