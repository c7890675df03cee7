"""The page of shared memory where a client notes what it reads, and asks for, without the daemon: its layout.

A client has one for each table that it maps. What it writes there is a hint: the policy of a namespace learns from it.
"""

from __future__ import annotations

import threading

HEADER_SIZE = 4096
"""the first page: how many rows (u64) and questions (u64) were ever written"""
TOUCHES_MAX = 8192
"""rows (u32) that were read, in turn, behind the first page"""
ASKED_MAX, ASKED_SIZE = 4096, 256
"""behind these: keys of questions that the client answered itself, as not all of the blocks were there, in turn, each a
byte of length and the key; before each question one of length 0"""
ASKED_OFFSET = HEADER_SIZE + 4 * TOUCHES_MAX
TOUCHES_SIZE = ASKED_OFFSET + ASKED_MAX * ASKED_SIZE

_turnstile = threading.Lock()


def fence() -> None:
    """Accesses before it are done before those behind it: what precedes a release is done before the next acquire."""
    for _ in range(2):
        with _turnstile:
            pass
