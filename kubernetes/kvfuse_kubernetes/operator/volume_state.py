"""What a volume's pods and daemons say: conditions of its status. No I/O but `look`, which asks them."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from kvfuse.sizes import format_size
from kvfuse_kubernetes.operator.cluster_api import ClusterApi, CommandFailed, Object, Place

LOOKS_MAX = 16
"""daemons that are asked in one look: those of other nodes are asked in another one"""
LOOK_SECONDS = 10.0


@dataclass(frozen=True)
class Served:
    """What one node's daemon says."""

    place: Place
    stats: Mapping[str, Any]

    @property
    def capacity(self) -> int:
        return int(self.stats["capacity"])

    @property
    def used(self) -> int:
        space = self.stats["space"]
        return int(space["size"] - space["free"])

    @property
    def share(self) -> float:
        """Of its room that is used."""
        return self.used / max(int(self.stats["space"]["size"]), 1)


@dataclass
class VolumeState:
    """``pods``: of holders and daemons, by node; ``silent``: node -> why its daemon says nothing."""

    holders: dict[str, Object] = field(default_factory=dict)
    daemons: dict[str, Object] = field(default_factory=dict)
    served: list[Served] = field(default_factory=list)
    silent: dict[str, str] = field(default_factory=dict)
    wanted_nodes: int = 0

    @property
    def ready_nodes(self) -> list[str]:
        """Nodes whose mount answers."""
        return sorted(node for node, pod in self.holders.items() if is_ready(pod))

    @property
    def hosts(self) -> dict[str, int] | None:
        """Of a volume that hosts share: how many are alive, and how many slabs those that are gone still hold.

        As the host says that knows of the most. None: nobody says.
        """
        rows = [row.stats["leases"] for row in self.served if "leases" in row.stats]
        alive = max((row["host_count"] for row in rows), default=None)
        return (
            None
            if alive is None
            else {
                "alive": alive,
                "departedSlabs": max(row["departed_slab_count"] for row in rows),
            }
        )


def mount_point(volume: str) -> str:
    """Of a volume, in containers of holders and daemons."""
    return f"/var/lib/kvfuse/volumes/{volume}/mnt"


def is_ready(pod: Object) -> bool:
    conditions = pod.get("status", {}).get("conditions", [])
    return any(row["type"] == "Ready" and row["status"] == "True" for row in conditions)


def is_leaving(pod: Object) -> bool:
    return "deletionTimestamp" in pod["metadata"]


def running_container(pod: Object) -> Place | None:
    """A container of the pod in which commands can run, of the one that runs longest."""
    rows = [row for row in pod.get("status", {}).get("containerStatuses", []) if "running" in row["state"]]
    if not rows or is_leaving(pod):
        return None
    row = min(rows, key=lambda row: row["state"]["running"]["startedAt"])
    meta = pod["metadata"]
    return Place(meta["namespace"], meta["name"], row["name"], pod["spec"].get("nodeName", ""))


async def find_pods(api: ClusterApi, volume: str, component: str) -> dict[str, Object]:
    """Pods of a volume's holders or daemons by node: of two of a node the one that stays."""
    labels = {"kvfuse.io__volume": volume, "app.kubernetes.io__component": component}
    pods = await api.list("Pod", api.namespace, **labels)
    pods.sort(key=lambda pod: (not is_leaving(pod), pod["metadata"]["creationTimestamp"]))
    return {pod["spec"]["nodeName"]: pod for pod in pods if pod["spec"].get("nodeName")}


async def find_daemons(api: ClusterApi, volume: str) -> list[Place]:
    """Containers of daemons of a volume in which commands can run, one of each node whose mount answers."""
    holders, daemons = await find_pods(api, volume, "holder"), await find_pods(api, volume, "daemon")
    places = [running_container(pod) for node, pod in daemons.items() if node in holders and is_ready(holders[node])]
    return [place for place in places if place is not None]


async def look(api: ClusterApi, volume: str) -> VolumeState:
    """Ask pods and daemons of a volume. kr8s.ServerError."""
    state = VolumeState(await find_pods(api, volume, "holder"), await find_pods(api, volume, "daemon"))
    for found in await api.list("DaemonSet", api.namespace, **{"kvfuse.io__volume": volume}):
        state.wanted_nodes = max(state.wanted_nodes, found.get("status", {}).get("desiredNumberScheduled", 0))
    places = {}
    for node in state.ready_nodes:
        if node in state.daemons and (place := running_container(state.daemons[node])) is not None:
            places[node] = place
        else:
            state.silent[node] = "no container of its daemon runs"
    chosen = random.sample(sorted(places), min(LOOKS_MAX, len(places)))
    answers = await asyncio.gather(*(read_stats(api, volume, places[node]) for node in chosen), return_exceptions=True)
    for node, answer in zip(chosen, answers, strict=True):
        if isinstance(answer, CommandFailed):
            state.silent[node] = str(answer)
        elif isinstance(answer, BaseException):
            raise answer
        else:
            state.served.append(Served(places[node], answer))
    return state


