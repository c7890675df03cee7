"""The daemon's side of its guard (`guard`): started with the mount, dismissed when it is gone."""

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
"""where fusectl is usually mounted: a folder for each connection, by the minor number of the mount's st_dev"""

FSOPEN, FSCONFIG, FSMOUNT = 430, 431, 432
"""numbers of system calls, the same on all processors"""
FSCONFIG_CMD_CREATE = 6
CLOSE_ON_EXEC = 1
"""of fsopen and fsmount"""

KEPT = "fuse/switch"
"""with the switch; see `kept.keeper` and `main`"""

log = logging.getLogger(__name__)


class Guarding:
    """The guard of one mount, from `start` to the end of the ``with``, which is to come after that of the mount.

    Where the mount has a holder, the guard is the holder's: it gets the switch by the ``keeper``.
    """

    def __init__(self, mountpoint: Path, keeper: Keeper = NO_KEEPER) -> None:
        self._mountpoint = mountpoint
        self._keeper = keeper
        self._switch: int | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def start_guard(self, device: int | None) -> None:
        """Guard the mount with this st_dev. Where that cannot be, the log says so: the mount does without.

        None: a daemon before this one mounted it, and has said so, if it has none.

        To be called before any thread of the daemon asks the mount for something, and by that of the event loop, whose
        end the guard is told of. It waits, a few milliseconds, until the interpreter is started.
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
            # A session of its own: what is sent to the daemon's process group is not for the guard. Its errors go
            # nowhere, as somebody may wait for the end of the daemon's output.
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
        """End the connection, if it has not ended: whoever waits for an answer gets an error. False: it cannot be."""
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
            self._process.kill()  # it is deaf to what a service manager sends to all
            self._process.wait()


def open_switch(device: int, name: str = "abort", flags: int = os.O_WRONLY) -> int:
    """The descriptor of a control file of the mount with this st_dev; "1" written to ``abort`` ends it. OSError.

    Small systems do not mount the control file system, and nobody else need see it: then root has a mount of it that
    has no place, for as long as the opening takes. Where even that fails, the error is that of the usual place.
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
