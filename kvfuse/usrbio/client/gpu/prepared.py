"""Entries of a ring whose memory is a device's: what is done between their placing, submission and completion."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from kvfuse.errors import DeviceError
from kvfuse.usrbio.client.gpu.gpu_memory import DeviceCopy, Failed, GpuIov, StagedEntries, StagedEntry
from kvfuse.usrbio.client.iov import Iov
from kvfuse.usrbio.protocol.wire import Op

Ending = Callable[[int, bool], DeviceCopy | None]
"""what is to be done when an entry completes: (result, whether it was answered with a view); a copy that it began"""


class DeviceEntries:
    """Of one ring. Entries are known by their number among those that are prepared, and by their ticket.

    ``endings``: the ring's, by ticket. Nothing here refers to the ring, which goes with its descriptors when dropped.
    """

    def __init__(self, endings: dict[int, Ending]) -> None:
        self._endings = endings
        self._brought: list[tuple[int, StagedEntry]] = []
        """those that write what a device has"""
        self._direct: list[tuple[int, int, GpuIov]] = []
        """(number, ticket, iov) of those that the daemon's adapter brings to a device"""

    def attend(self, op: Op, first: int, tickets: Sequence[int], staged: StagedEntries) -> None:
        """Entries from number ``first`` on use staging memory: it is copied to or from devices in time."""
        for number, (ticket, entry) in enumerate(zip(tickets, staged.entries, strict=True), first):
            if entry is not None:
                self._endings[ticket] = partial(entry.end, op)
                if op in (Op.WRITE, Op.PUT):
                    self._brought.append((number, entry))

    def follow(self, first: int, tickets: Sequence[int], iovs: Sequence[Iov | GpuIov | None]) -> None:
        """Entries from number ``first`` on are brought by the adapter: devices have to be done with that memory."""
        for number, (ticket, iov) in enumerate(zip(tickets, iovs, strict=True), first):
            if isinstance(iov, GpuIov):
                self._direct.append((number, ticket, iov))

    def prepare(self, spoil: Callable[[int], None]) -> None:
        """Before the entries are submitted. Those for which a device fails will fail.

        ``spoil``: has the daemon refuse an entry, by its number.
        """
        if self._brought:
            self._bring(spoil)
        if self._direct:
            self._catch_up(spoil)

    def _bring(self, spoil: Callable[[int], None]) -> None:
        """Copy what devices write to staging memory."""
        destinations = [(number, entry, entry.bring()) for number, entry in self._brought]
        self._brought.clear()
        for number, entry, landing in destinations:
            if (error := landing.finish()) is not None:
                entry.fail(error)
                spoil(number)

    def _catch_up(self, spoil: Callable[[int], None]) -> None:
        """Wait for what devices do with memory that is about to be written."""
        failures: dict[GpuIov, DeviceError | None] = {}
        for number, ticket, iov in self._direct:
            if iov not in failures:
                failures[iov] = iov.catch_up()
            if (error := failures[iov]) is not None:
                self._endings[ticket] = partial(_fail, iov, error)
                spoil(number)
        self._direct.clear()


def _fail(iov: GpuIov, error: DeviceError, result: int, viewed: bool) -> DeviceCopy:
    """The ending of an entry whose device failed before it was submitted."""
    return DeviceCopy(iov, Failed(error), None)
