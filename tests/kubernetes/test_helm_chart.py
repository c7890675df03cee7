"""The chart deploy/helm/kvfuse: what Helm makes of it, and which values it refuses."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from helm_lab import CHART, FULL, crds, helm, render, write_templates

from kvfuse.options import config
from kvfuse.options.options import Options
from kvfuse_kubernetes.operator.volume_objects import Templates, make_objects
from kvfuse_kubernetes.operator.volume_plan import read_volume

VERSIONS = "1.25", "1.37"
"""the oldest and the newest cluster that the package has schemas of; 1.20 is that of test_operator_lab"""
needs_helm = pytest.mark.needs("kubernetes")


def keys_of(section: Any) -> set[str]:
    """Keys of a section of mount.conf, of all its engines."""
    found: set[str] = set()
    for kind in getattr(section, "__args__", None) or (section,):
        found |= {row.encode_name for row in msgspec.structs.fields(kind)}
        found |= {tag} if (tag := kind.__struct_config__.tag_field) else set()
    return found


def test_the_schema_knows_every_key_of_mount_conf() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    sections = schema["definitions"]["mountConf"]["properties"]
    found = {name: set(section["properties"]) for name, section in sections.items()}
    assert found == {row.encode_name: keys_of(row.type) for row in msgspec.structs.fields(Options)}


def test_the_schema_has_the_values_and_no_others() -> None:
    def names(schema: dict[str, Any], values: dict[str, Any], path: str) -> list[str]:
        properties = schema.get("properties")
        if properties is None:
            return []
        found = [f"{path}{name}" for name in set(values) ^ set(properties) if f"{path}{name}" != "global"]
        for name in set(values) & set(properties):
            if isinstance(values[name], dict):
                found += names(properties[name], values[name], f"{path}{name}.")
        return found

    schema = json.loads((CHART / "values.schema.json").read_text())
    assert names(schema, yaml.safe_load((CHART / "values.yaml").read_text()), "") == []


def test_the_chart_has_the_dashboard_of_the_package() -> None:
    assert (CHART / "files" / "grafana.json").resolve() == Path(config.__file__).parents[1] / "data" / "grafana.json"


@needs_helm
def test_lint_finds_nothing() -> None:
    found = helm().lint(CHART, FULL, strict=True)
    assert [row for row in found["messages"] if row["severity"] > 1] + found["errors"] == []


@needs_helm
@pytest.mark.parametrize("values", [{}, FULL], ids=["default", "full"])
@pytest.mark.parametrize("version", VERSIONS)
def test_objects_are_those_of_the_cluster(values: dict[str, Any], version: str) -> None:
    """Prometheus' operator has no schemas here: its objects are looked at in the next test."""
    validate = pytest.importorskip("kubernetes_validate", reason="type: pip install './kubernetes[chart]'").validate
    for found in [*render(values), *crds()]:
        if "coreos" not in found["apiVersion"]:
            validate(found, version, strict=True)


@needs_helm
def test_objects_of_prometheus_and_grafana() -> None:
    objects = {row["kind"]: row for row in render(FULL) if row["kind"] in ("PodMonitor", "PrometheusRule")}
    (endpoint,) = objects["PodMonitor"]["spec"]["podMetricsEndpoints"]
    assert endpoint["path"] == "/metrics"
    rules = yaml.safe_load((CHART.parents[1] / "alerts" / "kvfuse.rules.yml").read_text())
    assert objects["PrometheusRule"]["spec"] == rules
    dashboards = [row for row in render(FULL) if "dashboards" in row["metadata"]["name"]]
    assert json.loads(dashboards[0]["data"]["kvfuse.json"])["title"]


@needs_helm
def test_mount_conf_is_what_kvfuse_reads() -> None:
    texts = {
        row["metadata"]["name"]: row["data"]["mount.conf"]
        for row in render(FULL)
        if row["kind"] == "ConfigMap" and "mount.conf" in row["data"]
    }
    assert set(texts) == {"kvfuse-kv", "kvfuse-shared", "kvfuse-rack"}
    loaded = {name: config.load(Path("/etc/kvfuse/mount.conf"), text=text).options for name, text in texts.items()}
    one = loaded["kvfuse-kv"]
    assert (one.volume.exact_sizes, one.mount.readers, one.mount.read_ahead) == ((2 << 20,), 2, 2 << 20)
    assert str(one.volume.path) == "/var/lib/kvfuse/volumes/kv/volume"
    assert one.metrics.listen is not None
    assert loaded["kvfuse-shared"].volume.name == "shared"


