"""kvfuse cluster-dev as its users see it: real servers, started and ended by the command."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mounting import KVFUSE, PATIENCE_S
from places import ROOT

from kvfuse.remote.segments.block import label
from kvfuse_cluster.command import PROGRAMS


def cluster_dev(*arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*KVFUSE, "cluster-dev", *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=4 * PATIENCE_S,
        env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
        check=False,
    )


def kvfuse(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*KVFUSE, *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def servers(folder: Path) -> dict[str, dict[str, Any]]:
    """name -> row of the status."""
    return {row["server"]: row for row in json.loads(cluster_dev("status", "--folder", folder, "--json").stdout)}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a small cluster that runs."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}: scripts/test installs them")
    folder = tmp_path_factory.mktemp("cluster") / "made"
    done = cluster_dev("up", "--folder", folder, "--members", "3", "--osds", "2")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^etcd, 3 members: [\d.]+ s$", done.stderr, re.MULTILINE)
    assert f"kvfuse mount {folder}/mount.conf /mnt/a" in done.stdout, "what to type next"
    yield folder
    rows = servers(folder)
    done = cluster_dev("down", "--folder", folder)
    assert done.returncode == 0, done.stderr
    assert not any(is_running(row["pid"]) for row in rows.values() if row["pid"])
    assert not folder.exists()
    assert "holds no cluster" in cluster_dev("down", "--folder", folder).stderr


@pytest.mark.needs("ceph")
def test_the_status_is_a_table_of_all_servers(cluster: Path) -> None:
    done = cluster_dev("status", "--folder", cluster)
    assert done.returncode == 0, done.stdout
    rows = servers(cluster)
    assert {name: row["state"] for name, row in rows.items()} == dict.fromkeys(
        ("etcd0", "etcd1", "etcd2", "mon.a", "osd.0", "osd.1"), "up"
    )
    assert sorted(row["role"] for row in rows.values()) == [
        *("follower", "follower", "leader"),
        *("monitor", "storage", "storage"),
    ]
    for name, row in rows.items():
        assert is_running(row["pid"])
        assert re.search(rf"{re.escape(name)} +{row['pid']} +up +{row['role']}", done.stdout)


@pytest.mark.needs("ceph")
def test_what_is_there_is_left_alone(cluster: Path, tmp_path: Path) -> None:
    before = servers(cluster)
    done = cluster_dev("up", "--folder", cluster)
    assert (done.returncode, "holds a cluster already, 6 of its 6 servers run" in done.stderr) == (1, True)
    assert servers(cluster) == before
    (tmp_path / "precious").write_text("keep\n")
    for command in ("up", "down", "status"):
        done = cluster_dev(command, "--folder", tmp_path)
        assert done.returncode == 1
        assert re.search("was not made by|holds no cluster", done.stderr), done.stderr
    assert (tmp_path / "precious").read_text() == "keep\n"


@pytest.mark.needs("ceph")
@pytest.mark.root
def test_its_mount_conf_mounts_a_volume(cluster: Path, tmp_path: Path) -> None:
    conf = cluster / "mount.conf"
    point = tmp_path / "mnt"
    point.mkdir()
    log = tmp_path / "log"
    done = kvfuse("mount", conf, point, "-o", f"log.file={log}")
    assert done.returncode == 0, done.stderr
    try:
        (point / "hello").write_text("there\n")
        done = cluster_dev("down", "--folder", cluster)
        assert (done.returncode, f"is mounted; type: kvfuse umount {point}" in done.stderr) == (5, True)
    finally:
        assert kvfuse("umount", point).returncode == 0, log.read_text()
    assert kvfuse("fsck", conf).returncode == 0


@pytest.mark.needs("ceph")
def test_a_dead_server_is_seen(cluster: Path) -> None:
    member = next(name for name, row in servers(cluster).items() if row["role"] == "follower")
    os.kill(servers(cluster)[member]["pid"], signal.SIGKILL)
    done = cluster_dev("status", "--folder", cluster)
    assert done.returncode == 1
    assert re.search(rf"{member} +- +down", done.stdout), done.stdout


def test_what_is_not_installed_is_named(tmp_path: Path) -> None:
    done = cluster_dev("up", "--folder", tmp_path / "cluster", PATH=str(tmp_path))
    assert done.returncode == 1
    assert done.stderr == (
        "kvfuse: etcd, ceph-mon, ceph-osd, ceph, monmaptool not found; as root: apt-get install --no-install-recommends"
        " etcd-server ceph-mon ceph-osd ceph-common librados2\n"
    )
    assert not (tmp_path / "cluster").exists()


def test_bytes_may_be_on_a_device_instead_of_ceph(tmp_path: Path) -> None:
    if shutil.which("etcd") is None:
        pytest.skip("needs etcd: scripts/test installs it")
    folder, device = tmp_path / "made", tmp_path / "device"
    with device.open("wb") as file:
        file.truncate(256 << 20)
    done = cluster_dev("up", "--folder", folder, "--members", "1", "--device", device)
    assert done.returncode == 0, done.stderr
    try:
        assert set(servers(folder)) == {"etcd0"}
        made = kvfuse("format", folder / "mount.conf", "--segment-size", "64MiB")
        assert "made the volume etcd:/kvfuse/demo/" in made.stdout, made.stderr
        assert device.read_bytes().startswith(label.MAGIC)
    finally:
        done = cluster_dev("down", "--folder", folder)
    assert done.returncode == 0, done.stderr
    assert not folder.exists()
