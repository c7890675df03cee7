"""Three mounts of one volume on real servers, callers on each, faults drawn from a seed: all that was seen is true.

Bytes are in RADOS or on a device, which is drawn, too (KVFUSE_TEST_ENGINE=rados or block).
KVFUSE_SCHEDULE_SECONDS=600 makes it long; KVFUSE_TEST_SEED repeats a schedule.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import schedule_content as content
from cluster_lab import DRAWN, MEMORY
from fault_load import heal
from loop_lab import loop_devices
from mounting import wait_until
from random_faults import SETTLING_SECONDS, Faults, draw
from scale import scaled
from schedule_calls import Caller
from schedule_client import RING_SECONDS, Files
from schedule_history import Call, History, Span
from schedule_lab import DEADLINE, LEASE, MOUNTS, Lab
from schedule_settling import Asker

from kvfuse_cluster.etcd import EtcdServers

pytestmark = pytest.mark.root

SECONDS = float(os.environ.get("KVFUSE_SCHEDULE_SECONDS", scaled(20)))
DEVICE_SIZE = 640 << 20
SLACK = 3.0
"""what a busy machine may add to a call"""
FILE_CALL_MAX = 3 * DEADLINE + SLACK
"""of a call of the file system: it asks one store, then the other, and an interrupted commit is looked into first"""
READ_CALL_MAX = 6 * DEADLINE + SLACK
"""the kernel asks for what it wants to have ahead, then for the page alone, and who waits for that page asks again"""
RING_CALL_MAX = RING_SECONDS + 1.0 + SLACK
"""of a block call: its deadline, and what the client waits for the answer of a daemon that is late"""
QUARANTINE = 3.0
"""of slabs on a device"""
ADOPTED_MAX = LEASE + QUARANTINE + 5.0
ANSWERS_MAX = LEASE + 5.0 + SLACK
"""from when everything is whole until a mount stores what it is given: its lease may only be about to end"""


@pytest.fixture
def lab(request: pytest.FixtureRequest, own_etcd: EtcdServers, seed: int) -> Iterator[Lab]:
    """Mounted. At the end everything runs, and the volume must be clean."""
    print(f"bytes are in {DRAWN}")
    with tempfile.TemporaryDirectory(prefix="kvfuse-schedule-") as folder, ExitStack() as stack:
        ceph, devices = None, []
        if DRAWN == "rados":
            ceph = request.getfixturevalue("own_ceph")
            stack.callback(ceph.wait_clean)
        else:
            memory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=MEMORY)))
            (device,) = stack.enter_context(loop_devices(memory / "image", DEVICE_SIZE, 1))
            devices = [device, *[memory / "image"] * 2]  # a second loop device would be found in place of the first
        stack.callback(heal, own_etcd, ceph)
        made = Lab(own_etcd, ceph, Path(folder), seed, devices)
        for links in made.links:
            stack.callback(links.close)
        for mount in made.mounts:
            stack.callback(mount.remove)
            mount.mount()
        for links in made.links:
            stack.callback(links.mend)
        stack.callback(lambda: print(*[f"{mount.point}\n{mount.log.read_text()}" for mount in made.mounts]))
        yield made


@pytest.mark.needs("ceph")  # in half of the runs
@pytest.mark.timeout(3 * SECONDS + 300)
def test_what_was_seen_under_a_random_schedule_is_true(lab: Lab, seed: int) -> None:
    steps = draw(seed, SECONDS, MOUNTS, devices=bool(lab.devices))
    print(*steps, sep="\n")
    faults = Faults(lab, lab.watch)
    wrong: list[str] = []

    def look() -> None:
        wrong.extend(lab.audit())

    lab.prepare()
    with lab.working():
        faults.run(steps, look)
        heal(lab.etcd, lab.ceph)
        wait_until(lab.has_adopted, "the slabs of killed clients")
    settle(lab)
    history = lab.history(faults.spans)
    read_everything(lab, history)
    problems = history.problems()
    report(lab, history)
    for name in sorted(
        {
            name
            for name in content.BLOCKS + content.CHILDREN + content.LINKS
            for problem in problems
            if f"'{name}'" in problem
        }
    ):
        print(f"all operations with {name}:", *lab.operations(name), sep="\n")
    assert not wrong
    assert not lab.audit()
    assert not problems, f"{len(problems)} of what was seen is not true:\n" + "\n".join(problems[:10])
    check_bounds(lab, history)
    check_adoption(lab, faults.spans)
    for mount in lab.mounts:
        mount.check_unexpected_errors()
        mount.unmount()
    lab.mounts[0].fsck()


def settle(lab: Lab) -> None:
    """Wait until all mounts do again what they are asked, and know what the others did."""

    for mount in lab.mounts:
        seconds = Asker(mount).wait()
        print(f"{mount.point} answers after {seconds:.2f} s")
        assert seconds < ANSWERS_MAX, mount.point
    until = time.monotonic() + max(SETTLING_SECONDS.values())
    wait_until(lambda: time.monotonic() > until, "the news")


def read_everything(lab: Lab, history: History) -> None:
    """What is there in the end, on every mount."""
    for index, mount in enumerate(lab.mounts):
        log = lab.folder / f"last-{index}.log"
        caller = Caller(mount.point, 900 + index, 0, log)
        files = Files(caller)
        for folder in content.FOLDERS:
            files.read_all(folder)
        files.close()
        history.take(log, index)


def longest(calls: list[Call], stops: list[Span]) -> dict[str, tuple[float, Call]]:
    """Kind of call -> the longest one and its seconds, without what it waited for a daemon that was stopped."""
    found: dict[str, tuple[float, Call]] = {}
    for call in calls:
        seconds = call.seconds
        for stop in stops:
            if stop.what == f"daemon {call.mount}":
                seconds -= max(0.0, min(stop.end, call.began + call.seconds) - max(stop.begin, call.began))
        if seconds >= found.get(call.what, (0.0, call))[0]:
            found[call.what] = seconds, call
    return found


def report(lab: Lab, history: History) -> None:
    print(f"{sum(history.counts.values())} operations: {dict(history.counts)}")
    print(f"errors: {dict(history.errors)}; while nothing was broken: {len(history.unexplained)}")
    print(*history.unexplained[:10], sep="\n")
    for what, (seconds, call) in sorted(longest(history.calls, lab.stops).items()):
        print(f"longest {what}: {seconds:.2f} s, on {call.mount} at {call.began:.2f}")
    print(f"slabs of killed clients were in use again after {[round(row.end - row.begin, 1) for row in lab.adopted]} s")
    misses, missed = sum(len(log.misses) for log in history.registers.values()), history.false_misses()
    print(f"{misses} misses through rings, of blocks that were there: {len(missed)}", *missed[:5], sep="\n")
    print(f"reads that had to show what was there: {history.strict_share():.0%}")
    print(f"leases lost: {len(lab.lost)}; connections that had to be aborted: {lab.aborted}")


def check_bounds(lab: Lab, history: History) -> None:
    slow = []
    for what, (seconds, call) in longest(history.calls, lab.stops).items():
        bound = RING_CALL_MAX if what.startswith("ring") else READ_CALL_MAX if what == "read" else FILE_CALL_MAX
        if seconds > bound:
            slow.append(f"{seconds:.2f} s, and may take {bound:g}: {call}")
    assert not slow


def check_adoption(lab: Lab, spans: list[Span]) -> None:
    """Where nothing else that it needs was broken meanwhile: whose heir is stopped has to wait for the next one."""
    for row in lab.adopted:
        others = [span for span in spans if span.what not in (row.what, "osd")]
        if not any(span.begin < row.end and span.end > row.begin for span in others):
            assert row.end - row.begin < ADOPTED_MAX, row
