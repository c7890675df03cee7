"""Takes a volume from nodes that are to be emptied, and gives it back to those that stay.

A node with the annotation kvfuse.io/drain: "true" is drained: once no pod on it uses a volume, the mount is ended,
so that the daemon stores everything, hands its slabs back, and leaves the volume's hosts. The holder's container then
waits until the annotation is gone. A node that is merely cordoned keeps its mounts, as its pods may go on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvfuse_kubernetes.operator.cluster_api import ClusterApi, CommandFailed, Object
from kvfuse_kubernetes.operator.volume_state import VolumeState, condition, mount_point, running_container

DRAIN = "kvfuse.io/drain"
DRIVER = "csi.kvfuse"
END_SECONDS = 310.0
MARK = "/run/kvfuse/hold/{volume}.ended"
"""file of a node with the uid of the holder's pod that is not to mount again"""
END_MOUNT = (
    'printf %s "$POD_UID" > "$1.new"; mv "$1.new" "$1"; '
    'if grep -q " $2 " /proc/self/mountinfo; then exec kvfuse umount "$2"; fi'
)


async def drain(api: ClusterApi, volume: str, state: VolumeState, nodes: Mapping[str, Object]) -> Object:
    """End a volume's mounts on nodes that are drained, and resume those of others: the condition Draining.

    kr8s.ServerError.
    """
    leaving = sorted(node for node in state.holders if node in nodes and is_drained(nodes[node]))
    said, waits = [], False
    for node in leaving:
        pods = await _users(api, volume, node)
        if pods:
            said.append(f"{node} is in use by {', '.join(pods[:5])}")
            waits = True
            continue
        try:
            await end_mount(api, volume, state.holders[node], END_SECONDS)
            said.append(f"{node} is drained")
        except CommandFailed as failure:
            said.append(f"{node}: {failure}")
            waits = True
    for node in sorted({*state.holders} - {*leaving}):
        await _resume(api, volume, state, node)
    if leaving:
        return condition("Draining", True, "InUse" if waits else "Drained", "; ".join(said)[:1000])
    return condition("Draining", False, "None", "no node is drained")


def is_drained(node: Object) -> bool:
    return str(node["metadata"].get("annotations", {}).get(DRAIN)).lower() == "true"


async def end_mount(api: ClusterApi, volume: str, holder: Object, seconds: float) -> None:
    """Unmount a volume on a node, and keep its holder from mounting it again. CommandFailed: it is in use, for one."""
    place = running_container(holder)
    if place is None:
        return  # nobody holds it
    command = ["sh", "-ec", END_MOUNT, "end", MARK.format(volume=volume), mount_point(volume)]
    await api.execute(place, command, seconds=seconds)


async def _resume(api: ClusterApi, volume: str, state: VolumeState, node: str) -> None:
    """Have a holder mount again that was kept from it. One that answers was not."""
    place = running_container(state.holders[node])
    if place is None or node in state.ready_nodes:
        return
    try:
        await api.execute(place, ["rm", "-f", MARK.format(volume=volume)], seconds=10.0)
    except CommandFailed:
        return  # at the next look


async def _users(api: ClusterApi, volume: str, node: str) -> list[str]:
    """Pods on a node that use a volume, but for the daemon and the holder."""
    found = []
    claims: dict[tuple[str, str], str] = {}
    for row in await api.list("PersistentVolume"):
        csi, claim = row["spec"].get("csi", {}), row["spec"].get("claimRef")
        if csi.get("driver") == DRIVER and claim and csi["volumeHandle"].partition("/")[0] == volume:
            claims[claim["namespace"], claim["name"]] = row["metadata"]["name"]
    for pod in await api.list("Pod"):
        meta, spec = pod["metadata"], pod["spec"]
        if spec.get("nodeName") != node or pod.get("status", {}).get("phase") in ("Succeeded", "Failed"):
            continue
        if meta.get("labels", {}).get("app.kubernetes.io/name") == "kvfuse":
            continue
        if any(_uses(row, volume, meta["namespace"], claims) for row in spec.get("volumes", [])):
            found.append(f"{meta['namespace']}/{meta['name']}")
    return sorted(found)


def _uses(row: Object, volume: str, namespace: str, claims: Iterable[tuple[str, str]]) -> bool:
    """Whether a volume of a pod is, or may be, of this kvfuse volume."""
    if (csi := row.get("csi")) is not None:
        return bool(csi.get("driver") == DRIVER and csi.get("volumeAttributes", {}).get("volume") == volume)
    if (claim := row.get("persistentVolumeClaim")) is not None:
        return (namespace, claim["claimName"]) in claims
    return "kvfuse" in str(row.get("hostPath", {}).get("path", ""))
