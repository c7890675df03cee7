"""Handlers of KvfuseNamespace objects."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import kopf

from kvfuse.sizes import format_size
from kvfuse_kubernetes.operator import namespace_calls, volume_state
from kvfuse_kubernetes.operator.cluster_api import ClusterApi, CommandFailed, Object
from kvfuse_kubernetes.operator.namespace_calls import NotServed, WantedNamespace
from kvfuse_kubernetes.operator.volume_plan import WrongSpec

AGAIN_SECONDS = 5.0
FOLDER = "tenants"
"""folder of a volume with the namespaces of these objects, each in a folder of the cluster's namespace"""
KIND = "kvfuse.io", "v1alpha1", "kvfusenamespaces"


class NamespaceHandlers:
    """``look_seconds``: between two looks at a namespace's use."""

    def __init__(self, api: ClusterApi, look_seconds: float) -> None:
        self.api, self.look_seconds = api, look_seconds

    def register(self, registry: kopf.OperatorRegistry) -> None:
        for on in (kopf.on.create, kopf.on.update, kopf.on.resume):
            on(*KIND, registry=registry)(self.make)
        kopf.on.delete(*KIND, registry=registry)(self.end)
        kopf.timer(*KIND, registry=registry, interval=self.look_seconds, initial_delay=self.look_seconds)(self.look)

    async def make(self, body: kopf.Body, patch: kopf.Patch, **_: Any) -> None:
        """Make the namespace, or give it other settings."""
        spec = dict(body.spec)
        try:
            wanted = read_namespace(body.metadata, spec, await self._token(body.metadata["namespace"], spec))
            await namespace_calls.ensure(self.api, wanted, await namespace_calls.places_of(self.api, wanted.volume))
        except WrongSpec as error:
            _set_ready(body, patch, False, "WrongSpec", str(error))
            raise kopf.PermanentError(str(error)) from None
        except (NotServed, CommandFailed) as error:
            reason = "Refused" if isinstance(error, CommandFailed) else "VolumeNotMounted"
            _set_ready(body, patch, False, reason, str(error))
            raise kopf.TemporaryError(str(error), delay=AGAIN_SECONDS) from None
        patch.status["path"] = wanted.path
        _set_ready(body, patch, True, "Made", f"{wanted.path} of volume {wanted.volume}")

    async def _token(self, namespace: str, spec: Mapping[str, Any]) -> bytes:
        said = spec.get("tokenSecret")
        if said is None:
            return b""
        secret, key = await self.api.get("Secret", said["name"], namespace), said.get("key", "token")
        if secret is None or key not in secret.get("data", {}):
            raise kopf.TemporaryError(f"Secret {said['name']} with key {key} is not there yet", delay=AGAIN_SECONDS)
        return base64.b64decode(secret["data"][key]).strip()

    async def look(self, body: kopf.Body, patch: kopf.Patch, **_: Any) -> None:
        """Bring its use up to date; make it on nodes that have the volume since."""
        path, volume = body.status.get("path"), str(body.spec.get("volume"))
        if not path:
            return
        used, capacity, absent = 0, 0, []
        try:
            for place in (await namespace_calls.places_of(self.api, volume))[: volume_state.LOOKS_MAX]:
                row = namespace_calls.find_row(await volume_state.read_stats(self.api, volume, place), path)
                if row is None:
                    absent.append(place)
                    continue
                used, capacity = used + row["used"]["bytes"], capacity + row["capacity"]
            if absent:
                spec = dict(body.spec)
                token = await self._token(str(body.metadata["namespace"]), spec)
                await namespace_calls.ensure(self.api, read_namespace(body.metadata, spec, token), absent)
        except (NotServed, CommandFailed, WrongSpec) as error:
            _set_ready(body, patch, False, "VolumeNotMounted", str(error))
            return
        patch.status["used"], patch.status["usedBytes"] = f"{format_size(used)} of {format_size(capacity)}", used
        _set_ready(body, patch, True, "Made", f"{path} of volume {volume}")

    async def end(self, body: kopf.Body, **_: Any) -> None:
        """Remove the namespace, unless its files are to stay."""
        path, volume = body.status.get("path"), str(body.spec.get("volume"))
        if not path or body.spec.get("reclaimPolicy", "Delete") == "Retain":
            return
        if await self.api.get("KvfuseVolume", volume) is None and not await volume_state.find_pods(
            self.api, volume, "daemon"
        ):
            return  # it went with its volume
        try:
            places = await namespace_calls.places_of(self.api, volume)
            await namespace_calls.remove(self.api, volume, path, places)
        except (NotServed, CommandFailed) as error:
            raise kopf.TemporaryError(f"{path} is not removed: {error}", delay=AGAIN_SECONDS) from None


def read_namespace(meta: Mapping[str, Any], spec: Mapping[str, Any], token: bytes) -> WantedNamespace:
    """What a KvfuseNamespace asks for. WrongSpec."""
    said: Object = dict(spec.get("settings") or {})
    for word, owner in (("capacity", "quota"), ("token", "tokenSecret"), ("descriptor", "descriptor")):
        if word in said:
            raise WrongSpec(f"spec.settings.{word}: say spec.{owner}")
    if spec.get("quota"):
        said["capacity"] = spec["quota"]
    if spec.get("descriptor"):
        said["descriptor"] = namespace_calls.as_descriptor(spec["descriptor"])
    settings = namespace_calls.check_settings(said)
    return WantedNamespace(str(spec["volume"]), f"{FOLDER}/{meta['namespace']}/{meta['name']}", settings, token)


def _set_ready(body: kopf.Body, patch: kopf.Patch, holds: bool, reason: str, message: str) -> None:
    found = [volume_state.condition("Ready", holds, reason, message)]
    former = body.status.get("conditions") or []
    patch.status["conditions"] = volume_state.merge_conditions(former, found, body.metadata["generation"])
