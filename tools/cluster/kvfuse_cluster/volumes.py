"""Volumes on an etcd and a Ceph of this machine: how the etcd is set up for them, and their mount.conf."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from kvfuse.sizes import MIB, format_size
from kvfuse_cluster.ceph import CephServers
from kvfuse_cluster.etcd import EtcdServers, EtcdSettings

SETTINGS = EtcdSettings(operations_max=4096, request_size_max=8 * MIB)
"""more than etcd's defaults, as docs/engines.md recommends: fewer commits where many names change at once"""

RECORDS = """\
[volume]
name = "{name}"
{capacity_line}
[records]
engine = "etcd"
endpoints = {endpoints}
operations_max = {etcd.settings.operations_max}
request_size_max = "{request_size_max}"
"""
SEGMENTS = """
[segments]
engine = "rados"
conf_file = "{ceph.conf_file}"
keyring = "{ceph.keyring}"
pool = "{ceph.settings.pool}"
"""
DEVICES = """
[segments]
engine = "block"
devices = {devices}
"""


def records_conf(name: str, capacity: str, etcd: EtcdServers) -> str:
    """All but where the segments of the volume ``name`` are, which is made with ``capacity`` at its first mount.

    Without a ``capacity`` it is made with as much as there is.
    """
    return RECORDS.format(
        name=name,
        capacity_line=f'capacity = "{capacity}"\n' if capacity else "",
        endpoints=json.dumps(etcd.endpoints),
        request_size_max=format_size(etcd.settings.request_size_max),
        etcd=etcd,
    )


def mount_conf(name: str, capacity: str, etcd: EtcdServers, ceph: CephServers) -> str:
    """As `records_conf`, with the segments in Ceph."""
    return records_conf(name, capacity, etcd) + SEGMENTS.format(ceph=ceph)


def devices_conf(name: str, etcd: EtcdServers, devices: Sequence[Path]) -> str:
    """As `records_conf`, with the segments on block devices."""
    return records_conf(name, "", etcd) + DEVICES.format(devices=json.dumps([str(path) for path in devices]))
