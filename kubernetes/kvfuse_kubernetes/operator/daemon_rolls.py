"""Brings daemons up to date where the cluster cannot start a pod before its predecessor ends (before Kubernetes 1.22).

The containers of a daemon's pod stand by for each other. So one after the other gets the new image, in the pod that
is there: calls wait for a handover, not for the end of one pod and the start of another. A container is replaced only
while another one has been up for a while; a version that does not start replaces one container, and no more. Where
more than images changed, the pod is deleted, and calls wait for the next one.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from kvfuse_kubernetes.operator.cluster_api import ClusterApi, Object
from kvfuse_kubernetes.operator.volume_objects import CONFIG
from kvfuse_kubernetes.operator.volume_state import is_leaving, is_ready

SETTLED_SECONDS = 6.0
"""that a container has been up when it stands by: its first imports take some"""


def stale_containers(pod: Object, daemon: Object) -> dict[str, str]:
    """Containers of a pod that have another image than the template: name -> the template's."""
    wanted = {row["name"]: row["image"] for row in daemon["spec"]["template"]["spec"]["containers"]}
    rows = [row for row in pod["spec"]["containers"] if wanted.get(row["name"], row["image"]) != row["image"]]
    return {row["name"]: wanted[row["name"]] for row in rows}


def next_image(pod: Object, daemon: Object, now: datetime) -> dict[str, Any] | None:
    """The patch that gives the next container of a pod its image; None: none is due, or none may be replaced yet."""
    states = {row["name"]: row["state"] for row in pod.get("status", {}).get("containerStatuses", [])}
    for name, image in reversed(stale_containers(pod, daemon).items()):
        others = [state for other, state in states.items() if other != name]
        if not others or any(_is_settled(state, now) for state in others):
            return {"spec": {"containers": [{"name": name, "image": image}]}}
    return None


def differs(pod: Object, daemon: Object) -> bool:
    """More than images changed: mount.conf, or the set of containers."""
    template = daemon["spec"]["template"]
    if pod["metadata"].get("annotations", {}).get(CONFIG) != template["metadata"]["annotations"][CONFIG]:
        return True
    return {row["name"] for row in pod["spec"]["containers"]} != {row["name"] for row in template["spec"]["containers"]}


async def roll(api: ClusterApi, daemon: Object, pods: dict[str, Object], now: datetime | None = None) -> int:
    """Bring pods of an OnDelete DaemonSet a step nearer to its template: how many are not up to date.

    kr8s.ServerError.
    """
    if daemon["spec"]["updateStrategy"]["type"] != "OnDelete":
        return 0
    now, behind = now or datetime.now(UTC), 0
    for pod in pods.values():
        meta = pod["metadata"]
        if is_leaving(pod):
            behind += 1
        elif differs(pod, daemon):
            behind += 1
            # One node at a time, as its calls wait for the next pod.
            if all(is_ready(other) and not is_leaving(other) for other in pods.values() if other is not pod):
                await api.delete("Pod", meta["name"], meta["namespace"])
                break
        elif stale_containers(pod, daemon):
            behind += 1
            if (change := next_image(pod, daemon, now)) is not None:
                await api.patch("Pod", meta["name"], change, meta["namespace"])
    return behind


def _is_settled(state: dict[str, Any], now: datetime) -> bool:
    started = state.get("running", {}).get("startedAt")
    if started is None:
        return False
    return now - datetime.fromisoformat(started.replace("Z", "+00:00")) >= timedelta(seconds=SETTLED_SECONDS)
