"""The chart deploy/helm/kvfuse, rendered and installed by Helm itself, which a package has as a library."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from places import ROOT

CHART = ROOT / "deploy" / "helm" / "kvfuse"
FULL: dict[str, Any] = {
    "image": {"repository": "registry/kvfuse", "tag": "1"},
    "imagePullSecrets": [{"name": "registry"}],
    "podLabels": {"team": "a"},
    "podAnnotations": {"note": "b"},
    "hostPID": True,
    "kubeletDir": "/var/lib/k0s/kubelet",
    "volumes": {
        "kv": {
            "config": {
                "volume": {"capacity": "64GiB", "exact_sizes": ["2MiB"]},
                "namespace": {"kind": "blocks"},
                "mount": {"readers": 2, "read_ahead": 2097152},
                "cache": {"tier_size": "2GiB"},
            },
            "metricsPort": 9567,
            "nodeSelector": {"gpu": "yes"},
        },
        "shared": {
            "config": {
                "records": {
                    "engine": "etcd",
                    "endpoints": ["https://etcd.db.svc:2379"],
                    "user": "kvfuse",
                    "password_file": "/etc/kvfuse/secrets/etcd/password",
                },
                "segments": {"engine": "rados", "pool": "kvfuse", "conf_file": "/etc/kvfuse/files/ceph/ceph.conf"},
            },
            "secrets": ["etcd", "ceph-key"],
            "configMaps": ["ceph"],
            "hostPaths": ["/mnt/shared"],
        },
        "rack": {"mountConf": '[volume]\npath = "/var/lib/kvfuse/volumes/rack/volume"\n', "devices": True},
    },
    "storageClasses": {"kvfuse": {"volume": "kv", "settings": {"kind": "blocks", "ttl": 3600}, "isDefault": True}},
    "operator": {"kubeconfigSecret": "kubeconfig", "webhook": {"enabled": True}},
    "monitoring": {"podMonitor": {"enabled": True}, "rules": {"enabled": True}, "dashboards": {"enabled": True}},
}
"""values that use every part of the chart"""


def helm() -> Any:
    """The package; the test is skipped where it is absent."""
    return pytest.importorskip("helm_python", reason="no Helm; type: pip install './kubernetes[chart]'")


def render(values: dict[str, Any], name: str = "kvfuse") -> list[dict[str, Any]]:
    """Objects of the chart, in the namespace kube-system."""
    with helm().Chart.load(CHART) as chart:
        texts = chart.render(values, name=name, namespace="kube-system")
    return [found for text in texts.values() for found in yaml.safe_load_all(text) if found]


def crds() -> list[dict[str, Any]]:
    return [yaml.safe_load(path.read_text()) for path in sorted((CHART / "crds").glob("*.yaml"))]


def write_templates(folder: Path, values: dict[str, Any]) -> Path:
    """The operator's templates, as files."""
    objects = render(values)
    found = next(row for row in objects if row["kind"] == "ConfigMap" and "holder.yaml" in row["data"])
    folder.mkdir(exist_ok=True)
    for name, text in found["data"].items():
        (folder / name).write_text(text)
    return folder


@contextlib.contextmanager
def release(kubeconfig: Path, values: dict[str, Any], namespace: str = "default") -> Iterator[Any]:
    """The chart installed as "kvfuse"; uninstalled at the end. What is given has `upgrade` with other values."""
    with helm().Config(kubeconfig_path=os.fspath(kubeconfig), namespace=namespace) as config:
        config.install(CHART, "kvfuse", values)
        try:
            yield config
        finally:
            config.uninstall("kvfuse")
