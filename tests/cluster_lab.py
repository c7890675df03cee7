"""Real clusters on loopback for tests: started once a session, when the first test asks for one.

A test gets a part of its own (a prefix of keys, a namespace), so tests need not clean up after each other. One that
kills or stops a member brings it back.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvfuse.cluster.ceph import PROGRAMS, CephServers, CephSettings
from kvfuse.cluster.etcd import EtcdServers, EtcdSettings
from kvfuse.remote.records.etcd import EtcdOptions
from kvfuse.remote.segments.rados import RadosOptions


@contextmanager
def etcd_cluster(members: int = 3, settings: EtcdSettings | None = None) -> Iterator[EtcdServers]:
    """A cluster of its own for whoever asks; ended, and its data removed, at the end."""
    if shutil.which("etcd") is None:
        pytest.skip("needs etcd: apt-get install etcd-server")
    with tempfile.TemporaryDirectory(prefix="kvfuse-etcd-") as folder:
        servers = EtcdServers.start(Path(folder), members, settings)
        try:
            yield servers
        finally:
            servers.stop()


def etcd_options(servers: EtcdServers, part: str, **more: object) -> EtcdOptions:
    """How to reach a part of the keys: ``part`` is turned into a prefix."""
    prefix = b"/" + re.sub(r"[^\w]", "_", part).encode() + b"/"
    options = {"ca_file": servers.ca_file, "cert_file": servers.cert_file, "key_file": servers.key_file, **more}
    return EtcdOptions(servers.endpoints, prefix, **options)


@contextmanager
def ceph_cluster(osds: int = 3, settings: CephSettings | None = None) -> Iterator[CephServers]:
    """A cluster of its own for whoever asks; ended, and its data removed, at the end."""
    if any(shutil.which(program) is None for program in PROGRAMS):
        pytest.skip("needs Ceph: apt-get install ceph-mon ceph-osd ceph-common")
    with tempfile.TemporaryDirectory(prefix="kvfuse-ceph-") as folder:
        servers = CephServers.start(Path(folder), osds, settings)
        try:
            yield servers
        finally:
            servers.stop()


def rados_options(servers: CephServers, part: str, **more: object) -> RadosOptions:
    """How to reach a part of the pool: ``part`` is turned into a namespace."""
    namespace = re.sub(r"[^\w]", "_", part)
    options = {"keyring": servers.keyring, **more}
    return RadosOptions(servers.conf_file, servers.settings.pool, namespace, **options)
