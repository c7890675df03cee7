"""kvfuse cluster-dev"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import click

from kvfuse.cli import Failure
from kvfuse.cli.console import doing, note, print_json, print_table, say
from kvfuse.cli.mounts import kvfuse_mounts
from kvfuse.errors import ClusterError, MountError
from kvfuse.sizes import GIB, MIB
from kvfuse_cluster.ceph import CephServers, CephSettings
from kvfuse_cluster.etcd import EtcdServers
from kvfuse_cluster.process import Server
from kvfuse_cluster.volumes import SETTINGS, devices_conf, mount_conf

POOL = "kvfuse"
VOLUME = "demo"
REPLICAS = 2
LOG_FILE = "kvfuse.log"
MARKER = "made-by-kvfuse-cluster-dev"
"""a file of the folder: without it nothing there is ours to remove"""
OSD_SIZE = 8 * GIB
"""of a sparse file: it takes what is written"""
PROGRAMS = {
    "etcd": "etcd-server",
    "ceph-mon": "ceph-mon",
    "ceph-osd": "ceph-osd",
    "ceph": "ceph-common",
    "monmaptool": "ceph-common",
}
"""program -> Debian's package"""

MOUNT_CONF = """\
# A volume on the cluster that 'kvfuse cluster-dev up' started in this folder. Any number of mounts may share it.

{volume}
[log]
file = "{log_file}"
"""


class Row(NamedTuple):
    """One server, for people and programs."""

    server: str
    pid: int
    """0: not running"""
    state: str
    role: str
    address: str
    """where clients connect, if it is one"""


def default_folder() -> Path:
    return Path(f"/var/tmp/kvfuse-cluster-{os.getuid()}")


folder_option = click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    default=default_folder,
    show_default="/var/tmp/kvfuse-cluster-UID",
    help="Where the servers' data, logs and keys are.",
)


@click.group("cluster-dev")
def cluster_dev() -> None:
    """etcd and Ceph on this machine alone, to try a volume that many hosts share. Not for data that matters.

    \b
    From nothing to two mounts of one volume:
      kvfuse cluster-dev up
      mkdir -p /mnt/a /mnt/b
      kvfuse mount /var/tmp/kvfuse-cluster-0/mount.conf /mnt/a
      kvfuse mount /var/tmp/kvfuse-cluster-0/mount.conf /mnt/b
      echo hello > /mnt/a/file; cat /mnt/b/file

    The servers listen on 127.0.0.1 alone, need neither root nor systemd, and go on after the terminal is closed. They
    are made of Debian's packages etcd-server, ceph-mon, ceph-osd, ceph-common and librados2.
    """


@cluster_dev.command()
@folder_option
@click.option("--members", type=click.IntRange(1, 9), default=3, show_default=True, help="Of etcd.")
@click.option("--osds", type=click.IntRange(1, 16), default=3, show_default=True, help="Storage servers of Ceph.")
@click.option(
    "--device",
    "devices",
    type=click.Path(exists=True, dir_okay=False, resolve_path=True, path_type=Path),
    multiple=True,
    help="Keep bytes on this block device instead of Ceph; may be repeated.",
)
def up(folder: Path, members: int, osds: int, devices: tuple[Path, ...]) -> None:
    """Start a cluster in FOLDER and write a mount.conf there.

    etcd keeps going while more than half of its MEMBERS live. Every object is on two of the OSDS, so one may fail; with
    --osds 1 there is one copy. Takes up to half a minute. With --device there is no Ceph.

    \b
    To see what a failure does, kill one server ('status' has the pids), or stop it: kill -STOP PID.
    """
    folder = folder.absolute()
    _check_programs(with_ceph=not devices)
    _check_vacant(folder)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    (folder / MARKER).touch()
    try:
        with _step(f"etcd, {members} member{'s' * (members > 1)}"):
            etcd = EtcdServers.start(folder / "etcd", members, SETTINGS)
        volume = devices_conf(VOLUME, etcd, devices) if devices else _start_ceph(folder, osds, etcd)
    except BaseException:
        _stop(folder)
        raise
    conf = folder / "mount.conf"
    conf.write_text(MOUNT_CONF.format(volume=volume, log_file=folder / LOG_FILE))
    _say_next(folder, conf)


@cluster_dev.command()
@folder_option
def down(folder: Path) -> None:
    """End all servers of the cluster in FOLDER and remove its data. Its volumes must not be mounted any more."""
    folder = folder.absolute()
    _check_is_cluster(folder)
    mounted = [str(row.point) for row in kvfuse_mounts() if row.source == str(folder / "mount.conf")]
    if mounted:
        raise MountError(f"a volume of this cluster is mounted; type: kvfuse umount {mounted[0]}")
    with _step("ending the servers"):
        _stop(folder)
    note(f"the cluster in {folder} is removed")


@cluster_dev.command()
@folder_option
@click.option("--json", "as_json", is_flag=True, help="For programs: a list of objects.")
def status(folder: Path, as_json: bool) -> None:
    """The servers of the cluster in FOLDER. Exit status 1 when one of them is not well."""
    folder = folder.absolute()
    _check_is_cluster(folder)
    rows = rows_of(folder)
    if as_json:
        print_json([row._asdict() for row in rows])
    else:
        print_table(Row._fields, [(row.server, str(row.pid or "-"), *row[2:]) for row in rows])
    if any(row.state != "up" for row in rows):
        raise click.exceptions.Exit(1)


