"""What is broken when, drawn from a seed: daemons, members of etcd and OSDs are killed or stopped, the monitor is
stopped, a daemon is cut from etcd; also two at once.

Never more than may be survived: one OSD at a time, and the next one only when every object is on its replicas again;
etcd has no majority for a bounded time only. Where bytes are on a device the first host loses it instead of an OSD.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from cluster_lab import wait_leader
from loop_lab import set_limit
from schedule_history import Span
from schedule_lab import DEADLINE, LEASE, Lab

PAUSES = (2.0, 7.0)
"""seconds between two faults, from the end of the first one"""
SECONDS = {
    "kill daemon": (0.2, 1.5 * LEASE),
    "stop daemon": (0.5, 3 * LEASE),
    "cut daemon": (0.5, 3 * LEASE),
    "kill leader": (0.5, 5.0),
    "stop leader": (0.5, 2 * LEASE),
    "kill follower": (0.5, 5.0),
    "stop follower": (0.5, 2 * LEASE),
    "stop majority": (0.5, 2 * LEASE),
    "kill osd": (0.5, 6.0),
    "stop osd": (0.5, 8.0),
    "stop monitor": (0.5, 8.0),
    "lose device": (0.5, 8.0),
}
"""what may happen -> for how long, at least and at most"""
WEIGHTS = {"kill daemon": 3, "stop daemon": 4}
"""how often, where not once"""
PAIR_CHANCE = 0.35
SETTLING_SECONDS = {"etcd": DEADLINE + 3.0, "osd": DEADLINE + 5.0, "device": DEADLINE + 5.0, "daemon": LEASE + 2.0}
"""after a fault ended, until mounts are expected to be as they were before. An OSD that is back has to agree with the
others first; one that was away is asked again a second later, and a device that was away four seconds later at most"""


class Fault(NamedTuple):
    what: str
    index: int
    """which daemon, follower or OSD; nothing for a device"""
    seconds: float

    @property
    def kind(self) -> str:
        """Servers of one kind are not broken two at a time, but daemons."""
        victim = self.what.split(" ")[1]
        if victim == "monitor":  # without it nobody learns that an OSD is down
            return "osd"
        return victim if victim in ("daemon", "osd", "device") else "etcd"


class Step(NamedTuple):
    """Faults that begin together, a pause after the ones before have ended."""

    pause: float
    faults: tuple[Fault, ...]

    @property
    def seconds(self) -> float:
        return self.pause + max(fault.seconds for fault in self.faults)


def draw(seed: int, seconds: float, mounts: int, *, devices: bool = False) -> list[Step]:
    """A schedule that takes about that long. ``devices``: bytes are there, and not in OSDs."""
    unknown = ("osd", "monitor") if devices else ("device",)
    kinds = [what for what in SECONDS if not what.endswith(unknown)]
    rng = random.Random(f"faults {seed}")
    steps: list[Step] = []
    while sum(step.seconds for step in steps) < seconds - PAUSES[1]:
        faults = [_fault(rng, mounts, kinds)]
        while rng.random() < PAIR_CHANCE and len(faults) < 2:
            other = _fault(rng, mounts, kinds)
            if other.kind != faults[0].kind or (other.kind == "daemon" and other.index != faults[0].index):
                faults.append(other)
        steps.append(Step(rng.uniform(*PAUSES), tuple(_mendable(faults))))
    return steps


def _mendable(faults: list[Fault]) -> list[Fault]:
    """A daemon that was killed is mounted again when etcd has a majority: without one that is refused."""
    longest = max(fault.seconds for fault in faults)
    if any(fault.what == "stop majority" for fault in faults):
        return [fault._replace(seconds=longest) if fault.what == "kill daemon" else fault for fault in faults]
    return faults


def _fault(rng: random.Random, mounts: int, kinds: list[str]) -> Fault:
    (what,) = rng.choices(kinds, [WEIGHTS.get(what, 1) for what in kinds])
    return Fault(what, rng.randrange(mounts), round(rng.uniform(*SECONDS[what]), 1))


class Faults:
    """Breaks a lab by a schedule. `spans`: what was broken, and when."""

    def __init__(self, lab: Lab, check: Callable[[], None]) -> None:
        """``check`` is called often; what it raises ends the schedule."""
        self.lab = lab
        self.spans: list[Span] = []
        self._check = check

    def run(self, steps: list[Step], quiet: Callable[[], None]) -> None:
        """All steps, and ``quiet`` between them, while everything runs."""
        for step in steps:
            self._wait(time.monotonic() + step.pause)
            if self.lab.ceph is not None and any(fault.kind == "osd" for fault in step.faults):
                self.lab.ceph.wait_clean()
            began = time.monotonic()
            undo = [(fault.seconds, self._begin(fault), fault) for fault in step.faults]
            undo.sort(key=lambda row: (row[0], row[2].kind == "daemon"))
            for seconds, repair, fault in undo:
                self._wait(began + seconds)
                self._say("end  ", fault)
                repair()
                self._end(fault, began)
            quiet()

    def _wait(self, until: float) -> None:
        while (left := until - time.monotonic()) > 0:
            threading.Event().wait(min(left, 0.2))
            self._check()

    def _say(self, what: str, fault: Fault) -> None:
        print(f"{time.monotonic():.2f} {what} {fault.what} {fault.index}, {fault.seconds} s", flush=True)

    def _end(self, fault: Fault, began: float) -> None:
        settled = time.monotonic() + SETTLING_SECONDS[fault.kind]
        what = {"daemon": f"daemon {fault.index}", "device": "device 0"}.get(fault.kind, fault.kind)
        self.spans.append(Span(what, began, settled))

    def _begin(self, fault: Fault) -> Callable[[], None]:
        """Break it; what mends it."""
        self._say("begin", fault)
        verb, victim = fault.what.split(" ")
        if victim == "daemon":
            return self._break_daemon(verb, fault.index)
        if victim == "osd":
            return self._break_osd(verb, fault.index)
        if victim == "monitor":
            return self._stop_monitor()
        if victim == "device":
            device = self.lab.devices[0]
            set_limit(device, 4096)
            return lambda: set_limit(device, 0)
        return self._break_members(verb, victim, fault.index)

    def _break_daemon(self, verb: str, index: int) -> Callable[[], None]:
        lab = self.lab
        if verb == "kill":
            lab.kill_daemon(index)
            return lambda: lab.mount_again(index)
        if verb == "cut":
            lab.links[index].cut()
            return lab.links[index].mend
        pid, began = lab.mounts[index].pid, time.monotonic()
        os.kill(pid, signal.SIGSTOP)

        def wake() -> None:
            os.kill(pid, signal.SIGCONT)
            lab.stops.append(Span(f"daemon {index}", began, time.monotonic()))

        return wake

    def _break_osd(self, verb: str, index: int) -> Callable[[], None]:
        ceph = self.lab.ceph
        assert ceph is not None
        if verb == "kill":
            ceph.kill(index)
            return lambda: ceph.restart(index)
        ceph.kill(index, signal.SIGSTOP)
        return lambda: ceph.kill(index, signal.SIGCONT)

    def _stop_monitor(self) -> Callable[[], None]:
        ceph = self.lab.ceph
        assert ceph is not None
        ceph.monitor.kill(signal.SIGSTOP)
        return lambda: ceph.monitor.kill(signal.SIGCONT)

    def _break_members(self, verb: str, victim: str, index: int) -> Callable[[], None]:
        etcd = self.lab.etcd
        leader = wait_leader(etcd)
        others = [number for number in range(len(etcd.members)) if number != leader]
        follower = others[index % len(others)]
        broken = {"leader": [leader], "follower": [follower], "majority": [leader, follower]}[victim]
        for number in broken:
            etcd.kill(number, signal.SIGSTOP if verb == "stop" else signal.SIGKILL)

        def mend() -> None:
            for number in broken:
                if verb == "stop":
                    etcd.kill(number, signal.SIGCONT)
                else:
                    etcd.restart(number)

        return mend
