"""Gives volumes capacity: as much as their spec says, and in steps where they fill up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvfuse.sizes import format_size
from kvfuse_kubernetes.operator.cluster_api import ClusterApi, CommandFailed, Object
from kvfuse_kubernetes.operator.volume_plan import VolumePlan
from kvfuse_kubernetes.operator.volume_state import Served, VolumeState, condition, mount_point

RESIZE_SECONDS = 120.0


def wanted_capacity(plan: VolumePlan, served: Served) -> int:
    """Bytes that a volume is to have: never less than it has."""
    wanted = max(plan.capacity or 0, served.capacity)
    if plan.growth is not None and served.share >= plan.growth.above:
        wanted = max(wanted, min(served.capacity + plan.growth.step, plan.growth.maximum))
    return wanted


async def grow(
    api: ClusterApi, plan: VolumePlan, state: VolumeState, asked: Mapping[str, Any]
) -> tuple[Object, dict[str, int]]:
    """Give a volume what it is to have: the condition Growing, and what each node was asked for by now.

    A volume that hosts share is given it by one of them. ``asked``: as it was before: a volume grows by whole segments,
    and may have a little less than it was asked for.
    """
    done = {node: int(size) for node, size in asked.items()}
    failures, grown = [], []
    for row in state.served[:1] if plan.is_shared else state.served:
        key = "all" if plan.is_shared else row.place.node
        wanted = wanted_capacity(plan, row)
        if wanted <= max(row.capacity, done.get(key, 0)):
            continue
        try:
            command = ["kvfuse", "resize", mount_point(plan.name), "--capacity", str(wanted)]
            await api.execute(row.place, command, seconds=RESIZE_SECONDS)
        except CommandFailed as failure:
            failures.append(f"{row.place.node}: to {format_size(wanted)}: {failure}")
            continue
        done[key] = wanted
        grown.append(f"{format_size(row.capacity)} -> {format_size(wanted)}")
    if failures:
        return condition("Growing", True, "Failed", "; ".join(failures)[:1000]), done
    if grown:
        return condition("Growing", True, "Growing", ", ".join(sorted(set(grown)))), done
    return _rest(plan, state), done


def _rest(plan: VolumePlan, state: VolumeState) -> Object:
    """Of a volume that has what it is to have."""
    if plan.growth is not None and any(
        row.share >= plan.growth.above and row.capacity >= plan.growth.maximum for row in state.served
    ):
        text = f"it is full, and has its maximum of {format_size(plan.growth.maximum)}"
        return condition("Growing", False, "AtMaximum", text)
    if plan.capacity and any(row.capacity > plan.capacity for row in state.served) and plan.growth is None:
        text = "it has more than spec.capacity; the operator takes nothing away: 'kvfuse resize' does"
        return condition("Growing", False, "Larger", text)
    return condition("Growing", False, "AsWanted", "it has the capacity that it is to have")
