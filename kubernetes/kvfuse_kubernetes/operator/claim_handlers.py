"""Makes PersistentVolumes for claims: each is a namespace of a kvfuse volume, with the claim's size as its quota.

The classes have the provisioner `PROVISIONER`, and parameter ``volume``; their other parameters are settings of the
namespaces, but for ``rings``, which is an attribute of the PersistentVolume.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import kopf

from kvfuse_kubernetes.operator import namespace_calls
from kvfuse_kubernetes.operator.cluster_api import ClusterApi, CommandFailed, Object
from kvfuse_kubernetes.operator.namespace_calls import NotServed, WantedNamespace
from kvfuse_kubernetes.operator.volume_plan import WrongSpec

AGAIN_SECONDS = 5.0
DRIVER = "csi.kvfuse"
PROVISIONER = "kvfuse.io/operator"
PROVISIONED_BY = "pv.kubernetes.io/provisioned-by"
WANTED_BY = ("volume.kubernetes.io/storage-provisioner", "volume.beta.kubernetes.io/storage-provisioner")
"""annotations by which the cluster says who is to make a claim's volume: since Kubernetes 1.23, and before"""
FOLDER = "claims"
ATTRIBUTES = "rings", "mode"


class ClaimHandlers:
    """Handlers of claims of our classes, and of PersistentVolumes that nobody claims any more."""

    def __init__(self, api: ClusterApi) -> None:
        self.api = api

    def register(self, registry: kopf.OperatorRegistry) -> None:
        for on in (kopf.on.create, kopf.on.update, kopf.on.resume):
            on("", "v1", "persistentvolumeclaims", registry=registry, when=_is_ours)(self.provide)
        for on in (kopf.on.create, kopf.on.resume):
            on("", "v1", "persistentvolumes", registry=registry, when=_is_left)(self.reclaim)

    async def provide(self, body: kopf.Body, **_: Any) -> None:
        """Make a claim's volume, or give it more."""
        claim = dict(body)
        found = await self.api.get("StorageClass", claim["spec"]["storageClassName"])
        if found is None or "volume" not in found.get("parameters", {}):
            raise kopf.PermanentError(f"StorageClass {claim['spec']['storageClassName']} has no parameter 'volume'")
        try:
            made = make_volume(claim, found)
            wanted = wanted_namespace(made, found)
            places = await namespace_calls.places_of(self.api, wanted.volume)
            await namespace_calls.ensure(self.api, wanted, places)
        except WrongSpec as error:
            raise kopf.PermanentError(f"StorageClass {found['metadata']['name']}: {error}") from None
        except (NotServed, CommandFailed) as error:
            raise kopf.TemporaryError(str(error), delay=AGAIN_SECONDS) from None
        if await self.api.get("PersistentVolume", made["metadata"]["name"]) is None:
            await self.api.apply(made)
            return
        size = made["spec"]["capacity"]
        await self.api.patch("PersistentVolume", made["metadata"]["name"], {"spec": {"capacity": size}})
        if claim.get("status", {}).get("phase") == "Bound":
            meta, status = claim["metadata"], {"status": {"capacity": size}}
            await self.api.patch("PersistentVolumeClaim", meta["name"], status, meta["namespace"], "status")

    async def reclaim(self, body: kopf.Body, **_: Any) -> None:
        """Remove the namespace of a volume whose claim is gone, and the volume."""
        volume, _slash, path = str(body.spec["csi"]["volumeHandle"]).partition("/")
        try:
            await namespace_calls.remove(self.api, volume, path, await namespace_calls.places_of(self.api, volume))
        except (NotServed, CommandFailed) as error:
            raise kopf.TemporaryError(f"{path} is not removed: {error}", delay=AGAIN_SECONDS) from None
        await self.api.delete("PersistentVolume", str(body.metadata["name"]))


def _is_ours(annotations: Mapping[str, str], spec: Mapping[str, Any], meta: Mapping[str, Any], **_: Any) -> bool:
    is_leaving = meta.get("deletionTimestamp") is not None
    return not is_leaving and any(annotations.get(name) == PROVISIONER for name in WANTED_BY)


def _is_left(annotations: Mapping[str, str], spec: Mapping[str, Any], status: Mapping[str, Any], **_: Any) -> bool:
    is_ours = annotations.get(PROVISIONED_BY) == PROVISIONER and spec.get("csi", {}).get("driver") == DRIVER
    return is_ours and status.get("phase") == "Released" and spec["persistentVolumeReclaimPolicy"] == "Delete"


def make_volume(claim: Object, storage: Object) -> Object:
    """The PersistentVolume of a claim."""
    meta, spec, words = claim["metadata"], claim["spec"], storage["parameters"]
    if spec.get("volumeMode", "Filesystem") != "Filesystem":
        raise WrongSpec("a claim asks for a block device: kvfuse volumes are file systems")
    reference = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "namespace": meta["namespace"]}
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": f"pvc-{meta['uid']}", "annotations": {PROVISIONED_BY: PROVISIONER}},
        "spec": {
            "accessModes": spec["accessModes"],
            "capacity": {"storage": spec["resources"]["requests"]["storage"]},
            "persistentVolumeReclaimPolicy": storage.get("reclaimPolicy", "Delete"),
            "storageClassName": spec["storageClassName"],
            "mountOptions": storage.get("mountOptions", []),
            "claimRef": {**reference, "name": meta["name"], "uid": meta["uid"]},
            "csi": {
                "driver": DRIVER,
                "volumeHandle": f"{words['volume']}/{FOLDER}/{meta['uid']}",
                # Not the capacity: the plug-in would set it again after the claim got more.
                "volumeAttributes": {name: words[name] for name in ATTRIBUTES if name in words},
            },
        },
    }


def wanted_namespace(made: Object, storage: Object) -> WantedNamespace:
    """The namespace of a claim's PersistentVolume. WrongSpec."""
    said = {name: value for name, value in storage["parameters"].items() if name not in ("volume", *ATTRIBUTES)}
    if "capacity" in said or "token" in said or "token" in storage["parameters"]:
        raise WrongSpec("the claim says the capacity, and a class has no token")
    said.setdefault("kind", "files")
    settings = namespace_calls.check_settings({**said, "capacity": str(made["spec"]["capacity"]["storage"])})
    volume, _, path = made["spec"]["csi"]["volumeHandle"].partition("/")
    return WantedNamespace(volume, path, settings)
