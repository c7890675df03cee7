"""Keeps idle processors from deep sleep while requests follow each other closely.

Caller and daemon wait for each other: each request wakes one of the two, on a processor that has been idle for some
microseconds. If that processor slept meanwhile - deeply, or as a guest whose hypervisor has to schedule it again -
its wake-up takes longer than most requests. The kernel's interface against that is PM QoS: while a process holds
/dev/cpu_dma_latency open, no idle processor enters a sleep with a longer wake-up than the latency written there. It
costs power, and no processor time: an idle processor stays free for any thread. Only root may.
"""

from __future__ import annotations

import logging
import os
import struct
from pathlib import Path

LATENCY_DEVICE = Path("/dev/cpu_dma_latency")
IDLE_DRIVER = Path("/sys/devices/system/cpu/cpuidle/current_driver")
GUEST_DRIVER = "haltpoll"
"""idle driver of virtual machines. It claims a wake-up in 1 us, without the hypervisor: only latency 0 has an effect"""
LATENCY_US = 10
"""wake-up latency elsewhere: light sleep is allowed"""
ANY_LATENCY = -1
"""no limit, as before the first write"""
SHORT_SECONDS = 0.002
BUSY_WAITS = 64
"""so many waits in a row below ``SHORT_SECONDS`` count as busy"""
LINGER_SECONDS = 0.02
"""shortest time that the limit stays without work"""

log = logging.getLogger(__name__)


class Wakefulness:
    """The latency limit of one thread that waits for work. Without ``wanted``, or where the device cannot be opened, it
    does nothing; else it holds a descriptor until `close`."""

    def __init__(self, *, wanted: bool, device: Path = LATENCY_DEVICE) -> None:
        self._descriptor = -1
        self._latency = LATENCY_US
        self._short_waits = 0
        """short waits in a row"""
        self.is_kept = False
        """the limit is set; a thread without work for one or two ``LINGER_SECONDS`` calls `allow_sleep`"""
        if wanted:
            self._open_device(device)

    def _open_device(self, device: Path) -> None:
        try:
            if IDLE_DRIVER.read_text().strip() == GUEST_DRIVER:
                self._latency = 0
            self._descriptor = os.open(device, os.O_WRONLY)
        except OSError as error:  # not root, a container, a machine whose processors know one way to idle
            log.debug("idle processors may sleep deeply: %s", error)

    def note_wait(self, seconds: float) -> None:
        """Note that a wait took ``seconds``; set the limit once waits are short."""
        if seconds >= SHORT_SECONDS:
            self._short_waits = 0
            return
        self._short_waits += 1
        if self._short_waits == BUSY_WAITS and not self.is_kept:
            self.is_kept = self._write_latency(self._latency)

    def allow_sleep(self) -> None:
        """Withdraw this thread's limit: processors may sleep."""
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
            log.warning("idle processors may sleep deeply: %s", error)
            self.close()  # this withdraws the former limit
            return False
        return True
