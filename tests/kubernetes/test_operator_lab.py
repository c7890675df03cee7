"""Chart and operator on a real cluster of one node: from nothing to mounted, grown, rolled, claimed, and taken away."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
import trio
from helm_lab import CHART, release
from kube_lab import KubeLab, cluster, pod
from operator_lab import (
    WAIT,
    begin_load,
    capacity,
    check,
    condition,
    end_load,
    etcd_of,
    give_kubeconfig,
    has_images,
    kill_container,
    pod_name,
    restarts,
    values_of,
    volume,
    wait_for_condition,
    wait_long,
)

from kvfuse.mounttable import all_mounts
from kvfuse.options import config
from kvfuse.volume.check.volume_check import fsck

pytestmark = [pytest.mark.root, pytest.mark.needs("kubernetes"), pytest.mark.timeout(3000)]


@pytest.fixture(scope="module")
def lab() -> Iterator[KubeLab]:
    with cluster() as lab:
        give_kubeconfig(lab)
        yield lab


@pytest.fixture(scope="module")
def helm(lab: KubeLab) -> Iterator[Any]:
    """The chart, with its operator."""
    with release(lab.folder / "kubeconfig", values_of(lab)) as config:
        yield config


def test_a_volume_from_nothing_grown_and_rolled_under_load(lab: KubeLab, helm: Any) -> None:
    """A pod that knows of nothing sees no error, whatever happens to daemon and holder; stalls are printed."""
    growth = {"step": "256Mi", "maximum": "1Gi", "above": 0.7}
    spec = {"capacity": "256Mi", "growth": growth, "config": {"volume": {"segment_size": "64MiB"}}}
    lab.apply(volume("kv", **spec))
    wait_for_condition(lab, "kv", "Ready", "True")
    holder = pod_name(lab, "holder")
    begin_load(lab, "load")
    lab.apply(volume("kv", **spec | {"capacity": "512Mi"}))
    wait_long(lambda: capacity(lab, "kv") == 512 << 20, "more by the spec")
    lab.execute("load", "head -c 400000000 /dev/urandom > /state/volumes/kv/mnt/filler")
    wait_long(lambda: capacity(lab, "kv") == 768 << 20, "more as it fills")
    for container in ("serve-a", "serve-b"):
        kill_container(lab, "daemon", container)
        assert lab.execute("load", "ls /state/volumes/kv/mnt").split()
    for tag in ("next", "latest"):
        helm.upgrade(CHART, "kvfuse", values_of(lab, image={"tag": tag, "pullPolicy": "Never"}))
        wait_long(functools.partial(has_images, lab, f"kvfuse:{tag}"), f"daemons of {tag}")
    assert pod_name(lab, "holder") == holder, "the holder is not touched"
    assert restarts(lab, holder, "hold") == 0
    lab.kubectl("delete", "pod", holder, "--wait=true", "--timeout=60s")
    wait_for_condition(lab, "kv", "Ready", "True")
    end_load(lab, "load")


@pytest.mark.usefixtures("helm")
def test_a_claim_has_its_size_and_its_room_comes_back(lab: KubeLab) -> None:
    wait_for_condition(lab, "kv", "Ready", "True")
    claim: dict[str, Any] = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "data"}}
    claim["spec"] = {
        "accessModes": ["ReadWriteMany"],
        "storageClassName": "kvfuse",
        "resources": {"requests": {"storage": "64Mi"}},
    }
    lab.apply(claim)
    wait_long(lambda: lab.get("pvc", "data")["status"]["phase"] == "Bound", "the claim")
    lab.apply(pod("filler", WAIT, {"data": {"persistentVolumeClaim": {"claimName": "data"}}}))
    lab.wait_for_pod("filler")
    fill = "i=0; while dd if=/dev/zero of=/data/$i bs=4194304 count=1 2>/tmp/said; do i=$((i+1)); done; cat /tmp/said; "
    said = lab.execute("filler", fill + "rm /data/$i; echo $i")
    assert "quota exceeded" in said
    assert int(said.split()[-1]) == 16, "all of it, and nothing more"
    claim["spec"]["resources"]["requests"]["storage"] = "128Mi"
    lab.apply(claim)
    wait_long(lambda: lab.get("pvc", "data")["status"]["capacity"]["storage"] == "128Mi", "more")
    assert int(lab.execute("filler", fill + "rm /data/$i; echo $i").split()[-1]) == 32
    name = lab.get("pvc", "data")["spec"]["volumeName"]
    lab.delete("pod", "filler")
    lab.delete("pvc", "data")
    wait_long(lambda: name not in lab.kubectl("get", "pv"), "the volume to go")
    assert list((lab.kvfuse / "volumes" / "kv" / "mnt" / "claims").iterdir()) == []


@pytest.mark.usefixtures("helm")
def test_a_namespace_object(lab: KubeLab) -> None:
    wait_for_condition(lab, "kv", "Ready", "True")
    token = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "token"}, "stringData": {"token": "x" * 20}}
    spec = {"volume": "kv", "quota": "32Mi", "settings": {"kind": "blocks"}, "tokenSecret": {"name": "token"}}
    meta = {"name": "llama", "namespace": "default"}
    found = {"apiVersion": "kvfuse.io/v1alpha1", "kind": "KvfuseNamespace", "metadata": meta, "spec": spec}
    lab.apply(token, found)
    wait_for_condition(lab, "llama", "Ready", "True", "kvfusenamespace")
    folder = "/var/lib/kvfuse/volumes/kv/mnt/tenants/default/llama"
    show = ("exec", pod_name(lab, "daemon"), "-c", "serve-a", "--", "kvfuse", "namespace", "show", "--json", folder)
    said = json.loads(lab.kubectl(*show))
    settings = said.get("settings", said)
    assert (settings["kind"], settings["capacity"]) == ("blocks", 32 << 20)
    assert settings["token"] != "none"
    lab.apply({**found, "spec": {**spec, "settings": {"kind": "blocks", "evictoin": "lru"}}})
    wait_for_condition(lab, "llama", "Ready", "False", "kvfusenamespace")
    assert "evictoin" in condition(lab, "llama", "Ready", "kvfusenamespace")["message"]
    lab.delete("kvfusenamespace", "llama")
    assert not (lab.kvfuse / "volumes" / "kv" / "mnt" / "tenants" / "default" / "llama").exists()


@pytest.mark.usefixtures("helm")
def test_a_volume_of_many_hosts_beside_another(lab: KubeLab) -> None:
    """Names in etcd, bytes in a folder that nodes would share."""
    shared = lab.folder / "shared"
    shared.mkdir()
    etcd = {"endpoints": [etcd_of(lab)]}
    settings = {"volume": {"segment_size": "64MiB"}}
    lab.apply(
        volume("shared", capacity="256Mi", records={"etcd": etcd}, segments={"path": str(shared)}, config=settings)
    )
    wait_for_condition(lab, "shared", "Ready", "True")
    wait_for_condition(lab, "kv", "Ready", "True")
    file = lab.kvfuse / "volumes" / "shared" / "mnt" / "file"
    file.write_bytes(b"x" * 1_000_000)
    wait_long(lambda: capacity(lab, "shared") == 256 << 20, "its capacity")
    name = pod_name(lab, "daemon", "shared")
    assert list((lab.kvfuse / "volumes" / "shared").iterdir()) == [lab.kvfuse / "volumes" / "shared" / "mnt"]
    lab.kubectl("delete", "pod", name, "--wait=true", "--timeout=120s")
    assert file.read_bytes() == b"x" * 1_000_000
    source = lab.folder / "shared.conf"
    source.write_text(lab.get("configmap", "kvfuse-shared")["data"]["mount.conf"])
    lab.kubectl("delete", "kvfusevolume", "shared", "--wait=true", "--timeout=120s")
    report = trio.run(functools.partial(fsck, config.load(source).options, verify=True))
    assert report.clean, [problem.text for problem in report.problems][:10]


@pytest.mark.usefixtures("helm")
def test_a_labelled_pod_gets_a_volume(lab: KubeLab) -> None:
    wait_for_condition(lab, "kv", "Ready", "True")
    wait_long(lambda: "kvfuse.io" in lab.kubectl("get", "mutatingwebhookconfigurations"), "the webhook")
    made = pod("engine", WAIT, {})
    made["metadata"] |= {"labels": {"kvfuse.io/inject": "true"}, "annotations": {"kvfuse.io/volum": "kv"}}
    with pytest.raises(AssertionError, match=r"did you mean kvfuse\.io/volume"):
        lab.apply(made)
    made["metadata"]["annotations"] = {"kvfuse.io/volume": "kv", "kvfuse.io/capacity": "8Mi"}
    lab.apply(made)
    lab.wait_for_pod("engine")
    assert lab.execute("engine", "echo hello > /cache/file; ls -A /cache; echo $PYTHONHASHSEED").split() == [
        ".kvfuse",
        "file",
        "0",
    ]
    lab.delete("pod", "engine")


@pytest.mark.usefixtures("helm")
def test_a_node_is_drained_and_comes_back(lab: KubeLab) -> None:
    wait_for_condition(lab, "kv", "Ready", "True")
    state = {"hostPath": {"path": str(lab.kvfuse)}, "how": {"mountPropagation": "HostToContainer"}}
    lab.apply(pod("user", WAIT, {"state": state}))
    lab.wait_for_pod("user")
    lab.kubectl("annotate", "node", "localhost", "kvfuse.io/drain=true")
    wait_long(lambda: "default/user" in condition(lab, "kv", "Draining")["message"], "who uses it")
    lab.delete("pod", "user")
    wait_long(lambda: "is drained" in condition(lab, "kv", "Draining")["message"], "the drain")
    point = lab.kvfuse / "volumes" / "kv" / "mnt"
    assert not any(row.point == point for row in all_mounts())
    check(lab, "kv")
    lab.kubectl("annotate", "node", "localhost", "kvfuse.io/drain-")
    wait_long(lambda: any(row.point == point for row in all_mounts()), "the mount")
    wait_for_condition(lab, "kv", "Ready", "True")


@pytest.mark.usefixtures("helm")
def test_a_wrong_spec_is_said_and_a_volume_ends_clean(lab: KubeLab) -> None:
    lab.apply(volume("wrong", config={"mount": {"reders": 2}}))
    wait_for_condition(lab, "wrong", "Ready", "False")
    assert "reders" in condition(lab, "wrong", "Ready")["message"]
    lab.delete("kvfusevolume", "wrong")
    began = time.monotonic()
    lab.kubectl("delete", "kvfusevolume", "kv", "--wait=true", "--timeout=120s")
    print(f"ended after {time.monotonic() - began:.1f} s")
    point = lab.kvfuse / "volumes" / "kv" / "mnt"
    assert not any(row.point == point for row in all_mounts())
    check(lab, "kv")
