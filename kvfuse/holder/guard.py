"""Aborts the connection of a killed daemon that cannot end: ``python guard.py PID POINT``, a process of its own.

A thread of the daemon invalidates a name: the kernel waits for the lock of the folder, uninterruptibly. The owner of
the lock may wait for an answer of the daemon. A daemon that is killed then does not end: its last thread closes its
descriptors, and that thread waits. So the kernel still expects answers from a dead process, and all callers of the
mount wait for ever. The same holds for any wait of the daemon for its own mount, and for a daemon that crashed, while
the kernel writes its core file.

The kernel signals the guard when the daemon's first thread has ended, and the guard aborts the connection: waiting
callers get an error, the last thread continues and ends, and the mount is that of a dead daemon. The guard holds
nothing of the mount or the volume: its output is the connection's switch in the kernel's control file system, which
does nothing once that connection has ended, even if its number is reused. The guard ends with its daemon in any case.
A killed guard (as with a whole container) cannot help, nor can any against a stopped daemon: see ``umount -f``.

It uses little of the standard library: it takes 4 MB of memory while the mount lasts.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

LOOK_SECONDS = 1.0
"""between two looks at the daemon: no event reports a crash whose core file takes its time"""
PR_SET_PDEATHSIG = 1
"""option of prctl(2): a signal at the end of the thread that started this process. A pidfd and the end of a pipe report
only the end of the last thread; so does a pidfd of the first thread (seen with Linux 6.18)"""
DEATH = signal.SIGUSR1


def is_dying(pid: int) -> bool:
    """Whether a process's first thread has ended, or the kernel writes its core file. False where that is unknown."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            lines = file.read().splitlines()
    except OSError:
        return False
    fields = dict(line.split(b":\t", 1) for line in lines if b":\t" in line)
    return fields.get(b"State", b"")[:1] in (b"Z", b"X") or fields.get(b"CoreDumping") == b"1"


def wait_for_end(parent: int) -> None:
    """Return when the parent of this process is dying, or gone."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, DEATH)
    while os.getppid() == parent and not is_dying(parent):
        if signal.sigtimedwait({DEATH}, LOOK_SECONDS):
            return


def main(daemon: int) -> None:
    """Wait for the end of ``daemon``, the parent, and write to the switch, which is the standard output."""
    # Service managers send SIGTERM to all processes: the daemon may take long to flush.
    signal.pthread_sigmask(signal.SIG_BLOCK, {DEATH, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
    with open("/proc/self/comm", "w") as comm:
        comm.write("kvfuse-guard")
    wait_for_end(daemon)
    os.write(sys.stdout.fileno(), b"1")


if __name__ == "__main__":
    main(int(sys.argv[1]))
