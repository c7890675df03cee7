"""Nodes that are lost, for which the operator does not wait: their kubelet is silent, or the cluster has no such node.

A volume that hosts share goes on without them: when the lease of a host ends, the others adopt its slabs, and ask it
for nothing any more, neither for what it has in memory nor for its disk tier. A node that comes back mounts again, as
another host. No I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from kvfuse_kubernetes.operator.cluster_api import Object
from kvfuse_kubernetes.operator.volume_state import VolumeState, condition, count


@dataclass(frozen=True)
class LostNode:
    """``since``: when its kubelet was missed, as the cluster says it; None: the cluster has no such node any more."""

    name: str
    since: str | None

    def __str__(self) -> str:
        if self.since is None:
            return f"{self.name} is no node of the cluster any more"
        return f"{self.name} does not answer since {self.since}"


def find_lost(
    nodes: Mapping[str, Object], state: VolumeState, lost_seconds: float, now: datetime | None = None
) -> list[LostNode]:
    """Nodes with pods of a volume whose kubelet has been silent for that long, or that are absent."""
    found, now = [], now or datetime.now(UTC)
    for name in sorted({*state.holders, *state.daemons}):
        if name not in nodes:
            found.append(LostNode(name, None))
        elif (since := _silent_since(nodes[name])) is not None and _age(since, now) >= lost_seconds:
            found.append(LostNode(name, since))
    return found


def forget(state: VolumeState, lost: list[LostNode]) -> None:
    """Take these nodes out of what is looked at. A DaemonSet still wants a pod on each that the cluster has."""
    for node in lost:
        for rows in (state.holders, state.daemons, state.silent):
            rows.pop(node.name, None)
        state.wanted_nodes -= node.since is not None
    names = {node.name for node in lost}
    state.served = [row for row in state.served if row.place.node not in names]


def lost_condition(state: VolumeState, lost: list[LostNode], *, is_shared: bool) -> Object:
    """NodesLost: True while there are any; the message says what became of what they held."""
    if not lost:
        return condition("NodesLost", False, "None", "no node is lost")
    text = "; ".join(str(node) for node in lost[:10])
    if not is_shared:
        return condition("NodesLost", True, "Lost", f"{text}; what was stored there alone is on its disks")
    hosts = state.hosts
    if hosts is None:
        return condition("NodesLost", True, "Lost", f"{text}; no host is left that adopts its slabs")
    if hosts["departedSlabs"]:
        left = count(hosts["departedSlabs"], "slab")
        return condition("NodesLost", True, "Adopting", f"{text}; {left} of lost hosts are still to be adopted")
    if hosts["alive"] > len(state.ready_nodes):
        return condition("NodesLost", True, "LeaseHeld", f"{text}; a lease has not ended yet")
    return condition("NodesLost", True, "Adopted", f"{text}; other hosts have adopted all that was stored")


def _age(since: str, now: datetime) -> float:
    return (now - datetime.fromisoformat(since.replace("Z", "+00:00"))).total_seconds()


def _silent_since(node: Object) -> str | None:
    """None: its kubelet answers, whatever it says."""
    for row in node.get("status", {}).get("conditions", []):
        if row["type"] == "Ready" and row["status"] == "Unknown":
            return str(row["lastTransitionTime"])
    return None
