"""Starts the guard (`guard`) of a mount, or gives its switch to the holder, and ends it after the unmount."""

from __future__ import annotations

import ctypes
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Self

from kvfuse.holder import guard
from kvfuse.kept.keeper import NO_KEEPER, Keeper

CONNECTIONS = Path("/sys/fs/fuse/connections")
"""usual mount point of fusectl: a folder for each connection, by the minor number of the mount's st_dev"""

FSOPEN, FSCONFIG, FSMOUNT = 430, 431, 432
"""numbers of system calls, the same on all processors"""
FSCONFIG_CMD_CREATE = 6
CLOSE_ON_EXEC = 1
"""flag of fsopen and fsmount"""

KEPT = "fuse/switch"
"""keeper entry: the switch; see `kept.keeper` and `main`"""

log = logging.getLogger(__name__)


class Guarding:
    """The guard of one mount, from `start_guard` to the end of the ``with``, which has to follow the unmount.

    Where the mount has a holder, the guard is the holder's: the ``keeper`` passes it the switch.
    """

    def __init__(self, mountpoint: Path, keeper: Keeper = NO_KEEPER) -> None:
        self._mountpoint = mountpoint
        self._keeper = keeper
        self._switch: int | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def start_guard(self, device: int | None) -> None:
        """Guard the mount with this st_dev. On failure log it: the mount runs without a guard.

        None: a former daemon mounted it, and has logged a failure.

        Call it before any thread of the daemon uses the mount, in the event loop's thread: the guard reacts to that
        thread's end. The call waits a few milliseconds for the start of the interpreter.
        """
        command = [sys.executable, "-I", "-S", guard.__file__, str(os.getpid()), os.fspath(self._mountpoint)]
        try:
            left = self._keeper.take(KEPT)
            if left is None and device is None:
                return
            self._switch = open_switch(device or 0) if left is None else left.descriptors[0]
            if self._keeper.outlives:
                if left is None:
                    self._keeper.keep(KEPT, descriptors=[self._switch])
                return
            # A session of its own: signals to the daemon's process group do not reach the guard. Its errors are
            # discarded, as the daemon's starter may wait for the end of the daemon's output.
            nowhere = subprocess.DEVNULL
            self._process = subprocess.Popen(
                command, cwd="/", stdin=nowhere, stdout=self._switch, stderr=nowhere, start_new_session=True
            )
        except OSError as error:
            log.warning(
                "%s has no guard (%s): were the daemon killed, callers might wait until 'umount -f'; where %s is "
                "missing, as root: mount -t fusectl none %s", self._mountpoint, error, CONNECTIONS, CONNECTIONS,
            )  # fmt: skip

    def abort_connection(self) -> bool:
        """Abort the connection, unless it has ended: waiting callers get an error. False: the switch is unknown."""
        if self._switch is None:
            return False
        os.write(self._switch, b"1")
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._switch is not None:
            os.close(self._switch)
        if self._process is not None:
            self._process.kill()  # it blocks the signals that a service manager sends to all
            self._process.wait()


def open_switch(device: int, name: str = "abort", flags: int = os.O_WRONLY) -> int:
    """Open a control file of the mount with this st_dev; "1" written to ``abort`` ends the connection. OSError.

    Small systems do not mount the control file system: then root mounts it detached, without a path, while it opens
    the file. Where even that fails, the error is that of the usual place.
    """
    name = f"{os.minor(device)}/{name}"
    try:
        return os.open(CONNECTIONS / name, flags)
    except FileNotFoundError:
        libc = ctypes.CDLL(None)
        context = libc.syscall(FSOPEN, b"fusectl", CLOSE_ON_EXEC)
        if context < 0:
            raise
        try:
            libc.syscall(FSCONFIG, context, FSCONFIG_CMD_CREATE, None, None, 0)
            mount = libc.syscall(FSMOUNT, context, CLOSE_ON_EXEC, 0)
        finally:
            os.close(context)
        if mount < 0:
            raise
        try:
            return os.open(name, flags, dir_fd=mount)
        finally:
            os.close(mount)
