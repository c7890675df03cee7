"""What the operator decides by what it sees: growth, versions of daemons, conditions, claims. No cluster."""

from __future__ import annotations

import copy
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from kvfuse_kubernetes.operator import (
    claim_handlers,
    daemon_rolls,
    growing,
    lost_nodes,
    namespace_calls,
    pod_webhook,
    volume_state,
)
from kvfuse_kubernetes.operator.cluster_api import Object, Place
from kvfuse_kubernetes.operator.namespace_handlers import read_namespace
from kvfuse_kubernetes.operator.volume_objects import rook_secret
from kvfuse_kubernetes.operator.volume_plan import WrongSpec, read_volume
from kvfuse_kubernetes.operator.volume_state import Served, VolumeState

GIB = 1 << 30
NOW = datetime(2026, 1, 1, tzinfo=UTC)
PLACE = Place("kube-system", "daemon-1", "serve-a", "node-1")


def served(capacity: int, used: float) -> Served:
    stats = {"capacity": capacity, "space": {"size": capacity, "free": int(capacity * (1 - used))}}
    return Served(PLACE, stats)


@pytest.mark.parametrize(
    ("has", "used", "wanted"),
    [(GIB, 0.1, 2), (2 * GIB, 0.1, 2), (2 * GIB, 0.9, 3), (3 * GIB, 0.9, 3.5), (7 * GIB // 2, 0.99, 3.5)],
)
def test_a_volume_grows_to_its_spec_and_in_steps_to_its_maximum(has: int, used: float, wanted: float) -> None:
    growth = {"step": "1Gi", "maximum": "3584Mi", "above": 0.8}
    plan = read_volume("kv", {"capacity": "2Gi", "growth": growth})
    assert growing.wanted_capacity(plan, served(has, used)) == wanted * GIB


def test_a_volume_never_gets_less() -> None:
    plan = read_volume("kv", {"capacity": "1Gi"})
    assert growing.wanted_capacity(plan, served(2 * GIB, 0.1)) == 2 * GIB


def pod_of(*, images: dict[str, str], up_s: dict[str, float], config: str = "c") -> Object:
    states: list[Object] = [
        {"name": name, "state": {"running": {"startedAt": (NOW - timedelta(seconds=up_s[name])).isoformat()}}}
        if name in up_s
        else {"name": name, "state": {"waiting": {"reason": "CrashLoopBackOff"}}}
        for name in images
    ]
    return {
        "metadata": {"name": "daemon-1", "annotations": {"kvfuse.io/config": config}},
        "spec": {"containers": [{"name": name, "image": image} for name, image in images.items()]},
        "status": {"containerStatuses": states},
    }


def daemon_of(image: str) -> Object:
    containers = [{"name": name, "image": image} for name in ("serve-a", "serve-b")]
    template = {"metadata": {"annotations": {"kvfuse.io/config": "c"}}, "spec": {"containers": containers}}
    return {"spec": {"updateStrategy": {"type": "OnDelete"}, "template": template}}


def test_containers_get_a_version_one_after_the_other() -> None:
    daemon = daemon_of("kvfuse:2")
    pod = pod_of(images={"serve-a": "kvfuse:1", "serve-b": "kvfuse:1"}, up_s={"serve-a": 100, "serve-b": 100})
    first = daemon_rolls.next_image(pod, daemon, NOW)
    assert first == {"spec": {"containers": [{"name": "serve-b", "image": "kvfuse:2"}]}}
    pod = pod_of(images={"serve-a": "kvfuse:1", "serve-b": "kvfuse:2"}, up_s={"serve-a": 100, "serve-b": 1})
    assert daemon_rolls.next_image(pod, daemon, NOW) is None, "it does not stand by yet"
    pod = pod_of(images={"serve-a": "kvfuse:1", "serve-b": "kvfuse:2"}, up_s={"serve-a": 100})
    assert daemon_rolls.next_image(pod, daemon, NOW) is None, "it does not start: the other one goes on"
    pod = pod_of(images={"serve-a": "kvfuse:1", "serve-b": "kvfuse:2"}, up_s={"serve-a": 100, "serve-b": 10})
    then = daemon_rolls.next_image(pod, daemon, NOW)
    assert then == {"spec": {"containers": [{"name": "serve-a", "image": "kvfuse:2"}]}}
    pod = pod_of(images={"serve-a": "kvfuse:2", "serve-b": "kvfuse:2"}, up_s={"serve-a": 1, "serve-b": 10})
    assert daemon_rolls.next_image(pod, daemon, NOW) is None


def test_another_mount_conf_takes_another_pod() -> None:
    pod = pod_of(images={"serve-a": "k", "serve-b": "k"}, up_s={}, config="other")
    assert daemon_rolls.differs(pod, daemon_of("k"))
    assert not daemon_rolls.differs(pod_of(images={"serve-a": "k", "serve-b": "k"}, up_s={}), daemon_of("k"))


def test_a_condition_keeps_its_time_while_it_holds() -> None:
    one = volume_state.condition("Ready", True, "Mounted", "on 1 node")
    (former,) = volume_state.merge_conditions([], [one], 1)
    former = {**former, "lastTransitionTime": "2020-01-01T00:00:00Z"}
    (same,) = volume_state.merge_conditions([former], [{**one, "message": "on 2 nodes"}], 2)
    assert (same["lastTransitionTime"], same["message"], same["observedGeneration"]) == (
        former["lastTransitionTime"],
        "on 2 nodes",
        2,
    )
    (other,) = volume_state.merge_conditions([former], [{**one, "status": "False"}], 2)
    assert other["lastTransitionTime"] != former["lastTransitionTime"]


def test_conditions_say_who_is_missing_and_why() -> None:
    waiting = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}}
    pod: Object = {
        "metadata": {"name": "holder-1"},
        "spec": {},
        "status": {"containerStatuses": [{"name": "hold", "state": waiting}]},
    }
    state = VolumeState(holders={"node-1": pod}, wanted_nodes=2)
    found = volume_state.ready_condition(state)
    assert found["status"] == "False"
    assert "0 of 2 nodes; not yet on node-1: hold: CrashLoopBackOff: back-off" in found["message"]
    state = VolumeState(silent={"node-1": "takes longer than 10 s"})
    assert volume_state.degraded_condition(state)["message"] == "node-1: takes longer than 10 s"


