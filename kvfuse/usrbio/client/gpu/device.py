"""What moves bytes between the host's memory and a device's: the interface of `cuda` and `cpu`.

A copy runs in a *stream*, in the order in which copies were given to it, and beside the caller. Its *mark* says when it
has ended. Until then its source may not change, and nobody may use its target.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from mmap import PAGESIZE, PROT_READ, PROT_WRITE, mmap
from typing import Protocol

import numpy as np

from kvfuse.errors import DeviceError
from kvfuse.usrbio.client.iov import address_of


class Mark(Protocol):
    """The end of one copy."""

    def wait(self) -> None:
        """Return when the copy, and all before it in its stream, have ended. DeviceError: it failed, and has ended."""


class Stream(ABC):
    """Copies in their order. For any number of threads. Addresses and sizes are in bytes."""

    @abstractmethod
    def to_device(self, target: int, source: int, size: int) -> Mark:
        """Begin a copy from host memory at ``source`` to the device's at ``target``.

        DeviceError: it did not begin, or has ended.
        """

    @abstractmethod
    def to_host(self, target: int, source: int, size: int) -> Mark:
        """As `to_device`, from the device's memory at ``source`` to the host's at ``target``."""

    @abstractmethod
    def follow(self, stream: int) -> None:
        """Begin later copies when ``stream``, one of the device's, has done all that it was given so far."""

    @abstractmethod
    def mark(self) -> Mark:
        """The end of all copies so far, and of what the stream follows."""

    @abstractmethod
    def close(self) -> None:
        """After the last copy has ended."""


class Device(ABC):
    """One device, as this process sees it. For any number of threads. Each call may raise DeviceError."""

    name: str
    """for people"""

    @abstractmethod
    def check(self, address: int, size: int) -> None:
        """DeviceError unless these bytes are memory of this device."""

    @abstractmethod
    def pin(self, address: int, size: int, *, read_only: bool) -> None:
        """Have host memory stay where it is, so that copies need no bounce. Pages that are absent are made.

        ``read_only``: this process cannot write it.
        """

    @abstractmethod
    def unpin(self, address: int) -> None:
        """Undo `pin`, before the memory is unmapped."""

    def pinning_problem(self, *, read_only: bool) -> str:
        """Why it pins no memory, "" where it does: a page is pinned to find out."""
        descriptor = os.memfd_create("kvfuse-probe", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, PAGESIZE)
            access = PROT_READ if read_only else PROT_READ | PROT_WRITE
            page = np.frombuffer(mmap(descriptor, PAGESIZE, prot=access), np.uint8)
        finally:
            os.close(descriptor)
        try:
            self.pin(address_of(page), PAGESIZE, read_only=read_only)
            self.unpin(address_of(page))
        except DeviceError as error:
            return str(error)
        return ""

    @property
    @abstractmethod
    def lacks_export(self) -> str:
        """Why `export` cannot work, "" where it may."""

    @abstractmethod
    def export(self, address: int, size: int) -> tuple[int, int]:
        """A new descriptor of a dma-buf that has these bytes of the device, and where they begin in it."""

    @abstractmethod
    def open_stream(self) -> Stream: ...

    @abstractmethod
    def close(self) -> None:
        """Let go of the device. Its streams are closed, and nothing is pinned any more."""
