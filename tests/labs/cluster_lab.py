"""Real clusters on loopback for tests: started when the first test asks for one, for all processes of a run.

A test gets a part of its own (a prefix of keys, a namespace), so tests need not clean up after each other. Tests that
kill or stop members have clusters that only their process uses, and bring the members back.
"""

from __future__ import annotations

import base64
import dataclasses
import fcntl
import os
import random
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec
import pytest
from rings import require_lab

from kvfuse.options.options import EtcdOptions, RadosOptions
from kvfuse.remote.records.etcd.messages import prefix_end
from kvfuse.remote.records.etcd.store import EtcdPlace
from kvfuse.remote.segments.rados.librados import PoolPlace
from kvfuse_cluster.ceph import PROGRAMS, CephServers, CephSettings
from kvfuse_cluster.etcd import EtcdServers, EtcdSettings
from kvfuse_cluster.process import START_SECONDS, wait_until

MEMORY = "/dev/shm"
"""Where etcd's data is. Tests kill servers, they cut no power: a flush for each commit, of three members to one disk,
would only be waited for."""
_DRAWS = random.Random(f"engine {os.environ.get('KVFUSE_TEST_SEED')}")
DRAWN = os.environ.get("KVFUSE_TEST_ENGINE") or _DRAWS.choice(["rados", "block"])
"""Which of these engines of segments has its turn in this run, where a test is long; KVFUSE_TEST_ENGINE names one."""
BYTES_OF_HOSTS = ("file", pytest.param("block", marks=pytest.mark.ring(3)), "rados")
"""Where the bytes of volumes are that several hosts mount: for them engines make no difference but in the lab."""


class _Stoppable(Protocol):
    def stop(self) -> None: ...


_Servers = TypeVar("_Servers", EtcdServers, CephServers)
_S = TypeVar("_S", bound=_Stoppable)


@contextmanager
def running(start: Callable[[Path], _S], prefix: str, parent: str | None = None) -> Iterator[_S]:
    """What ``start`` starts in a new folder in ``parent``; ended, and its data removed, at the end."""
    with tempfile.TemporaryDirectory(prefix=prefix, dir=parent) as folder:
        servers = start(Path(folder))
        try:
            yield servers
        finally:
            servers.stop()


