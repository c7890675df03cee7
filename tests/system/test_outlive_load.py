"""Daemons are killed over and over beside a load of files and names: no call fails, no byte is wrong, nothing grows.

A load of programs that know nothing of it: see `mixed_load`. The volume publishes strictly, so what returned is there.
With KVFUSE_TEST_SCALE=60 it is 300 kills; ``-s`` shows the stalls, the losses and errors of each kind of load, and what
processes have before and after; KVFUSE_TEST_KINDS chooses kinds.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest
from killer import Footprint, Killer, footprint, percentiles
from mixed_workers import loaded
from mounting import KvfuseMount, temporary_mount, wait_until
from scale import scaled

pytestmark = pytest.mark.ring(3)

WORDS = ("outlive=true", "publish=strict", "volume.capacity=1GiB", "volume.segment_size=64MiB")
KINDS = os.environ.get("KVFUSE_TEST_KINDS", "stores,appends,pages,names,rings,clients").split(",")
"""of load, at once: a variable, as one alone is easier to look into"""
ROUNDS = 5
"""of kills"""
ROUND_SECONDS = 30.0
"""that one may take on a machine that does much else"""
GROWTH_DESCRIPTORS, GROWTH_BYTES = 24, 24 << 20
"""of a process, which may differ by what is under way, and by the segments that are in use by then"""


def kill_beside(
    mounts: Sequence[KvfuseMount], kinds: Sequence[str], seed: int, rounds: int = ROUNDS, top: str = "."
) -> None:
    """The rounds, more where there is time; and what they were like is printed."""
    rounds = scaled(rounds)
    with loaded(mounts, kinds, seed, top) as workers:
        with Killer(mounts, seed, rounds=1) as killer:
            killer.wait(ROUND_SECONDS)
        before = [footprint(mount) for mount in mounts]
        with Killer(mounts, seed + 1, rounds=rounds) as killer:
            killer.wait(rounds * ROUND_SECONDS)
        reports = [worker.report() for worker in workers]
    print(f"{killer}; {percentiles([report.longest for report in reports])} (longest calls of the load)")
    for report in reports:
        told = f"{report.lost} losses told, {len(report.errors)} errors"
        print(
            f"{report.kind}: {report.calls} calls, {told}, longest {report.longest:.2f} s", *report.errors, sep="\n  "
        )
    for mount, former in zip(mounts, before, strict=True):
        print(f"before: {former}\nafter:  {footprint(mount)}")
    assert [error for report in reports for error in report.errors] == []
    assert len(killer.stalls) == rounds, "the machine is too slow for the rounds"
    assert all(report.calls for report in reports)
    for mount in mounts:
        assert "another version kept" not in mount.log.read_text(), "something is kept, and nobody is to find it"
    for mount, former in zip(mounts, before, strict=True):
        wait_until(lambda mount=mount, former=former: has_not_grown(footprint(mount), former), "what has grown")


def has_not_grown(now: Footprint, before: Footprint) -> bool:
    return (
        now.holder_descriptors <= before.holder_descriptors + GROWTH_DESCRIPTORS
        and now.daemon_descriptors <= before.daemon_descriptors + GROWTH_DESCRIPTORS
        and now.holder_resident <= before.holder_resident + (2 << 20)
        and now.daemon_resident <= before.daemon_resident + GROWTH_BYTES
        and now.children <= 3
    )


@pytest.mark.timeout(scaled(600))
@pytest.mark.parametrize("words", [(), ("standby",), ("cache",)], ids=["", "standby", "cache"])
def test_no_call_fails_and_no_byte_is_wrong(words: tuple[str, ...], seed: int) -> None:
    with temporary_mount((*WORDS, *words)) as mount:
        kill_beside([mount], KINDS, seed)
