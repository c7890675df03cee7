"""Turns a holder's signals into bytes of a socket for its loop; see `main`. Standard library only."""

from __future__ import annotations

import signal
import socket

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
OTHER_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF, signal.SIGIO)
"""the holder ignores these, which would end a process: tools send some to have daemons reopen their logs"""


def take_signals() -> socket.socket:
    """Have each signal, also SIGCHLD, arrive as a byte of the returned socket: its number."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {*STOP_SIGNALS, signal.SIGCHLD})
    wake, woken = socket.socketpair()
    for end in (wake, woken):
        end.setblocking(False)
    signal.set_wakeup_fd(woken.detach())
    for number in (*STOP_SIGNALS, *OTHER_SIGNALS, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)  # daemons would inherit SIG_IGN
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {*STOP_SIGNALS, signal.SIGCHLD})
    return wake
