"""Mounts are upgraded over and over beside a load that checks all it reads: no call fails, and nothing is lost.

Between versions of the project's history, too, forth and back.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from former_version import ROOT, VERSION, former_tree, python_of
from killer import footprint, percentiles
from mixed_workers import Worker, loaded
from mounting import FOREGROUND, temporary_mount, wait_until
from scale import scaled
from test_outlive_hosts import clients, noticed, two_hosts
from test_outlive_load import has_not_grown
from upgrading import holder_says, other_python, refused, upgrade

import kvfuse
from kvfuse_cluster.etcd import EtcdServers

pytestmark = [pytest.mark.root, pytest.mark.ring(3)]

WORDS = ("outlive=true", "publish=strict", "volume.capacity=1GiB", "volume.segment_size=64MiB")
KINDS = ("stores", "names", "appends", "pages", "rings")
KINDS_OF_HOSTS = ("stores", "appends", "pages", "rings")
"""without names that both hosts change: now and then a call finds one stale twice, where daemons change in between"""
UPGRADES = 4
ROUNDS = 1
"""of four upgrades"""
BREAKS = ["import kvfuse_is_not_here"]


def check(workers: Sequence[Worker], stalls: Sequence[float]) -> None:
    """No call failed, no byte was wrong, and none was lost. The longest waits are printed."""
    reports = [worker.report() for worker in workers]
    print(f"{len(stalls)} upgrades, calls waited: {percentiles(stalls)}")
    for report in reports:
        print(f"{report.kind}: {report.calls} calls, {report.lost} losses told, longest {report.longest:.2f} s")
    assert [error for report in reports for error in report.errors] == []
    assert all(report.calls for report in reports)
    assert sum(report.lost for report in reports) == 0


@pytest.mark.timeout(900)
def test_the_same_version_again_and_again(seed: int, tmp_path: Path) -> None:
    with temporary_mount(WORDS) as mount:
        with other_python(tmp_path, BREAKS) as broken, loaded([mount], KINDS, seed) as workers:
            upgrade(mount)
            before = footprint(mount)
            stalls = [upgrade(mount) for _ in range(scaled(UPGRADES))]
            assert "kvfuse_is_not_here" in refused(mount, "--python", broken)
            check(workers, stalls)
        said = holder_says(mount)
        assert (said["upgrades"], said["deaths"]) == (1 + len(stalls), 0)
        wait_until(lambda: has_not_grown(footprint(mount), before), "what has grown")


@pytest.mark.timeout(900)
def test_a_version_of_before_and_back(seed: int, tmp_path: Path) -> None:
    """Mounted by the former one: each is followed by the other one."""
    former = python_of(former_tree(tmp_path), tmp_path / "former-python")
    present = python_of(ROOT, tmp_path / "present-python")
    with temporary_mount(WORDS, command=[former, *FOREGROUND[1:]]) as mount:
        version = mount.point / ".kvfuse" / "version"
        stalls = []
        with loaded([mount], KINDS, seed) as workers:
            for number in range(scaled(UPGRADES)):
                assert version.read_text() == f"{kvfuse.__version__ if number % 2 else VERSION}\n"
                stalls.append(upgrade(mount, "--python", former if number % 2 else present))
            check(workers, stalls)
        for text in ("is dropped", "and dropped", "is not used", "loses", "is lost"):
            assert text not in mount.log.read_text()


@pytest.mark.timeout(900)
def test_two_hosts(seed: int, etcd_alone: EtcdServers, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """One after the other, to the former version and back: other hosts notice nothing."""
    former = python_of(former_tree(tmp_path), tmp_path / "former-python")
    present = python_of(ROOT, tmp_path / "present-python")
    with two_hosts(tmp_path, etcd_alone, "file", request) as mounts:
        before = clients(mounts[0].source)
        with loaded(mounts, KINDS_OF_HOSTS, seed) as workers:
            stalls = [
                upgrade(mount, "--python", python)
                for _ in range(scaled(ROUNDS))
                for python in (former, present)
                for mount in mounts
            ]
            check(workers, stalls)
        assert noticed(mounts) == []
        assert clients(mounts[0].source) == before
