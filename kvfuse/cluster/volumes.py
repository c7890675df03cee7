"""Volumes on an etcd and a Ceph of this machine: how the etcd is set up for them, and their mount.conf."""

from __future__ import annotations

import json

from kvfuse.cluster.ceph import CephServers
from kvfuse.cluster.etcd import EtcdServers, EtcdSettings
from kvfuse.sizes import MIB, format_size

SETTINGS = EtcdSettings(operations_max=4096, request_size_max=8 * MIB)
"""more than etcd's defaults, as docs/engines.md recommends: fewer commits where many names change at once"""

MOUNT_CONF = """\
[volume]
name = "{name}"
capacity = "{capacity}"

[records]
engine = "etcd"
endpoints = {endpoints}
operations_max = {etcd.settings.operations_max}
request_size_max = "{request_size_max}"

[segments]
engine = "rados"
conf_file = "{ceph.conf_file}"
keyring = "{ceph.keyring}"
pool = "{ceph.settings.pool}"
"""


def mount_conf(name: str, capacity: str, etcd: EtcdServers, ceph: CephServers) -> str:
    """Of the volume ``name``, made with ``capacity`` at its first mount."""
    return MOUNT_CONF.format(
        name=name,
        capacity=capacity,
        endpoints=json.dumps(etcd.endpoints),
        request_size_max=format_size(etcd.settings.request_size_max),
        etcd=etcd,
        ceph=ceph,
    )
