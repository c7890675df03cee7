"""Defines batches of a ring's entries that are alike, as the ring's thread serves them."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvfuse.usrbio.daemon.call import Entry
from kvfuse.usrbio.daemon.ring_reads import ASK
from kvfuse.usrbio.protocol.queues import Entries

LEFT = ASK
"""a result: the event loop has to do it, or it is to be checked by itself"""
Results = npt.NDArray[np.int64]


class Batch(NamedTuple):
    """Entries with the same operation, priority, flags, handle and iov: one at least."""

    first: Entry
    rows: Entries
    taken_at: float
    """monotonic seconds"""


class InThread(Protocol):
    """Serves a batch in the ring's thread, as far as that needs no wait."""

    def __call__(self, batch: Batch) -> Results | None:
        """The results, some of them `LEFT`; the caller completes the others. None: all are left."""


class Together(Protocol):
    """Has the event loop execute entries of a batch together."""

    def __call__(self, batch: Batch) -> bool:
        """False: it took none of them."""
