"""Mounts of one shared volume in the virtual machine of scripts/rdma-vm, where programs take long to begin.

Names are in one etcd member, bytes in files in memory or on devices, all in the machine. Daemons are forks of one
process (`daemon_forks`): Python imports what they need once.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from cluster_lab import MEMORY, running
from mounting import PATIENCE_S, KvfuseMount, conf_elsewhere, shared_conf

from kvfuse_cluster.etcd import EtcdServers

PATIENT = ("records.deadline=20", "client.lease=60")
"""seconds: nothing that is only slow is a fault there"""


@contextmanager
def vm_etcd() -> Iterator[EtcdServers]:
    """One member. Its data is in memory."""
    with running(lambda folder: EtcdServers.start(folder, 1, patience=PATIENCE_S), "kvfuse-etcd-", MEMORY) as etcd:
        yield etcd


@contextmanager
def vm_mounts(
    etcd: EtcdServers, words: Sequence[Sequence[str]], lines: Sequence[str] = (), devices: Sequence[Path] = ()
) -> Iterator[list[KvfuseMount]]:
    """Mounts of a new volume, each with ``words`` of its own, as ``-o`` takes them. At the end those that still are
    mounted must end well, and the volume must be clean.

    ``lines``: of mount.conf. ``devices``: the one device of the volume, as each mount has it; without them bytes are
    in files in memory.
    """
    with tempfile.TemporaryDirectory(prefix="kvfuse-vm-", dir=MEMORY) as folder, ExitStack() as stack:
        conf = shared_conf(Path(folder), etcd, lines=lines, device=devices[0] if devices else None)
        patient = ("segments.deadline=20",) if devices else ()
        mounts: list[KvfuseMount] = []
        for number, own in enumerate(words):
            base = Path(folder, f"host-{number}")
            base.mkdir()
            source = conf_elsewhere(conf, devices[0], devices[number]) if number and devices else conf
            mount = KvfuseMount(base, (*PATIENT, *patient, *own), source=source)
            stack.callback(mount.remove)
            mount.mount()
            mounts.append(mount)
        yield mounts
        for mount in mounts:
            if mount.is_mounted:
                mount.check_unexpected_errors()
                mount.unmount()
        mounts[-1].fsck()
