"""A disk of a test's own, with a file system, that gets full, fails, or turns read-only on demand."""

from __future__ import annotations

import errno
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from bad_medium import BadMedium, bad_medium
from mounting import wait_until

SIZE = 192 << 20


class SickDisk:
    """Mounted at ``path``, well at first."""

    def __init__(self, path: Path, device: Path, medium: BadMedium) -> None:
        self.path = path
        self.device = device
        self._medium = medium
        self._ballast = path / "ballast"

    def fill(self) -> None:
        """To the last block."""
        with self._ballast.open("wb", buffering=0) as file:
            for size in (1 << 20, 4096, 1):
                try:
                    while True:
                        file.write(bytes(size))
                except OSError as error:
                    assert error.errno == errno.ENOSPC, error
            os.fsync(file.fileno())

    def make_room(self) -> None:
        self._ballast.unlink(missing_ok=True)

    def refuse(self, *paths: Path) -> None:
        """What is written to the blocks that these files have now; without any, all syncs.

        Not what the file system says of them: one whose own pages are lost is damaged, whatever is above.
        """
        os.sync()  # to blocks
        self._medium.refuse(*[one for path in paths for one in _blocks(path)])

    def mend(self) -> None:
        self._medium.mend()

    def turn_read_only(self) -> None:
        """As the kernel does for an error of the file system."""
        Path(f"/sys/fs/ext4/{self.device.name}/trigger_fs_error").write_text("1")

    def mount(self) -> None:
        subprocess.run(["mount", "-o", "errors=remount-ro", self.device, self.path], check=True)

    def mount_again(self) -> None:
        """All that is not on the disk is gone: nothing of it is in a cache afterwards."""
        unmount = ["umount", self.path]
        wait_until(
            lambda: subprocess.run(unmount, capture_output=True, check=False).returncode == 0, "the disk's users"
        )
        subprocess.run(["e2fsck", "-fy", self.device], capture_output=True, check=False)
        self.mount()


def _blocks(path: Path) -> Iterator[range]:
    """Where the bytes of a file are on its device."""
    shown = subprocess.run(["filefrag", "-v", "-b1", path], capture_output=True, text=True, check=True).stdout
    for _, _, first, last in re.findall(r"^ *\d+: +(\d+)\.\. *(\d+): +(\d+)\.\. *(\d+):", shown, re.MULTILINE):
        yield range(int(first), int(last) + 1)


@contextmanager
def sick_disk(base: Path, *, journal: bool = False) -> Iterator[SickDisk]:
    """A disk below ``base``. With a ``journal`` the file system turns read-only where that cannot be written.

    Skips where this machine has no loop devices, or no ext4.
    """
    if os.geteuid() != 0:
        pytest.skip("only root makes loop devices")
    image, path = base / "image", base / "disk"
    path.mkdir()
    with image.open("wb") as file:
        file.truncate(SIZE)
    words = ["-O", "has_journal" if journal else "^has_journal", "-E", "lazy_itable_init=0"]
    with ExitStack() as stack:
        try:
            subprocess.run(["mkfs.ext4", "-q", "-m", "0", *words, image], capture_output=True, check=True)
            medium = stack.enter_context(bad_medium(image, base / "medium"))
            command = ["losetup", "--find", "--show", image]
            made = subprocess.run(command, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no loop devices with ext4 here: {getattr(error, 'stderr', error)}")
        device = Path(made.stdout.strip())
        stack.callback(subprocess.run, ["losetup", "--detach", device], check=True)
        disk = SickDisk(path, device, medium)
        stack.callback(subprocess.run, ["umount", "-l", path], check=False)
        disk.mount()
        stack.callback(disk.mend)
        yield disk
