"""The objects of a volume: what the chart's templates say, with what the volume's plan adds. No I/O."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import yaml

from kvfuse_kubernetes.operator.cluster_api import Object
from kvfuse_kubernetes.operator.volume_plan import FILES, SECRETS, VolumePlan

PLACEHOLDER = "__VOLUME__"
"""stands in templates for a volume's name"""
CONFIG = "kvfuse.io/config"
"""annotation of a daemon's pod: fingerprint of what it read"""


class Templates:
    """The two DaemonSets, as the chart rendered them into a ConfigMap, which is the folder ``path``."""

    def __init__(self, path: Path) -> None:
        self._texts = {name: (path / f"{name}.yaml").read_text() for name in ("holder", "daemon")}

    def fill(self, name: str, volume: str) -> Object:
        """The DaemonSet ``name`` of a volume."""
        found = yaml.safe_load(self._texts[name].replace(PLACEHOLDER, volume))
        assert isinstance(found, dict)
        return found


def make_objects(plan: VolumePlan, templates: Templates, owner: Object, namespace: str) -> list[Object]:
    """ConfigMap, holder and daemon of a volume; they end with ``owner``, its KvfuseVolume."""
    holder, daemon = (copy.deepcopy(templates.fill(name, plan.name)) for name in ("holder", "daemon"))
    _add_needs(daemon, plan)
    volumes = holder["spec"]["template"]["spec"]["volumes"]
    name = next(row["configMap"]["name"] for row in volumes if row["name"] == "config")
    settings = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "labels": holder["metadata"]["labels"]},
    }
    settings["data"] = {"mount.conf": plan.mount_conf}
    made = [settings, holder, daemon]
    for found in made:
        found["metadata"]["namespace"] = namespace
        found["metadata"]["ownerReferences"] = [reference_to(owner)]
        if plan.node_selector is not None and found is not settings:
            found["spec"]["template"]["spec"]["nodeSelector"] = dict(plan.node_selector)
    return made


def reference_to(owner: Object) -> Object:
    meta = owner["metadata"]
    found = {"apiVersion": owner["apiVersion"], "kind": owner["kind"], "name": meta["name"], "uid": meta["uid"]}
    return found | {"controller": True, "blockOwnerDeletion": False}


def rook_secret(plan: VolumePlan, monitors: str, key: str, owner: Object, namespace: str) -> Object:
    """The Secret with Ceph's configuration and a user's key. ``monitors``: as Rook says, "a=10.0.0.1:6789,..."."""
    assert plan.rook is not None
    hosts = ",".join(row.partition("=")[2] for row in monitors.split(",") if "=" in row)
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": f"{plan.name}-rook",
            "namespace": namespace,
            "ownerReferences": [reference_to(owner)],
        },
        "stringData": {
            "ceph.conf": f"[global]\nmon_host = {hosts}\n",
            "keyring": f"[client.{plan.rook.client}]\n\tkey = {key}\n",
        },
    }


def has_surge(daemon: Object) -> bool:
    """The cluster starts a pod's successor before the pod ends."""
    return "maxSurge" in daemon["spec"]["updateStrategy"].get("rollingUpdate", {})


def _add_needs(daemon: Object, plan: VolumePlan) -> None:
    """What the plan's engines need, in the daemon's containers."""
    template = daemon["spec"]["template"]
    notes = template["metadata"].setdefault("annotations", {})
    notes[CONFIG] = plan.fingerprint
    if plan.metrics_port:
        notes["kvfuse.io/metrics-port"] = str(plan.metrics_port)
    volumes, mounts = _needed_volumes(plan)
    template["spec"]["volumes"] += volumes
    for container in template["spec"]["containers"]:
        container["volumeMounts"] += mounts
        if plan.has_devices:
            container["securityContext"] = {"privileged": True}
    if not has_surge(daemon):
        daemon["spec"]["updateStrategy"] = {"type": "OnDelete"}  # `daemon_rolls` goes from container to container


def _needed_volumes(plan: VolumePlan) -> tuple[list[Object], list[Object]]:
    volumes: list[Any] = []
    mounts: list[Any] = []
    for name in dict.fromkeys(plan.secrets):
        volumes.append({"name": f"secret-{name}", "secret": {"secretName": name, "defaultMode": 0o400}})
        mounts.append({"name": f"secret-{name}", "mountPath": f"{SECRETS}/{name}", "readOnly": True})
    for name in plan.config_maps:
        volumes.append({"name": f"files-{name}", "configMap": {"name": name}})
        mounts.append({"name": f"files-{name}", "mountPath": f"{FILES}/{name}", "readOnly": True})
    for number, path in enumerate(plan.host_paths):
        volumes.append({"name": f"host-{number}", "hostPath": {"path": path, "type": "Directory"}})
        mounts.append({"name": f"host-{number}", "mountPath": path, "mountPropagation": "HostToContainer"})
    if plan.has_devices:
        volumes.append({"name": "dev", "hostPath": {"path": "/dev", "type": "Directory"}})
        mounts.append({"name": "dev", "mountPath": "/dev"})
    return volumes, mounts
