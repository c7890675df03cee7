"""What the kubelet asks: the services Identity, Node and Registration, with a method for each call.

A call that touches a mount has a deadline, as a FUSE daemon may hang. Past it the kubelet gets UNAVAILABLE and tries
again. The call's thread still holds the volume, so that no second one works on it meanwhile (ABORTED).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from kvfuse import __version__
from kvfuse.cli.mounts import within
from kvfuse.errors import KvfuseError
from kvfuse_kubernetes.csi.csi_messages import BYTES, GET_VOLUME_STATS, INODES, VOLUME_CONDITION, messages
from kvfuse_kubernetes.csi.node_volumes import NodeVolumes, NotMounted
from kvfuse_kubernetes.csi.volume_words import WrongRequest, check_ephemeral_id, is_lasting, read_publish

DRIVER = "csi.kvfuse"
"""the driver's name in pods and PersistentVolumes"""
VERSIONS = "1.0.0", "1.3.0"
"""of CSI, for the kubelet"""
CALL_SECONDS = 30.0
"""deadline of a call that touches a mount, by default"""
T = TypeVar("T")
log = logging.getLogger("kvfuse.csi")


class Pending(Exception):
    """An earlier call for the same volume has not ended."""


class Busy:
    """The volumes that calls work on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._names: set[str] = set()

    @contextmanager
    def taken(self, name: str) -> Iterator[None]:
        """No other call works on the volume meanwhile. Pending: one does."""
        with self._lock:
            if name in self._names:
                raise Pending(
                    f"an earlier call for volume {name} has not ended; 'kvfuse status' says whether its mount hangs"
                )
            self._names.add(name)
        try:
            yield
        finally:
            with self._lock:
                self._names.discard(name)


@dataclass
class NodeService:
    """The plug-in of one node."""

    volumes: NodeVolumes
    node: str
    """the node's name"""
    endpoint: Path
    """the socket, on the node"""
    left: Path
    """folder with a file for each ephemeral namespace that could not be removed yet; it has the volume's source"""
    deadline: float = CALL_SECONDS
    refused: threading.Event = field(default_factory=threading.Event)
    """set when the kubelet refuses the plug-in"""
    _busy: Busy = field(default_factory=Busy)

    # -- Identity ------------------------------------------------------------------------------------

    def GetPluginInfo(self, request: Any) -> Any:
        return messages.GetPluginInfoResponse(name=DRIVER, vendor_version=__version__)

    def GetPluginCapabilities(self, request: Any) -> Any:
        """None: there is no controller."""
        return messages.GetPluginCapabilitiesResponse()

    def Probe(self, request: Any) -> Any:
        return messages.ProbeResponse(ready=messages.BoolValue(value=self.volumes.kubelet.is_dir()))

    # -- Registration --------------------------------------------------------------------------------

    def GetInfo(self, request: Any) -> Any:
        return messages.PluginInfo(
            type="CSIPlugin", name=DRIVER, endpoint=str(self.endpoint), supported_versions=VERSIONS
        )

    def NotifyRegistrationStatus(self, request: Any) -> Any:
        if request.plugin_registered:
            log.info("the kubelet has registered %s", DRIVER)
        else:
            log.error("the kubelet refuses to register %s: %s", DRIVER, request.error)
            self.refused.set()
        return messages.RegistrationStatusResponse()

    # -- Node ----------------------------------------------------------------------------------------

    def NodeGetInfo(self, request: Any) -> Any:
        return messages.NodeGetInfoResponse(node_id=self.node)

    def NodeGetCapabilities(self, request: Any) -> Any:
        calls = [messages.NodeServiceCall(type=kind) for kind in (GET_VOLUME_STATS, VOLUME_CONDITION)]
        capabilities = [messages.NodeServiceCapability(rpc=call) for call in calls]
        return messages.NodeGetCapabilitiesResponse(capabilities=capabilities)

    def NodePublishVolume(self, request: Any) -> Any:
        _require(request, "volume_id", "target_path")
        if not request.HasField("volume_capability"):
            raise WrongRequest("volume_capability is missing")
        wanted = read_publish(request)
        self._within(request.volume_id, self.volumes.publish, wanted, request.target_path)
        log.info("%s is published at %s", wanted.name, request.target_path)
        return messages.NodePublishVolumeResponse()

    def NodeUnpublishVolume(self, request: Any) -> Any:
        _require(request, "volume_id", "target_path")
        row = self._within(request.volume_id, self.volumes.unpublish, request.target_path)
        if not is_lasting(request.volume_id):
            self._remove_ephemeral(check_ephemeral_id(request.volume_id), row.source if row else None)
        log.info("%s is not published at %s any more", request.volume_id, request.target_path)
        return messages.NodeUnpublishVolumeResponse()

    def NodeGetVolumeStats(self, request: Any) -> Any:
        """Use and condition; a volume whose daemon does not answer is abnormal."""
        _require(request, "volume_id", "volume_path")
        try:
            # A question that hangs holds up the next question alone, not the pod's end.
            found = self._within(f"{request.volume_id} (use)", self.volumes.usage, request.volume_path)
        except (NotMounted, KvfuseError, Pending) as error:
            condition = messages.VolumeCondition(abnormal=True, message=str(error))
            return messages.NodeGetVolumeStatsResponse(volume_condition=condition)
        capacity, used = found["capacity"], found["used"]
        room = messages.VolumeUsage(available=max(0, capacity - used), total=capacity, used=used, unit=BYTES)
        files = messages.VolumeUsage(used=found["files"], unit=INODES)
        condition = messages.VolumeCondition(message="the daemon answers")
        return messages.NodeGetVolumeStatsResponse(usage=[room, files], volume_condition=condition)

    # -- what is left --------------------------------------------------------------------------------

    def _remove_ephemeral(self, volume_id: str, source: str | None) -> None:
        """Now, or later where the volume does not answer: a pod's end does not wait for that."""
        try:
            self._within(volume_id, self.volumes.remove_ephemeral, volume_id, source)
        except (NotMounted, KvfuseError, OSError) as error:
            log.warning("the namespace of %s is removed later: %s", volume_id, error)
            self.left.mkdir(parents=True, exist_ok=True)
            (self.left / volume_id).write_text(source or "")
        else:
            self.sweep()

    def sweep(self) -> None:
        """Try again to remove ephemeral namespaces that are left, in volumes that answer."""
        for path in self.left.iterdir() if self.left.is_dir() else ():
            with suppress(NotMounted, KvfuseError, OSError, Pending):
                source = path.read_text() or None
                if self._within(path.name, self.volumes.remove_ephemeral, path.name, source) or source:
                    path.unlink()

    def _within(self, volume_id: str, function: Callable[..., T], *arguments: Any) -> T:
        """The result of a call that may hang. Pending; EngineTimeout past the deadline."""

        def call() -> T:
            with self._busy.taken(volume_id):
                return function(*arguments)

        return within(self.deadline, call)


def _require(request: Any, *names: str) -> None:
    for name in names:
        if not getattr(request, name):
            raise WrongRequest(f"{name} is missing")