class RunServers:
    """The clusters that all processes of one run share, found by links in a folder that they all name."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: list[EtcdServers | CephServers] = []
        """by this process: while they run, what knows them as children of this process is kept"""

    def etcd(self, members: int) -> EtcdServers:
        _need_etcd()
        return self._find(f"etcd{members}", EtcdServers, lambda folder: EtcdServers.start(folder, members), MEMORY)

    def ceph(self) -> CephServers:
        _need_ceph()
        return self._find("ceph", CephServers, CephServers.start)

    def _find(
        self, name: str, kind: type[_Servers], start: Callable[[Path], _Servers], parent: str | None = None
    ) -> _Servers:
        with (self._folder / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            link = self._folder / name
            if link.exists():
                return kind.load(link.resolve())
            folder = Path(tempfile.mkdtemp(prefix=f"kvfuse-{name}-", dir=parent))
            link.symlink_to(folder)
            try:
                servers = start(folder)
            except BaseException:
                link.unlink()
                shutil.rmtree(folder)
                raise
            self._started.append(servers)
            return servers

    def stop(self) -> None:
        """End them all, whoever started them, and remove their data."""
        for link in [path for path in self._folder.iterdir() if path.is_symlink()]:
            folder = link.resolve()
            (CephServers if link.name == "ceph" else EtcdServers).load(folder).stop()
            shutil.rmtree(folder)
            link.unlink()


def _need_etcd() -> None:
    if shutil.which("etcd") is None:
        pytest.skip("needs etcd: apt-get install etcd-server")


def _need_ceph() -> None:
    require_lab("ceph")
    if any(shutil.which(program) is None for program in PROGRAMS):
        pytest.skip("needs Ceph: apt-get install ceph-mon ceph-osd ceph-common")


def etcd_cluster(members: int = 3, settings: EtcdSettings | None = None) -> AbstractContextManager[EtcdServers]:
    """A cluster of its own for whoever asks."""
    _need_etcd()
    return running(lambda folder: EtcdServers.start(folder, members, settings), "kvfuse-etcd-", MEMORY)


def etcd_place(servers: EtcdServers, part: str, **more: Any) -> EtcdPlace:
    """How to reach a part of the keys: ``part`` is turned into a prefix."""
    prefix = b"/" + re.sub(r"[^\w]", "_", part).encode() + b"/"
    password = more.pop("password", "")
    more = {"ca_file": servers.ca_file, "cert_file": servers.cert_file, "key_file": servers.key_file, **more}
    return EtcdPlace(EtcdOptions(endpoints=servers.endpoints, **more), prefix, password)


def ceph_cluster(osds: int = 3, settings: CephSettings | None = None) -> AbstractContextManager[CephServers]:
    """A cluster of its own for whoever asks."""
    _need_ceph()
    return running(lambda folder: CephServers.start(folder, osds, settings), "kvfuse-ceph-")


def rados_place(servers: CephServers, part: str, **more: Any) -> PoolPlace:
    """How to reach a part of the pool: ``part`` is turned into a namespace."""
    namespace = re.sub(r"[^\w]", "_", part)
    more = {"conf_file": servers.conf_file, "keyring": servers.keyring, **more}
    return PoolPlace(RadosOptions(**more), servers.settings.pool, namespace)


P = TypeVar("P", EtcdPlace, PoolPlace)


def changed(place: P, **changes: Any) -> P:
    """With other options."""
    return dataclasses.replace(place, options=msgspec.structs.replace(place.options, **changes))


# -- etcd -------------------------------------------------------------------------------------------


def wait_leader(etcd: EtcdServers, *, other_than: int | None = None) -> int:
    """Wait until there is a leader (another one than before)."""
    found: list[int] = []

    def look() -> bool:
        leader = etcd.leader()
        found[:] = [] if leader is None or leader == other_than else [leader]
        return bool(found)

    assert wait_until(look, START_SECONDS), f"no new leader in {etcd.folder}"
    return found[0]


def create_etcd_user(etcd: EtcdServers, name: str, password: str, prefix: bytes) -> None:
    """A user who may read and write the keys under ``prefix`` and nothing else. Needs a ``root_password``."""
    token = _root_token(etcd)
    permission = {"permType": "READWRITE", "key": _base64(prefix), "range_end": _base64(prefix_end(prefix))}
    etcd.call(0, "auth/role/add", {"name": name}, token)
    etcd.call(0, "auth/role/grant", {"name": name, "perm": permission}, token)
    etcd.call(0, "auth/user/add", {"name": name, "password": password}, token)
    etcd.call(0, "auth/user/grant", {"user": name, "role": name}, token)


def compact(etcd: EtcdServers) -> None:
    """Forget all history but the present, on every member: all have to run."""
    anything = {"key": _base64(b"\0"), "limit": 1}
    revision = etcd.call(0, "kv/range", anything)["header"]["revision"]
    etcd.call(0, "kv/compaction", {"revision": revision})
    for index in range(len(etcd.members)):  # a linearizable read comes after all that was agreed upon before
        etcd.call(index, "kv/range", anything)


def _root_token(etcd: EtcdServers) -> str:
    login = {"name": "root", "password": etcd.settings.root_password}
    return str(etcd.call(0, "auth/authenticate", login)["token"])


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


# -- Ceph -------------------------------------------------------------------------------------------


def create_ceph_user(ceph: CephServers, name: str, namespace: str) -> Path:
    """A cephx user who may read and write one RADOS namespace of the pool, and cut off clients. The keyring."""
    capability = f"allow rw pool={ceph.settings.pool} namespace={namespace}"
    monitors = "profile simple-rados-client-with-blocklist"
    words = "auth", "get-or-create", f"client.{name}", "mon", monitors, "osd", capability
    path = ceph.folder / f"client.{name}.keyring"
    path.write_text(ceph.command(*words, as_json=False))
    path.chmod(0o600)
    return path


def rados(ceph: CephServers, namespace: str, *words: str | Path) -> str:
    """What Ceph's own program says of a namespace of the pool."""
    command = ["rados", "--conf", ceph.conf_file, "--pool", ceph.settings.pool, "--namespace", namespace, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
