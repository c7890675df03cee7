"""The servers and the mounts that ``kvfuse bench cluster`` compares: one etcd, one Ceph, two file systems on them."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from kvfuse.sizes import GIB
from kvfuse_bench.daemons import Daemon, ceph_fuse_mount, kvfuse_mount, signals_raised
from kvfuse_bench.rounds import Conditions
from kvfuse_cluster.ceph import CephServers, CephSettings
from kvfuse_cluster.etcd import EtcdServers
from kvfuse_cluster.volumes import SETTINGS, mount_conf

MEMBERS, OSDS = 3, 3
OSD_SIZE = 16 * GIB
"""of a sparse file"""

RELAXED, STRICT, CEPH_FUSE = "relaxed", "strict", "ceph-fuse"
"""the sides: kvfuse in both ways of publishing, and the reference"""

Mounter = Callable[[Path], AbstractContextManager[Daemon]]
"""Mounts one of the file systems at a folder while the body runs: again and again, and at once where it is shared."""


class ClusterServers(NamedTuple):
    """The servers in which all sides store."""

    etcd: EtcdServers
    ceph: CephServers


@dataclass(frozen=True)
class ClusterSetting(Conditions):
    """And the servers."""

    servers: ClusterServers = field(kw_only=True)

    def count(self, full: int) -> int:
        """``full`` operations, scaled; the same number for each of eight writers."""
        return 8 * max(1, int(full * self.scale / 8))


@contextmanager
def cluster_servers(folder: Path, progress: Callable[[str], None]) -> Iterator[ClusterServers]:
    """Started in ``folder``, ended with the body, also when a signal ends this process. ClusterError."""
    with signals_raised(), ExitStack() as stack:
        progress(f"starting {MEMBERS} members of etcd")
        etcd = EtcdServers.start(folder / "etcd", MEMBERS, SETTINGS)
        stack.callback(etcd.stop)
        ceph = CephServers.start(
            folder / "ceph", OSDS, CephSettings(osd_size=OSD_SIZE), lambda step: progress(f"starting Ceph: {step}")
        )
        stack.callback(ceph.stop)
        progress("starting Ceph: making a CephFS")
        ceph.add_filesystem()
        yield ClusterServers(etcd, ceph)


def make_mounters(setting: ClusterSetting) -> dict[str, Mounter]:
    """A side's name -> what mounts it. The kvfuse volumes are new; CephFS is one for the whole run."""
    ceph_fuse = partial(ceph_fuse_mount, setting.servers.ceph.conf_file)
    return {RELAXED: new_volume(setting, RELAXED), STRICT: new_volume(setting, STRICT), CEPH_FUSE: ceph_fuse}


def new_volume(setting: ClusterSetting, publish: str) -> Callable[..., AbstractContextManager[Daemon]]:
    """What mounts a volume that was not there before: a `Mounter`, which also takes -o words."""
    conf = setting.volumes / f"{publish}-{secrets.token_hex(4)}.conf"
    conf.write_text(mount_conf(conf.stem, "4GiB", *setting.servers) + f'\n[publish]\nmode = "{publish}"\n')
    return partial(kvfuse_mount, conf)


@contextmanager
def mounted(setting: ClusterSetting, mounters: Mapping[str, Mounter], host: str = "a") -> Iterator[dict[str, Path]]:
    """All sides mounted while the body runs: name -> mount point. ``host`` names one of several mounts of a side."""
    with ExitStack() as stack:
        points = {}
        for name, mount in mounters.items():
            setting.progress(f"mounting {name}")
            points[name] = stack.enter_context(mount(setting.volumes / f"{name}-{host}")).mountpoint
        yield points


def daemon_stats(mountpoint: Path) -> dict[str, Any] | None:
    """The counters of a kvfuse daemon; None where another file system is mounted."""
    try:
        content: dict[str, Any] = json.loads((mountpoint / ".kvfuse" / "stats").read_bytes())
    except FileNotFoundError:
        return None
    return content
