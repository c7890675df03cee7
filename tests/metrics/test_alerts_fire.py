"""Alerts from real metrics: a mount is brought into the state, a real Prometheus scrapes it and judges the rules.

The rules fire at once here and look back for seconds (`prometheus_lab.hasten`): their times are what promtool tests.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from cli_lab import kvfuse as run
from killer import serving_of
from metrics_lab import listen_word
from mounting import KvfuseMount, shared_conf, temporary_mount, wait_until
from prometheus_lab import Prometheus, needs_prometheus, prometheus
from sick_disk import sick_disk

from kvfuse.usrbio.client import BlockStore
from kvfuse_cluster.etcd import EtcdServers
from kvfuse_cluster.process import free_ports

pytestmark = [pytest.mark.root, pytest.mark.ring(3), needs_prometheus]

MIB = 1 << 20
CAPACITY = "capacity=64MiB"
FAILING_SERVICE = """
import kvfuse.cli.heap, kvfuse.cli, sys

async def fail():
    raise OSError("a service that fails each time")

kvfuse.cli.heap.give_memory_back = fail
kvfuse.cli.main()
"""


@contextmanager
def watched(folder: Path, *ports: int) -> Iterator[Prometheus]:
    """Scraped and judged; at first nothing fires."""
    with prometheus(folder, *ports, with_rules=True) as server:
        wait_until(lambda: server.scrapes() >= 3, "the first scrapes")
        assert server.firing() == {}
        yield server


@contextmanager
def watched_mount(
    folder: Path, words: Sequence[str], **more: Sequence[str] | Path
) -> Iterator[tuple[KvfuseMount, Prometheus]]:
    word, port = listen_word()
    with temporary_mount([word, *words], **more) as mount, watched(folder, port) as server:  # type: ignore[arg-type]
        yield mount, server


def wait_alert(server: Prometheus, name: str) -> str:
    """Until it fires; its summary, in which all is filled in."""
    wait_until(lambda: name in server.firing(), name)
    (found,) = server.firing()[name]
    text = found["summary"] + found["description"]
    assert "<no value>" not in text, text
    assert "%!" not in text, text
    print(f"{name}: {found['summary']}")
    return found["summary"]


def fill(path: Path, size: int) -> int:
    """Write until ``size``, or until it is refused; the errno, or 0."""
    try:
        with path.open("wb", buffering=0) as file:
            for _ in range(size // MIB):
                file.write(bytes(MIB))
            os.fsync(file.fileno())
    except OSError as error:
        return error.errno or -1
    return 0


def test_daemons_that_die_and_a_mount_that_ends(tmp_path: Path) -> None:
    with watched_mount(tmp_path, [CAPACITY, "outlive=true"]) as (mount, server):
        for _ in range(4):
            former = serving_of(mount.pid)
            assert former is not None
            os.kill(former, signal.SIGKILL)
            os.statvfs(mount.point)
            wait_until(lambda former=former: serving_of(mount.pid) not in (None, former), "another daemon")  # type: ignore[misc]
        done = server.scrapes()
        wait_until(lambda: server.scrapes() > done, "a scrape of the last daemon")
        assert "dies again and again" in wait_alert(server, "KvfuseDaemonDies")
        assert "KvfuseDown" not in server.firing()
        mount.unmount()
        wait_alert(server, "KvfuseDown")


def test_files_fill_a_volume_and_a_quota(tmp_path: Path) -> None:
    with watched_mount(tmp_path, [CAPACITY]) as (mount, server):
        (mount.point / "home").mkdir()
        made = run("namespace", "create", mount.point / "home" / "of", "--kind", "files", "--capacity", "8MiB")
        assert made.returncode == 0, made.stderr
        assert fill(mount.point / "home" / "of" / "file", 8 * MIB - MIB // 2) == 0
        (mount.point / "home" / "of" / "more").write_bytes(bytes(MIB // 2))
        assert "/home/of" in wait_alert(server, "KvfuseNamespaceNearlyFull")
        assert "KvfuseVolumeNearlyFull" not in server.firing()
        assert fill(mount.point / "file", 128 * MIB) == errno.ENOSPC
        wait_alert(server, "KvfuseVolumeNearlyFull")

        def fails() -> bool:
            assert fill(mount.point / "another", 2 * MIB) == errno.ENOSPC
            return "KvfuseRequestsFail" in server.firing()

        wait_until(fails, "KvfuseRequestsFail")
        wait_alert(server, "KvfuseRequestsFail")


def test_a_full_cache_is_well_and_its_hits_collapse(tmp_path: Path) -> None:
    with watched_mount(tmp_path, [f"{CAPACITY},kind=blocks,admission=all"]) as (mount, server):
        with BlockStore(mount.point, "model") as store:
            keys = [f"block{number}" for number in range(2000)]
            for start in range(0, len(keys), 100):
                store.put_many(keys[start : start + 100], [bytes(64 << 10)] * 100)
            (here,) = [[key for key, is_here in zip(keys, store.exists(keys), strict=True) if is_here]]
            assert 100 < len(here) < len(keys), "it evicted"

            def reads(wanted: Sequence[str], until: str) -> bool:
                for key in wanted:
                    store.get(key)
                return until in server.firing()

            done = server.scrapes()
            wait_until(lambda: reads(here[-100:], "") or server.scrapes() > done + 15, "a quarter of a day of hits")
            assert server.firing() == {}
            wait_until(lambda: reads([f"absent{number}" for number in range(100)], "KvfuseHitRatioCollapses"), "misses")
        assert "model" not in wait_alert(server, "KvfuseHitRatioCollapses")
        assert "KvfuseVolumeNearlyFull" not in server.firing()


def test_a_full_disk_below_a_volume(tmp_path: Path) -> None:
    base = Path(tempfile.mkdtemp(prefix="kvfuse-sick-"))
    word, port = listen_word()
    mount = KvfuseMount(base, [word, "volume.capacity=64MiB", "volume.segment_size=16MiB"])
    try:
        with sick_disk(base) as disk:
            mount.volume = mount.source = disk.path / "volume"
            try:
                mount.mount()
                with watched(tmp_path, port) as server:
                    disk.fill()
                    path = mount.point / "synced"
                    path.write_bytes(b"x")

                    def degrades() -> bool:
                        with path.open("wb", buffering=0) as file:
                            try:
                                os.setxattr(path, "user.large", os.urandom(60_000))
                                os.fsync(file.fileno())
                            except OSError as error:
                                assert error.errno == errno.ENOSPC, error
                        return "KvfuseDegraded" in server.firing()

                    wait_until(degrades, "KvfuseDegraded")
                    assert "commit" in wait_alert(server, "KvfuseDegraded")
                    disk.make_room()
                    wait_until(lambda: "KvfuseDegraded" not in server.firing(), "the mount to be well")
                mount.unmount()
                mount.fsck(verify=True)
            finally:
                mount.remove()
    finally:
        shutil.rmtree(base)


def test_damaged_bytes(tmp_path: Path) -> None:
    with watched_mount(tmp_path, [CAPACITY]) as (mount, server):
        word = mount.words
        (mount.point / "file").write_bytes(os.urandom(MIB))
        info = run("info", mount.point / "file", "--json")
        assert info.returncode == 0, info.stderr
        mount.unmount()
        damage(mount.volume / "segments")
        mount.words = word
        mount.mount()
        with pytest.raises(OSError, match="Input/output error"):
            (mount.point / "file").read_bytes()
        wait_alert(server, "KvfuseCorruptBytes")
        (mount.point / "file").unlink()


def damage(segments: Path) -> None:
    """Change each block of 4 KiB that has data and no slot heads: random bytes compress badly, heads do not."""
    (segment, *_) = sorted(segments.glob("*.seg"))
    found = subprocess.run(["filefrag", "-v", "-b4096", segment], capture_output=True, text=True, check=True).stdout
    print(found)
    data = bytearray(segment.read_bytes())
    for start in range(0, len(data), 4096):
        if len(set(data[start : start + 4096])) > 200:
            data[start] ^= 0xFF
    segment.write_bytes(data)


def test_clients_of_another_descriptor(tmp_path: Path) -> None:
    with watched_mount(tmp_path, [CAPACITY]) as (mount, server):
        made = run("namespace", "create", mount.point / "model", "--kind", "blocks", "--capacity", "16MiB")
        assert made.returncode == 0, made.stderr
        with BlockStore(mount.point, "model", descriptor={"model": "one"}) as store:
            store.put("block", bytes(4096))

        def refused() -> bool:
            with pytest.raises(FileExistsError):
                BlockStore(mount.point, "model", descriptor={"model": "another"})
            return "KvfuseClientsRefused" in server.firing()

        wait_until(refused, "KvfuseClientsRefused")
        assert "/model" in wait_alert(server, "KvfuseClientsRefused")


def test_limits_make_callers_wait(tmp_path: Path) -> None:
    with watched_mount(tmp_path, [CAPACITY]) as (mount, server):
        made = run("namespace", "create", mount.point / "slow", "--bandwidth", "1MiB")
        assert made.returncode == 0, made.stderr
        writers = [
            subprocess.Popen(
                ["dd", "if=/dev/zero", f"of={mount.point}/slow/{number}", "bs=1M", "count=30", "oflag=direct"]
            )
            for number in range(4)
        ]
        try:
            assert "/slow" in wait_alert(server, "KvfuseThrottled")
            assert "write" in wait_alert(server, "KvfuseSlow")
        finally:
            for writer in writers:
                writer.kill()
                writer.wait()


def test_a_service_that_fails(tmp_path: Path) -> None:
    command = (sys.executable, "-c", FAILING_SERVICE, "mount", "--foreground")
    word, port = listen_word()
    with (
        temporary_mount([word, CAPACITY], command) as mount,
        prometheus(tmp_path, port, with_rules=True) as server,
    ):
        assert "'heap'" in wait_alert(server, "KvfuseServiceFails")
        assert "a service that fails each time" in mount.log.read_text()


def test_a_record_store_that_does_not_answer(own_etcd: EtcdServers, tmp_path: Path) -> None:
    members = range(len(own_etcd.members))
    words = ["records.deadline=2", "client.lease=12"]
    with watched_mount(tmp_path, words, source=shared_conf(tmp_path, own_etcd)) as (mount, server):
        (mount.point / "file").write_bytes(b"stored")
        try:
            for index in members:
                own_etcd.kill(index, signal.SIGSTOP)
            assert "not renewed" in wait_alert(server, "KvfuseLeaseNearlyLost")
        finally:
            for index in members:
                own_etcd.kill(index, signal.SIGCONT)
        wait_until(lambda: "KvfuseLeaseNearlyLost" not in server.firing(), "renewals")
        assert "KvfuseLeaseLost" not in server.firing()
        before = leases(own_etcd)
        os.kill(mount.pid, signal.SIGSTOP)
        try:
            wait_until(lambda: bool(before - leases(own_etcd)), "the end of the stopped daemon's lease")
        finally:
            os.kill(mount.pid, signal.SIGCONT)
        wait_alert(server, "KvfuseLeaseLost")
        wait_until(lambda: (mount.point / "file").read_bytes() == b"stored", "the volume to be joined again")


def leases(etcd: EtcdServers) -> set[str]:
    """Those that the cluster has now."""
    return {row["ID"] for row in etcd.call(0, "lease/leases", {}).get("leases", ())}


def test_a_host_that_others_do_not_reach(etcd_alone: EtcdServers, tmp_path: Path) -> None:
    conf = shared_conf(tmp_path, etcd_alone)
    listening, nobody = free_ports(2)
    word, port = listen_word()
    with temporary_mount([word], source=conf), watched(tmp_path, port) as server:
        hidden = f"peer.listen=127.0.0.1:{listening}", f"peer.advertise=127.0.0.1:{nobody}"
        other = KvfuseMount(tmp_path, hidden, source=conf)
        try:
            other.mount()
            assert "does not reach 1 of" in wait_alert(server, "KvfusePeersDown")
            other.unmount()
        finally:
            other.remove()
        wait_until(lambda: "KvfusePeersDown" not in server.firing(), "the host to be forgotten")