CLAIM: Object = {
    "metadata": {"name": "data", "namespace": "team", "uid": "u-1"},
    "spec": {
        "accessModes": ["ReadWriteMany"],
        "resources": {"requests": {"storage": "1Gi"}},
        "storageClassName": "kvfuse",
    },
}
STORAGE: Object = {
    "metadata": {"name": "kvfuse"},
    "reclaimPolicy": "Delete",
    "parameters": {"volume": "kv", "kind": "blocks", "ttl": "60", "rings": "true"},
}


def node_of(status: str, since: str) -> Object:
    return {"status": {"conditions": [{"type": "Ready", "status": status, "lastTransitionTime": since}]}}


def test_a_silent_or_absent_node_is_lost_and_not_waited_for() -> None:
    ready: Object = {"status": {"conditions": [{"type": "Ready", "status": "True"}]}, "metadata": {}}
    nodes = {
        "well": node_of("True", "2025-12-31T23:00:00Z"),
        "sick": node_of("False", "2025-12-31T23:00:00Z"),  # its kubelet says so
        "late": node_of("Unknown", "2025-12-31T23:59:30Z"),
        "dead": node_of("Unknown", "2025-12-31T23:58:59Z"),
    }
    state = VolumeState(dict.fromkeys((*nodes, "gone"), ready), {}, wanted_nodes=4)
    stats = {"leases": {"host_count": 3, "departed_slab_count": 0}}
    state.served = [Served(Place("", "daemon", "serve-a", name), stats) for name in ("well", "sick")]
    lost = lost_nodes.find_lost(nodes, state, 60, NOW)
    assert [(node.name, node.since) for node in lost] == [("dead", "2025-12-31T23:58:59Z"), ("gone", None)]
    lost_nodes.forget(state, lost)
    assert (sorted(state.holders), state.wanted_nodes) == (["late", "sick", "well"], 3)
    assert volume_state.ready_condition(state)["status"] == "True"
    found = lost_nodes.lost_condition(state, lost, is_shared=True)
    assert (found["status"], found["reason"]) == ("True", "Adopted")
    assert lost_nodes.lost_condition(state, [], is_shared=True)["status"] == "False"


@pytest.mark.parametrize(
    ("alive", "slabs", "is_shared", "reason"),
    [(2, 0, True, "LeaseHeld"), (1, 7, True, "Adopting"), (1, 0, True, "Adopted"), (1, 0, False, "Lost")],
)
def test_what_became_of_a_lost_host(alive: int, slabs: int, is_shared: bool, reason: str) -> None:
    ready: Object = {"status": {"conditions": [{"type": "Ready", "status": "True"}]}}
    state = VolumeState({"well": ready}, {}, wanted_nodes=1)
    state.served = [Served(PLACE, {"leases": {"host_count": alive, "departed_slab_count": slabs}})]
    lost = [lost_nodes.LostNode("dead", None)]
    assert lost_nodes.lost_condition(state, lost, is_shared=is_shared)["reason"] == reason


