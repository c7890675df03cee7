"""Processors that do not fall asleep while there is work every moment.

Who asks waits for the daemon, and the daemon for who asks: with each request one of the two is woken, on a processor
that has been idle for some microseconds. If that slept meanwhile - deeply, or as a guest whose hypervisor has to be
asked to go on with it - then waking it takes longer than most requests. The kernel's interface against that is PM QoS:
while somebody holds /dev/cpu_dma_latency open, no idle processor sleeps so that waking it takes longer than he wrote
there. It costs power, and nobody's time: an idle processor is still free for who needs it. Only root may.
"""

from __future__ import annotations

import logging
import os
import struct
from pathlib import Path

LATENCY_DEVICE = Path("/dev/cpu_dma_latency")
IDLE_DRIVER = Path("/sys/devices/system/cpu/cpuidle/current_driver")
GUEST_DRIVER = "haltpoll"
"""of virtual machines. It says that waking takes 1 us, and does not count the hypervisor: only 0 makes a difference"""
LATENCY_US = 10
"""what waking may take elsewhere: light sleep is allowed"""
ANY_LATENCY = -1
"""no wish; as long as nothing was written, too"""
SHORT_SECONDS = 0.002
BUSY_WAITS = 64
"""So many waits in a row that were that short: there is work every moment."""
LINGER_SECONDS = 0.02
"""how long to go on, at least, when there is none"""

log = logging.getLogger(__name__)


class Wakefulness:
    """What one thread that waits for work wishes of the kernel. Unless it is ``wanted``, or where it is not to be had,
    nothing; else it holds a descriptor, until `close`."""

    def __init__(self, *, wanted: bool, device: Path = LATENCY_DEVICE) -> None:
        self._descriptor = -1
        self._latency = LATENCY_US
        self._short_waits = 0
        """in a row"""
        self.is_kept = False
        """A thread that waits longer than ``LINGER_SECONDS`` from now, or twice as long, calls `end`."""
        if wanted:
            self._open_device(device)

    def _open_device(self, device: Path) -> None:
        try:
            if IDLE_DRIVER.read_text().strip() == GUEST_DRIVER:
                self._latency = 0
            self._descriptor = os.open(device, os.O_WRONLY)
        except OSError as error:  # not root, a container, a machine whose processors know one way to idle
            log.debug("idle processors sleep as they like: %s", error)

    def note_wait(self, seconds: float) -> None:
        """There is work, after so long."""
        if seconds >= SHORT_SECONDS:
            self._short_waits = 0
            return
        self._short_waits += 1
        if self._short_waits == BUSY_WAITS and not self.is_kept:
            self.is_kept = self._write_latency(self._latency)

    def allow_sleep(self) -> None:
        """Processors may sleep, as far as this thread is concerned."""
        self._short_waits = 0
        if self.is_kept:
            self.is_kept = False
            self._write_latency(ANY_LATENCY)

    def close(self) -> None:
        self.is_kept = False
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _write_latency(self, latency: int) -> bool:
        if self._descriptor < 0:
            return False
        try:
            os.write(self._descriptor, struct.pack("=i", latency))
        except OSError as error:
            log.warning("idle processors sleep as they like: %s", error)
            self.close()  # which withdraws what was wished before
            return False
        return True
