"""Handlers of KvfuseVolume objects."""

from __future__ import annotations

import base64
from typing import Any

import kopf
import kr8s

from kvfuse_kubernetes.operator import daemon_rolls, growing, lost_nodes, node_drain, volume_state
from kvfuse_kubernetes.operator.cluster_api import ClusterApi, CommandFailed, Object
from kvfuse_kubernetes.operator.volume_objects import Templates, make_objects, rook_secret
from kvfuse_kubernetes.operator.volume_plan import VolumePlan, WrongSpec, read_volume

AGAIN_SECONDS = 5.0
"""until a step that failed is tried again"""
END_SECONDS = 310.0
"""of 'kvfuse umount', which waits for the last writes"""
KIND = "kvfuse.io", "v1alpha1", "kvfusevolumes"


class VolumeHandlers:
    """``look_seconds``: between two looks at a volume; ``lost_seconds``: that a node may be silent."""

    def __init__(self, api: ClusterApi, templates: Templates, look_seconds: float, lost_seconds: float) -> None:
        self.api, self.templates = api, templates
        self.look_seconds, self.lost_seconds = look_seconds, lost_seconds

    def register(self, registry: kopf.OperatorRegistry) -> None:
        for on in (kopf.on.create, kopf.on.update, kopf.on.resume):
            on(*KIND, registry=registry)(self.make)
        kopf.on.delete(*KIND, registry=registry)(self.end)
        kopf.timer(*KIND, registry=registry, interval=self.look_seconds, initial_delay=1.0)(self.look)

    async def make(self, body: kopf.Body, patch: kopf.Patch, **_: Any) -> None:
        """Make the objects of a volume, or change them."""
        plan = self._plan(body, patch)
        try:
            if plan.rook is not None:
                await self.api.apply(await self._rook_secret(plan, _plain(body)))
            for made in make_objects(plan, self.templates, _plain(body), self.api.namespace):
                await self.api.apply(made)
        except kr8s.ServerError as error:
            raise kopf.TemporaryError(f"the cluster refuses an object: {error}", delay=AGAIN_SECONDS) from error
        patch.status["observedGeneration"] = body.metadata["generation"]

    def _plan(self, body: kopf.Body, patch: kopf.Patch) -> VolumePlan:
        try:
            return read_volume(str(body.metadata["name"]), dict(body.spec))
        except WrongSpec as error:
            wrong = volume_state.condition("Ready", False, "WrongSpec", str(error))
            _set_conditions(body, patch, [wrong])
            raise kopf.PermanentError(str(error)) from None

    async def _rook_secret(self, plan: VolumePlan, owner: Object) -> Object:
        """Ceph's addresses and the user's key, from where Rook has them. TemporaryError: Rook has not made them yet."""
        assert plan.rook is not None
        place = plan.rook.namespace
        monitors = await self.api.get("ConfigMap", "rook-ceph-mon-endpoints", place)
        name = f"rook-ceph-client-{plan.rook.client}"
        secret = await self.api.get("Secret", name, place)
        if monitors is None or secret is None:
            what = "ConfigMap rook-ceph-mon-endpoints" if monitors is None else f"Secret {name}"
            raise kopf.TemporaryError(f"{what} is not in namespace {place} yet: Rook makes it", delay=AGAIN_SECONDS)
        key = base64.b64decode(secret["data"][plan.rook.client]).decode()
        return rook_secret(plan, monitors["data"]["data"], key, owner, self.api.namespace)

    async def look(self, body: kopf.Body, patch: kopf.Patch, **_: Any) -> None:
        """Bring a volume's status up to date, give it room, and its daemons the next version."""
        try:
            plan = read_volume(str(body.metadata["name"]), dict(body.spec))
        except WrongSpec:
            return  # `make` says so
        state = await volume_state.look(self.api, plan.name)
        nodes = await self._nodes()
        lost = lost_nodes.find_lost(nodes, state, self.lost_seconds)
        lost_nodes.forget(state, lost)
        growth, asked = await growing.grow(self.api, plan, state, body.status.get("asked") or {})
        draining = await node_drain.drain(self.api, plan.name, state, nodes)
        behind = await self._roll(plan, state)
        for key, value in volume_state.make_status(state, is_shared=plan.is_shared).items():
            patch.status[key] = value
        patch.status["asked"], patch.status["behind"] = asked, behind
        patch.status["lostNodes"] = [node.name for node in lost]
        gone = lost_nodes.lost_condition(state, lost, is_shared=plan.is_shared)
        found = [volume_state.ready_condition(state), volume_state.degraded_condition(state), growth, draining, gone]
        _set_conditions(body, patch, found)

    async def _nodes(self) -> dict[str, Object]:
        return {node["metadata"]["name"]: node for node in await self.api.list("Node")}

    async def _roll(self, plan: VolumePlan, state: volume_state.VolumeState) -> int:
        labels = {"kvfuse.io__volume": plan.name, "app.kubernetes.io__component": "daemon"}
        sets = await self.api.list("DaemonSet", self.api.namespace, **labels)
        return sum([await daemon_rolls.roll(self.api, found, state.daemons) for found in sets])

    async def end(self, body: kopf.Body, patch: kopf.Patch, **_: Any) -> None:
        """Unmount a volume on all nodes; then its objects go with it. What it holds stays.

        A node that is lost unmounts when it comes back: the objects are gone by then.
        """
        name = str(body.metadata["name"])
        failures = []
        state = volume_state.VolumeState(await volume_state.find_pods(self.api, name, "holder"))
        lost_nodes.forget(state, lost_nodes.find_lost(await self._nodes(), state, self.lost_seconds))
        for node, pod in state.holders.items():
            try:
                await node_drain.end_mount(self.api, name, pod, END_SECONDS)
            except CommandFailed as failure:
                failures.append(f"{node}: {failure}")
        if failures:
            text = "; ".join(failures)[:1000]
            _set_conditions(body, patch, [volume_state.condition("Ready", False, "InUse", text)])
            raise kopf.TemporaryError(f"it is not unmounted everywhere: {text}", delay=AGAIN_SECONDS)


def _plain(body: kopf.Body) -> Object:
    return {"apiVersion": body["apiVersion"], "kind": body["kind"], "metadata": dict(body.metadata)}


def _set_conditions(body: kopf.Body, patch: kopf.Patch, found: list[Object]) -> None:
    former = body.status.get("conditions") or []
    patch.status["conditions"] = volume_state.merge_conditions(former, found, body.metadata["generation"])