async def read_stats(api: ClusterApi, volume: str, place: Place) -> dict[str, Any]:
    """The counters of a mount. CommandFailed."""
    text = await api.execute(place, ["cat", f"{mount_point(volume)}/.kvfuse/stats"], seconds=LOOK_SECONDS)
    try:
        found = json.loads(text)
    except ValueError:
        raise CommandFailed(f"{place.pod}: its counters are no JSON") from None
    assert isinstance(found, dict)
    return found


# -- status --------------------------------------------------------------------------------------------


def make_status(state: VolumeState, *, is_shared: bool) -> dict[str, Any]:
    """The status of a volume, but for its conditions. Of a volume of each node, sums of all nodes that were asked."""
    rows = state.served[:1] if is_shared else state.served
    ready, wanted = len(state.ready_nodes), state.wanted_nodes
    found: dict[str, Any] = {"nodes": f"{ready}/{wanted}"}
    if rows:
        capacity, used = sum(row.capacity for row in rows), sum(row.used for row in rows)
        found |= {"capacity": format_size(capacity), "capacityBytes": capacity}
        found |= {"used": format_size(used), "usedBytes": used}
    return found | ({"hosts": state.hosts} if is_shared and state.hosts else {})


def ready_condition(state: VolumeState) -> Object:
    """Ready: the mount answers on each node that is to have it."""
    ready, wanted = state.ready_nodes, state.wanted_nodes
    if wanted and len(ready) >= wanted:
        return condition("Ready", True, "Mounted", f"it is mounted on {count(wanted, 'node')}")
    waiting = sorted({*state.holders, *state.daemons} - {*ready})
    text = f"it answers on {len(ready)} of {count(wanted, 'node')}"
    reasons = sorted({why for node in waiting for why in pod_troubles(state, node)})
    more = f"; not yet on {', '.join(waiting[:5])}" if waiting else ""
    return condition("Ready", False, "Waiting", text + more + (f": {'; '.join(reasons[:3])}" if reasons else ""))


def degraded_condition(state: VolumeState) -> Object:
    """Degraded: a daemon says that something fails, or says nothing."""
    troubles = []
    for row in state.served:
        for trouble in row.stats.get("degraded", []):
            troubles.append(f"{row.place.node}: {trouble if isinstance(trouble, str) else json.dumps(trouble)}")
    troubles += [f"{node}: {why}" for node, why in sorted(state.silent.items())]
    for node, pod in sorted(state.daemons.items()):
        broken = [
            row["name"] for row in pod.get("status", {}).get("containerStatuses", []) if "running" not in row["state"]
        ]
        if broken and node in state.ready_nodes and not is_leaving(pod):
            troubles.append(f"{node}: nobody stands by for the daemon, as {', '.join(broken)} does not run")
    if troubles:
        return condition("Degraded", True, "Troubles", "; ".join(troubles[:5]))
    return condition("Degraded", False, "Well", "no daemon reports a trouble")


def pod_troubles(state: VolumeState, node: str) -> Iterable[str]:
    """Why containers of a node do not run."""
    for pods in (state.holders, state.daemons):
        for row in pods.get(node, {}).get("status", {}).get("containerStatuses", []):
            if (waiting := row["state"].get("waiting")) is not None:
                last = row.get("lastState", {}).get("terminated", {})
                said = last.get("message") or waiting.get("message") or f"exit status {last.get('exitCode', '?')}"
                yield f"{row['name']}: {waiting.get('reason')}: {said.strip()[:200]}"


def condition(kind: str, holds: bool, reason: str, message: str) -> Object:
    return {"type": kind, "status": str(holds), "reason": reason, "message": message}


def merge_conditions(former: Iterable[Object], found: Iterable[Object], generation: int) -> list[Object]:
    """Conditions as a status has them: the time is that of the last change."""
    before = {row["type"]: row for row in former}
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    for row in found:
        old = before.get(row["type"])
        since = old["lastTransitionTime"] if old and old["status"] == row["status"] else now
        before[row["type"]] = {**row, "lastTransitionTime": since, "observedGeneration": generation}
    return [before[kind] for kind in sorted(before)]


def count(number: int, word: str) -> str:
    return f"{number} {word}" + ("" if number == 1 else "s")
