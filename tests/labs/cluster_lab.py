"""Real clusters on loopback for tests: started once a session, when the first test asks for one.

A test gets a part of its own (a prefix of keys, a namespace), so tests need not clean up after each other. One that
kills or stops a member brings it back.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from kvfuse.cluster.ceph import PROGRAMS, CephServers, CephSettings
from kvfuse.cluster.etcd import EtcdServers, EtcdSettings
from kvfuse.options.options import RecordOptions, SegmentOptions
from kvfuse.remote.records.etcd.store import EtcdPlace
from kvfuse.remote.segments.rados.librados import Place

MEMORY = "/dev/shm"
"""Where etcd's data is. Tests kill servers, they cut no power: a flush for each commit, of three members to one disk,
would only be waited for."""


_Servers = TypeVar("_Servers", EtcdServers, CephServers)


@contextmanager
def running(start: Callable[[Path], _Servers], prefix: str, parent: str | None = None) -> Iterator[_Servers]:
    """What ``start`` starts in a new folder in ``parent``; ended, and its data removed, at the end."""
    with tempfile.TemporaryDirectory(prefix=prefix, dir=parent) as folder:
        servers = start(Path(folder))
        try:
            yield servers
        finally:
            servers.stop()


def etcd_cluster(members: int = 3, settings: EtcdSettings | None = None) -> AbstractContextManager[EtcdServers]:
    """A cluster of its own for whoever asks."""
    if shutil.which("etcd") is None:
        pytest.skip("needs etcd: apt-get install etcd-server")
    return running(lambda folder: EtcdServers.start(folder, members, settings), "kvfuse-etcd-", MEMORY)


def etcd_place(servers: EtcdServers, part: str, **more: Any) -> EtcdPlace:
    """How to reach a part of the keys: ``part`` is turned into a prefix."""
    prefix = b"/" + re.sub(r"[^\w]", "_", part).encode() + b"/"
    password = more.pop("password", "")
    more = {"ca_file": servers.ca_file, "cert_file": servers.cert_file, "key_file": servers.key_file, **more}
    return EtcdPlace(RecordOptions(engine="etcd", endpoints=servers.endpoints, **more), prefix, password)


def ceph_cluster(osds: int = 3, settings: CephSettings | None = None) -> AbstractContextManager[CephServers]:
    """A cluster of its own for whoever asks."""
    if any(shutil.which(program) is None for program in PROGRAMS):
        pytest.skip("needs Ceph: apt-get install ceph-mon ceph-osd ceph-common")
    return running(lambda folder: CephServers.start(folder, osds, settings), "kvfuse-ceph-")


def rados_place(servers: CephServers, part: str, **more: Any) -> Place:
    """How to reach a part of the pool: ``part`` is turned into a namespace."""
    namespace = re.sub(r"[^\w]", "_", part)
    more = {"conf_file": servers.conf_file, "keyring": servers.keyring, **more}
    return Place(SegmentOptions(engine="rados", **more), servers.settings.pool, namespace)


P = TypeVar("P", EtcdPlace, Place)


def changed(place: P, **changes: Any) -> P:
    """With other options."""
    return dataclasses.replace(place, options=msgspec.structs.replace(place.options, **changes))
