"""Ends the connection of a daemon that was killed but cannot end: ``python guard.py PID POINT``, a process of its own.

A thread of the daemon tells the kernel to forget a name: the kernel waits for the lock of the folder, without a way
out of that. The holder of the lock may wait for an answer of the daemon. Killed then, the daemon is not gone: its
descriptors are closed by its last thread, and that is the one which waits. So the kernel goes on to expect answers from
a dead process, and everybody who asks for something of the mount waits for ever. The same goes for any wait for
our own mount, and for a daemon that crashed, while its memory is written to a core file.

The guard is told when the daemon's first thread has ended, and aborts the connection: all who wait get an error, the
last thread is let go, and the mount is one whose daemon died. It holds nothing of the mount or the volume: its output
is the connection's switch in the kernel's control file system, which does nothing once that connection is gone, though
its number be used again. It ends with the daemon, whatever that says. A guard that is killed too (with a whole
container, say) helps nobody; nor does one help against a daemon that was stopped: see ``umount -f``.

Only the standard library is used, and little of it: it takes 4 MB of memory for as long as the mount lasts.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

LOOK_SECONDS = 1.0
"""between two looks at the daemon: of a crash, which takes its time, nothing tells"""
PR_SET_PDEATHSIG = 1
"""of prctl(2): a signal for the end of the thread that began this process. A pidfd and the end of a pipe tell of the
end of the last thread; so does, where it is the first thread's, a pidfd of one thread (seen with Linux 6.18)"""
DEATH = signal.SIGUSR1


def is_dying(pid: int) -> bool:
    """The first thread of a process has ended, or a core file is written of it. False where nothing is known."""
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
    # Those to end are for a daemon's service as a whole: the daemon may take long to flush.
    signal.pthread_sigmask(signal.SIG_BLOCK, {DEATH, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
    with open("/proc/self/comm", "w") as comm:
        comm.write("kvfuse-guard")
    wait_for_end(daemon)
    os.write(sys.stdout.fileno(), b"1")


if __name__ == "__main__":
    main(int(sys.argv[1]))