# -- up ---------------------------------------------------------------------------------------------


def _start_ceph(folder: Path, osds: int, etcd: EtcdServers) -> str:
    """A cluster of Ceph; the mount.conf of a volume on both."""
    replicas = min(REPLICAS, osds)
    with _step(f"Ceph, 1 monitor and {osds} OSD{'s' * (osds > 1)}") as tell:
        ceph_settings = CephSettings(pool=POOL, replicas=replicas, osd_size=OSD_SIZE)
        ceph = CephServers.start(folder / "ceph", osds, ceph_settings, tell)
    return mount_conf(VOLUME, f"{osds * OSD_SIZE // replicas // 2 // MIB}MiB", etcd, ceph)


def _check_programs(*, with_ceph: bool) -> None:
    """Failure with the command that installs what is missing."""
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
    os.environ["PATH"] = path  # where Debian has the servers; a user's own PATH may not
    needed = PROGRAMS if with_ceph else ["etcd"]
    missing = [program for program in needed if shutil.which(program) is None]
    if missing:
        libraries = ["librados2"] if with_ceph else []
        packages = " ".join(dict.fromkeys([*(PROGRAMS[program] for program in missing), *libraries]))
        raise Failure(f"{', '.join(missing)} not found; as root: apt-get install --no-install-recommends {packages}")


def _check_vacant(folder: Path) -> None:
    if _is_cluster(folder):
        rows = rows_of(folder)
        running = sum(row.pid != 0 for row in rows)
        raise Failure(
            f"{folder} holds a cluster already, {running} of its {len(rows)} servers run;"
            " 'kvfuse cluster-dev down' removes it"
        )
    if folder.exists() and folder.stat().st_uid != os.getuid():
        raise Failure(f"{folder} belongs to another user: name a folder with --folder")
    if folder.exists() and any(folder.iterdir()):
        raise Failure(f"{folder} is not empty, and what is in it was not made by 'kvfuse cluster-dev up'")


@contextmanager
def _step(what: str) -> Iterator[Callable[[str], None]]:
    """A line on stderr with how long the body took; a terminal also shows what it does, as it tells."""
    begin = time.monotonic()
    with doing(what) as tell:
        yield lambda step: tell(f"{what}: {step}")
    note(f"{what}: {time.monotonic() - begin:.1f} s")


def _say_next(folder: Path, conf: Path) -> None:
    option = "" if folder == default_folder() else f" --folder {folder}"
    for line in (
        "It runs. Next:",
        "  mkdir -p /mnt/a /mnt/b",
        f"  kvfuse mount {conf} /mnt/a",
        f"  kvfuse mount {conf} /mnt/b",
        "  echo hello > /mnt/a/file; cat /mnt/b/file",
        "At the end:",
        f"  kvfuse umount /mnt/a; kvfuse umount /mnt/b; kvfuse cluster-dev down{option}",
    ):
        say(line)


# -- what is there ----------------------------------------------------------------------------------


def _is_cluster(folder: Path) -> bool:
    return (folder / MARKER).is_file()


def _check_is_cluster(folder: Path) -> None:
    if not _is_cluster(folder):
        raise Failure(f"{folder} holds no cluster; 'kvfuse cluster-dev up' makes one")


def rows_of(folder: Path) -> list[Row]:
    """A row for every server. ClusterError where the folder does not say which there are."""
    rows = list(_etcd_rows(EtcdServers.load(folder / "etcd")))
    if (folder / "ceph").exists():
        rows += _ceph_rows(CephServers.load(folder / "ceph"))
    return rows


def _etcd_rows(etcd: EtcdServers) -> Iterator[Row]:
    leader = etcd.leader()
    for index, member in enumerate(etcd.members):
        role = "leader" if index == leader else "follower"
        yield Row(member.name, member.pid, _state(member, etcd.is_healthy(index)), role, etcd.endpoints[index])


def _ceph_rows(ceph: CephServers) -> Iterator[Row]:
    up: set[int] | None = None
    if ceph.monitor.pid:
        with suppress(ClusterError):
            up = {row["osd"] for row in ceph.command("osd", "dump")["osds"] if row["up"]}
    yield Row(ceph.monitor.name, ceph.monitor.pid, _state(ceph.monitor, up is not None), "monitor", "")
    for index, server in enumerate(ceph.osds):
        yield Row(server.name, server.pid, _state(server, up is not None and index in up), "storage", "")


def _state(server: Server, is_well: bool) -> str:
    return "up" if server.pid and is_well else "no answer" if server.pid else "down"


def _stop(folder: Path) -> None:
    """End what runs by its pid, then remove what `up` made, and the folder if that is all."""
    for name, kind in (("etcd", EtcdServers), ("ceph", CephServers)):
        try:
            kind.load(folder / name).stop()
        except ClusterError as error:
            if any((folder / name).glob("*.pid")):
                raise Failure(f"{error}; nothing is removed, as servers may still run") from error
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in ("mount.conf", LOG_FILE, MARKER):
        (folder / name).unlink(missing_ok=True)
    if not any(folder.iterdir()):
        folder.rmdir()
