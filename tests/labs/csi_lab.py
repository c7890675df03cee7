"""The CSI node plug-in as a program over a real mount, and a kubelet's calls over its socket."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
from mounting import PATIENCE_S, KvfuseMount, mount_rows, wait_until

from kvfuse.mounttable import all_mounts
from kvfuse_kubernetes.csi.csi_messages import SERVICES, messages

VOLUME = "kv"
READ_WRITE_MANY = 5
"""MULTI_NODE_MULTI_WRITER"""


class PluginNode:
    """A node: a folder of the kubelet, one of volumes with the mount of `VOLUME`, and the plug-in."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.kubelet, self.volumes, self.left = base / "kubelet", base / "volumes", base / "left"
        (self.kubelet / "pods").mkdir(parents=True)
        (self.volumes / VOLUME).mkdir(parents=True)
        self.mount = KvfuseMount(self.volumes / VOLUME, ["capacity=64MiB", "slab_size=1MiB"])
        self.log = base / "plugin.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def registration(self) -> Path:
        return self.kubelet / "plugins_registry" / "csi.kvfuse-reg.sock"

    @property
    def endpoint(self) -> Path:
        return self.kubelet / "plugins" / "csi.kvfuse" / "csi.sock"

    def start(self, *more: str) -> None:
        """Start the plug-in, and wait until it answers."""
        words = ["--kubelet", self.kubelet, "--volumes", self.volumes, "--left", self.left, "--node", "node-1", *more]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kvfuse_kubernetes.csi.csi_command", *words],
                stderr=log,
                stdin=subprocess.DEVNULL,
            )
        said = self._announcements()
        wait_until(lambda: self._announcements() > said or self._has_ended(), "the plug-in")
        assert not self._has_ended(), self.log.read_text()

    def _announcements(self) -> int:
        return self.log.read_text().count("serves")

    def _has_ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal; the exit status."""
        assert self._process is not None
        self._process.send_signal(number)
        return self.wait_for_end()

    def wait_for_end(self) -> int:
        """The exit status."""
        assert self._process is not None
        status = self._process.wait(PATIENCE_S)
        self._process = None
        return status

    def call(self, method: str, socket: Path | None = None, **fields: Any) -> Any:
        """The answer to a call; grpc.RpcError where it fails."""
        service, (request, response) = next(
            (service, methods[method]) for service, methods in SERVICES.items() if method in methods
        )
        with grpc.insecure_channel(f"unix:{socket or self.endpoint}") as channel:
            stub = channel.unary_unary(
                f"/{service}/{method}",
                getattr(messages, request).SerializeToString,
                getattr(messages, response).FromString,
            )
            return stub(getattr(messages, request)(**fields), timeout=PATIENCE_S, wait_for_ready=True)

    def target(self, pod: str) -> Path:
        """The path that a kubelet names for a pod's volume. Its parent is there."""
        path = self.kubelet / "pods" / pod / "volumes" / "kubernetes.io~csi" / "data" / "mount"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def publish(
        self,
        pod: str,
        volume_id: str,
        context: Mapping[str, str] | None = None,
        *,
        read_only: bool = False,
        flags: Sequence[str] = (),
        is_ephemeral: bool = False,
    ) -> Path:
        """As a kubelet does; the pod's path."""
        target = self.target(pod)
        context = {**(context or {}), "csi.storage.k8s.io/ephemeral": str(is_ephemeral).lower()}
        context |= {"csi.storage.k8s.io/pod.name": pod, "csi.storage.k8s.io/pod.uid": pod}
        mode = messages.AccessMode(mode=READ_WRITE_MANY)
        capability = messages.VolumeCapability(mount=messages.MountVolume(mount_flags=flags), access_mode=mode)
        self.call(
            "NodePublishVolume",
            volume_id=volume_id,
            target_path=str(target),
            volume_capability=capability,
            readonly=read_only,
            volume_context=context,
        )
        return target

    def publish_own(self, pod: str, volume_id: str, **context: str) -> Path:
        """The pod's own volume."""
        return self.publish(pod, volume_id, {"volume": VOLUME, **context}, is_ephemeral=True)

    def unpublish(self, pod: str, volume_id: str) -> None:
        self.call("NodeUnpublishVolume", volume_id=volume_id, target_path=str(self.target(pod)))

    def stats(self, pod: str, volume_id: str) -> Any:
        return self.call("NodeGetVolumeStats", volume_id=volume_id, volume_path=str(self.target(pod)))

    def binds(self) -> list[str]:
        """Mount points below the kubelet's folder."""
        return [str(row.point) for row in all_mounts() if self.kubelet in row.point.parents]

    def remove(self) -> None:
        """End whatever still runs."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        for point in sorted(self.binds(), reverse=True):
            subprocess.run(["umount", "-l", point], check=False)
        self.mount.remove()
        assert not [row for row in mount_rows() if str(self.base) in row]


@contextmanager
def plugin_node() -> Iterator[PluginNode]:
    """A node whose volume is mounted and whose plug-in answers. At the end the volume must be clean."""
    base = Path(tempfile.mkdtemp(prefix="kvfuse-test-"))
    node = PluginNode(base)
    try:
        node.mount.mount()
        node.start()
        yield node
        for point in sorted(node.binds(), reverse=True):
            subprocess.run(["umount", point], check=True)
        assert node.end() == 0, node.log.read_text()
        assert not node.endpoint.exists()
        if node.mount.is_mounted:
            node.mount.check_unexpected_errors()
            node.mount.unmount()
        node.mount.fsck()
    finally:
        node.remove()
        shutil.rmtree(base)


def names_in(folder: Path) -> set[str]:
    return set(os.listdir(folder))
