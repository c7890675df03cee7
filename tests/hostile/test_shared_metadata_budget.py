"""The budget of names and attributes holds for all hosts of a volume together, and outlives a host that dies."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from errno import ENOSPC
from pathlib import Path

import pytest
from hostile_lab import ATTACKER, attacker
from mounting import KvfuseMount, shared_conf, wait_until
from ring_lab import stats, wait_for_rings

from kvfuse_cluster.etcd import EtcdServers

pytestmark = pytest.mark.root

LIMIT = 384 << 10
LARGEST = 72 << 10
"""What one step takes at most: an attribute of 64 KiB, in pages."""
WORDS = (
    "allow_other",
    f"volume.metadata_size={LIMIT}",
    "cache.tier_size=16MiB",
    "records.deadline=1",
    "client.lease=2",
)


@pytest.fixture
def hosts(etcd: EtcdServers) -> Iterator[tuple[KvfuseMount, KvfuseMount]]:
    """One volume, mounted twice. At the end it is unmounted, and must be clean."""
    with tempfile.TemporaryDirectory(prefix="kvfuse-budget-") as name:
        base = Path(name)
        base.chmod(0o755)  # another user goes through it
        conf = shared_conf(base, etcd)
        made = []
        try:
            for host in ("one", "two"):
                (base / host).mkdir()
                made.append(KvfuseMount(base / host, WORDS, source=conf))
                made[-1].mount()
                wait_for_rings(made[-1])
            yield made[0], made[1]
            for mount in made:
                mount.unmount()
            made[0].fsck()
        finally:
            for mount in made:
                mount.remove()


def counted(mount: KvfuseMount) -> int:
    metadata = stats(mount)["metadata"]
    assert metadata["limit"] == LIMIT
    return int(metadata["bytes"])


def test_users_of_two_hosts_fill_one_budget(hosts: tuple[KvfuseMount, KvfuseMount]) -> None:
    """Attributes through the one, blocks through a ring of the other, until both are refused; then the one dies."""
    one, two = hosts
    (one.point / "attack").mkdir()
    os.chown(one.point / "attack", ATTACKER, ATTACKER)
    with attacker("attack_metadata.py", one, "attributes") as first:
        with attacker("attack_metadata.py", two, "puts") as second:
            said = first.hear(), second.hear()
        assert [row["error"] for row in said] == [ENOSPC, ENOSPC]
        assert said[0]["made"] + said[1]["made"] > 5
        wait_until(lambda: counted(one) == counted(two), "both to know what there is")
        assert LIMIT - 2 * LARGEST < counted(one) < LIMIT + LARGEST, "what is on its way may be too much"
        assert os.statvfs(two.point).f_ffree <= 2 * LARGEST // 256
        first.tell("again")
        again = first.hear()
        assert again["error"] == ENOSPC
        assert again["made"] > 0, "what was removed has left no room"
        full = counted(two)
        first.tell("again")
        wait_until(lambda: counted(two) < full, "attributes to go")
        one.kill()
    one.mount()
    wait_until(lambda: counted(one) == counted(two) < LIMIT, "the count of the dead host to be known to all")
    before = counted(two)
    for path in (two.point / "attack").iterdir():
        if len(path.name) < 10:  # it has attributes
            path.unlink()
    wait_until(lambda: counted(one) == counted(two) < before, "room to come back")
    (one.point / "attack" / "after").touch()