@needs_helm
@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("kubletDir", "/x", "kubletDir"),
        ("daemon.standbye", True, "standbye"),
        ("volumes.kv.config.volume.capactiy", "1GiB", "capactiy"),
        ("volumes.kv.config.cashe", {}, "cashe"),
        ("volumes.KV", {}, "KV"),
        ("volumes.kv.mountConf", "[volume]", "config or mountConf, not both"),
        ("storageClasses.kvfuse", {}, "volume"),
    ],
)
def test_unknown_values_are_refused(path: str, value: object, said: str) -> None:
    values = copy.deepcopy(FULL)
    *parents, name = path.split(".")
    place = values
    for parent in parents:
        place = place.setdefault(parent, {})
    place[name] = value
    with pytest.raises(helm().HelmError, match=said):
        render(values)


@needs_helm
def test_secrets_are_files_of_the_daemon_alone() -> None:
    objects = {row["metadata"]["name"]: row for row in render(FULL) if row["kind"] == "DaemonSet"}
    of_daemon = objects["kvfuse-shared-daemon"]["spec"]["template"]["spec"]
    secrets = {row["secret"]["secretName"]: row["secret"] for row in of_daemon["volumes"] if "secret" in row}
    assert set(secrets) == {"etcd", "ceph-key"}
    assert all(row["defaultMode"] == 0o400 for row in secrets.values())
    holder = objects["kvfuse-shared-holder"]["spec"]["template"]["spec"]
    assert [row for row in holder["volumes"] if "secret" in row] == []


@needs_helm
def test_rights_are_the_holders_and_no_others() -> None:
    objects = {row["metadata"]["name"]: row for row in render(FULL) if row["kind"] == "DaemonSet"}

    def contexts(name: str) -> list[dict[str, Any]]:
        return [row["securityContext"] for row in objects[name]["spec"]["template"]["spec"]["containers"]]

    assert [row["privileged"] for row in contexts("kvfuse-kv-holder")] == [True]
    assert len(contexts("kvfuse-kv-daemon")) == 2, "one stands by"
    for row in contexts("kvfuse-kv-daemon"):
        assert row["capabilities"]["drop"] == ["ALL"]
        assert not {"SYS_ADMIN", "NET_ADMIN"} & {*row["capabilities"]["add"]}
    assert all(row.get("privileged") for row in contexts("kvfuse-rack-daemon")), "it opens devices"
    assert objects["kvfuse-kv-holder"]["spec"]["updateStrategy"] == {"type": "OnDelete"}


@needs_helm
def test_the_operator_makes_what_the_chart_makes(tmp_path: Path) -> None:
    """One volume, by values and by a KvfuseVolume: the same pods."""
    etcd = {"endpoints": ["http://10.0.0.1:2379"]}
    settings = {
        "records": {"engine": "etcd", **etcd},
        "segments": {"engine": "file", "path": "/mnt/shared"},
        "volume": {"capacity": "1GiB"},
    }
    values = copy.deepcopy(FULL) | {
        "volumes": {"kv": {"config": settings, "hostPaths": ["/mnt/shared"], "metricsPort": 9567}}
    }
    by_chart = {row["metadata"]["name"]: row for row in render(values)}
    spec = {"records": {"etcd": etcd}, "segments": {"path": "/mnt/shared"}, "capacity": "1Gi", "metricsPort": 9567}
    owner = {"apiVersion": "kvfuse.io/v1alpha1", "kind": "KvfuseVolume", "metadata": {"name": "kv", "uid": "1"}}
    templates = Templates(write_templates(tmp_path, values))
    for made in make_objects(read_volume("kv", spec), templates, owner, "kube-system"):
        other = by_chart[made["metadata"]["name"]]
        if made["kind"] == "ConfigMap":
            path = Path("/etc/kvfuse/mount.conf")
            texts = [row["data"]["mount.conf"] for row in (made, other)]
            one, two = (config.load(path, text=text).options for text in texts)
            assert one == two
            continue
        for row in (made, other):
            row["metadata"].pop("ownerReferences", None)
            row["spec"]["template"]["metadata"]["annotations"].pop("kvfuse.io/config", None)
        assert made == other


@needs_helm
def test_the_plugin_is_that_of_the_manifest() -> None:
    """deploy/kubernetes/csi-node.yaml is for clusters that have no Helm."""

    def pods(objects: list[dict[str, Any]]) -> tuple[Any, Any]:
        driver = next(row["spec"] for row in objects if row["kind"] == "CSIDriver")
        daemon = next(row for row in objects if row["kind"] == "DaemonSet" and row["metadata"]["name"].endswith("-csi"))
        spec = daemon["spec"]["template"]["spec"]
        (container,) = spec["containers"]
        volumes = {row["name"]: row["hostPath"] for row in spec["volumes"]}
        mounts = {(volumes[row["name"]]["path"], row["mountPropagation"]) for row in container["volumeMounts"]}
        return driver, (container["command"], container["securityContext"], container["env"], mounts)

    manifest = CHART.parents[1] / "kubernetes" / "csi-node.yaml"
    assert pods(render({})) == pods([row for row in yaml.safe_load_all(manifest.read_text()) if row])