def test_a_claim_becomes_a_namespace_with_its_size_as_quota() -> None:
    made = claim_handlers.make_volume(CLAIM, STORAGE)
    assert made["metadata"]["name"] == "pvc-u-1"
    assert made["spec"]["claimRef"]["uid"] == "u-1"
    csi = made["spec"]["csi"]
    assert csi["volumeHandle"] == "kv/claims/u-1"
    assert csi["volumeAttributes"] == {"rings": "true"}, "not the capacity, which would be set back"
    wanted = claim_handlers.wanted_namespace(made, STORAGE)
    assert (wanted.volume, wanted.path) == ("kv", "claims/u-1")
    assert wanted.settings == {"kind": "blocks", "ttl": "60", "capacity": "1GiB"}


def test_classes_and_claims_that_are_wrong_are_refused() -> None:
    storage = copy.deepcopy(STORAGE)
    storage["parameters"]["capactiy"] = "1Gi"
    with pytest.raises(WrongSpec, match="capactiy"):
        claim_handlers.wanted_namespace(claim_handlers.make_volume(CLAIM, storage), storage)
    claim = copy.deepcopy(CLAIM)
    claim["spec"]["volumeMode"] = "Block"
    with pytest.raises(WrongSpec, match="block device"):
        claim_handlers.make_volume(claim, STORAGE)


def test_a_namespace_object_is_a_folder_of_its_tenant() -> None:
    meta = {"namespace": "team", "name": "llama"}
    spec: dict[str, Any] = {
        "volume": "kv",
        "quota": "64Gi",
        "settings": {"kind": "blocks"},
        "descriptor": {"model": "a"},
    }
    wanted = read_namespace(meta, spec, b"secret")
    assert wanted.path == "tenants/team/llama"
    assert wanted.settings == {"kind": "blocks", "capacity": "64GiB", "descriptor": '{"model":"a"}'}
    for word in ("token", "capacity", "descriptor"):
        with pytest.raises(WrongSpec, match="say spec"):
            read_namespace(meta, {"volume": "kv", "settings": {word: "x"}}, b"")
    with pytest.raises(WrongSpec, match="evictoin"):
        namespace_calls.check_settings({"evictoin": "lru"})


def test_a_labelled_pod_gets_what_its_annotations_say() -> None:
    notes = {"kvfuse.io/volume": "kv", "kvfuse.io/shm-size": "16Gi", "kvfuse.io/token-secret": "t", "other": "x"}
    container = {"name": "engine", "env": [{"name": "PYTHONHASHSEED", "value": "7"}]}
    pod = {"metadata": {"annotations": notes}, "spec": {"containers": [container]}}
    found = pod_webhook.inject(pod)
    assert {row["name"] for row in found["volumes"]} == {"kvfuse", "kvfuse-shm", "kvfuse-token"}
    (made,) = found["containers"]
    assert {row["mountPath"] for row in made["volumeMounts"]} == {"/cache", "/dev/shm", "/etc/kvfuse-token"}
    variables = {row["name"]: row["value"] for row in made["env"]}
    assert variables == {"PYTHONHASHSEED": "7", "KVFUSE_TOKEN_FILE": "/etc/kvfuse-token/token"}
    assert pod_webhook.inject({**pod, "spec": found}) == found, "what is there stays"
    for wrong, said in ({"kvfuse.io/volum": "kv"}, "did you mean"), ({"kvfuse.io/shm-size": "big"}, "no size"):
        with pytest.raises(WrongSpec, match=said):
            pod_webhook.read_annotations(wrong)


def test_addresses_and_key_of_rook_become_files() -> None:
    etcd = {"etcd": {"endpoints": ["http://10.0.0.1:2379"]}}
    plan = read_volume("kv", {"records": etcd, "segments": {"rook": {"pool": "p", "client": "kv"}}})
    owner = {"apiVersion": "kvfuse.io/v1alpha1", "kind": "KvfuseVolume", "metadata": {"name": "kv", "uid": "1"}}
    made = rook_secret(plan, "a=10.0.0.1:6789,b=10.0.0.2:6789", "KEY==", owner, "kvfuse")
    assert "mon_host = 10.0.0.1:6789,10.0.0.2:6789" in made["stringData"]["ceph.conf"]
    assert made["stringData"]["keyring"] == "[client.kv]\n\tkey = KEY==\n"
