"""Gives pods what an engine with kvfuse needs: a volume, shared memory, a token, and variables. For pods with the label
kvfuse.io/inject: "true"; their annotations say what, see `ANNOTATIONS`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import kopf

from kvfuse_kubernetes.csi.volume_words import WrongRequest, read_quantity
from kvfuse_kubernetes.operator.cluster_api import Object
from kvfuse_kubernetes.operator.volume_plan import WrongSpec

PREFIX = "kvfuse.io/"
ANNOTATIONS = "volume", "capacity", "kind", "claim", "path", "shm-size", "token-secret"
"""``volume``: the pod gets a namespace of its own in it, of ``kind`` and with ``capacity``; or ``claim``: a claim of
the pod's namespace. ``path``: where containers see it. ``shm-size``: bytes of /dev/shm. ``token-secret``: a Secret
with key "token", for ring clients"""
LABEL = f"{PREFIX}inject"
DEFAULT_PATH = "/cache"
TOKEN_FOLDER = "/etc/kvfuse-token"
VARIABLES = {"PYTHONHASHSEED": "0"}
"""what containers get that say nothing else: engines name blocks by hashes, which are to be the same everywhere"""


def register(registry: kopf.OperatorRegistry) -> None:
    """Have the cluster ask about labelled pods that are made."""
    kopf.on.mutate(
        "", "v1", "pods", id="pods", registry=registry, labels={LABEL: "true"}, operation="CREATE", side_effects=False
    )(_mutate)


async def _mutate(body: kopf.Body, patch: kopf.Patch, **_: Any) -> None:
    try:
        changed = inject(dict(body))
    except WrongSpec as error:
        raise kopf.AdmissionError(str(error), code=400) from None
    for name, value in changed.items():
        patch.spec[name] = value


def inject(pod: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of the spec that the pod is to have. WrongSpec."""
    notes = read_annotations(pod["metadata"].get("annotations") or {})
    spec = pod["spec"]
    volumes: list[Object] = []
    mounts: list[Object] = []
    variables = dict(VARIABLES)
    if "volume" in notes or "claim" in notes:
        volumes.append({"name": "kvfuse", **_volume(notes)})
        mounts.append({"name": "kvfuse", "mountPath": notes.get("path", DEFAULT_PATH)})
    if "shm-size" in notes:
        volumes.append({"name": "kvfuse-shm", "emptyDir": {"medium": "Memory", "sizeLimit": notes["shm-size"]}})
        mounts.append({"name": "kvfuse-shm", "mountPath": "/dev/shm"})
    if "token-secret" in notes:
        volumes.append({"name": "kvfuse-token", "secret": {"secretName": notes["token-secret"], "defaultMode": 0o440}})
        mounts.append({"name": "kvfuse-token", "mountPath": TOKEN_FOLDER, "readOnly": True})
        variables["KVFUSE_TOKEN_FILE"] = f"{TOKEN_FOLDER}/token"
    present = {row["name"] for row in spec.get("volumes") or []}
    containers = [_with(container, mounts, variables) for container in spec["containers"]]
    more = [row for row in volumes if row["name"] not in present]
    return {"containers": containers, "volumes": [*(spec.get("volumes") or []), *more]}


def read_annotations(found: Mapping[str, str]) -> dict[str, str]:
    """Ours, without their prefix. WrongSpec."""
    notes = {name.removeprefix(PREFIX): text for name, text in found.items() if name.startswith(PREFIX)}
    for name in notes:
        if name not in ANNOTATIONS:
            near = difflib.get_close_matches(name, ANNOTATIONS, 1)
            hint = f"did you mean {PREFIX}{near[0]}?" if near else f"there are: {', '.join(ANNOTATIONS)}"
            raise WrongSpec(f"annotation {PREFIX}{name} is unknown; {hint}")
    if "volume" in notes and "claim" in notes:
        raise WrongSpec(f"annotations {PREFIX}volume and {PREFIX}claim: say one of them")
    if not notes.get("path", DEFAULT_PATH).startswith("/"):
        raise WrongSpec(f"annotation {PREFIX}path = {notes['path']!r}: a whole path is wanted")
    for name in {"capacity", "shm-size"} & notes.keys():
        try:
            read_quantity(notes[name])
        except WrongRequest as error:
            raise WrongSpec(f"annotation {PREFIX}{name}: {error}") from None
    return notes


def _volume(notes: Mapping[str, str]) -> Object:
    if "claim" in notes:
        return {"persistentVolumeClaim": {"claimName": notes["claim"]}}
    words = {name: notes[name] for name in ("volume", "capacity", "kind") if name in notes}
    return {"csi": {"driver": "csi.kvfuse", "volumeAttributes": {**words, "rings": "true"}}}


def _with(container: Object, mounts: list[Object], variables: Mapping[str, str]) -> Object:
    """A container with the mounts and variables that it has not itself."""
    taken = {row["mountPath"] for row in container.get("volumeMounts") or []}
    said = {row["name"] for row in container.get("env") or []}
    return {
        **container,
        "volumeMounts": [
            *(container.get("volumeMounts") or []),
            *(row for row in mounts if row["mountPath"] not in taken),
        ],
        "env": [
            *(container.get("env") or []),
            *({"name": name, "value": value} for name, value in variables.items() if name not in said),
        ],
    }
