"""Signals that a holder gets, as bytes of a socket for its loop; see `main`. Standard library only."""

from __future__ import annotations

import signal
import socket

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
OTHER_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF, signal.SIGIO)
"""that would end a process, and mean nothing to this one: as from a tool that has other daemons open their logs anew"""


def take_signals() -> socket.socket:
    """From here on each signal, also of a child that has ended, is a byte that can be received: its number."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {*STOP_SIGNALS, signal.SIGCHLD})
    wake, woken = socket.socketpair()
    for end in (wake, woken):
        end.setblocking(False)
    signal.set_wakeup_fd(woken.detach())
    for number in (*STOP_SIGNALS, *OTHER_SIGNALS, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)  # ignored, they would be ignored by daemons, too
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {*STOP_SIGNALS, signal.SIGCHLD})
    return wake
