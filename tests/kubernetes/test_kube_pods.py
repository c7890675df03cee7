"""Pods of a real cluster with kvfuse volumes: by the CSI node plug-in, and by a mount that another pod made."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from kube_lab import NODE, KubeLab, claim, cluster, pod
from mounting import KvfuseMount, wait_until
from places import ROOT

from kvfuse.mounttable import all_mounts

pytestmark = [pytest.mark.root, pytest.mark.needs("kubernetes"), pytest.mark.timeout(1800)]
PLUGIN = ROOT / "deploy" / "kubernetes" / "csi-node.yaml"
WAIT = "trap 'exit 0' TERM; sleep 100000 & wait"
UNAWARE = r"""
import fcntl, hashlib, os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
held = open("/own/held", "w+b", buffering=0)
fcntl.flock(held, fcntl.LOCK_EX)
slowest = begin = round = 0
print("begun", flush=True)
while not os.path.exists("/own/end"):
    begin, round = time.monotonic(), round + 1
    data = os.urandom(100_000)
    for folder in "/own", "/llama":
        with open(f"{folder}/new", "wb") as file:
            file.write(data)
        os.rename(f"{folder}/new", f"{folder}/file")
        with open(f"{folder}/file", "rb") as file:
            assert hashlib.sha256(file.read()).digest() == hashlib.sha256(data).digest()
    held.seek(0)
    held.write(b"%d" % round)
    held.seek(0)
    assert int(held.read()) == round
    slowest = max(slowest, time.monotonic() - begin)
    time.sleep(0.01)
print(f"ended {round} {slowest:.3f}", flush=True)
time.sleep(100000)
"""
"""a program that knows nothing of kvfuse: any error ends it"""


RINGS = r"""
import os
from kvfuse.usrbio.client.block_store import BlockStore
block = os.urandom(1 << 20)
with BlockStore("/own", "model") as store:
    for number in range(20):
        store.put(b"%d" % number, block)
    assert all(bytes(store.get(b"%d" % number)) == block for number in range(20))
    print(store.longest_prefix([b"1", b"2", b"absent"]))
"""
NO_RIGHTS = {"runAsUser": 1000, "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


@pytest.fixture(scope="module")
def lab() -> Iterator[KubeLab]:
    with cluster() as lab:
        yield lab


@pytest.fixture(scope="module")
def mount(lab: KubeLab) -> Iterator[KvfuseMount]:
    """The volume kv of the node, of 2 GiB; at the end it must be clean."""
    base = lab.kvfuse / "volumes" / "kv"
    base.mkdir(parents=True)
    mount = KvfuseMount(base, ["allow_other", "capacity=2GiB"])
    try:
        mount.mount()
        yield mount
        # The kubelet takes the last volumes away.
        lab.kubectl("delete", "pods", "--all", "--wait=true", "--timeout=60s")
        mount.check_unexpected_errors()
        mount.unmount()
        mount.fsck()
    finally:
        mount.remove()


@pytest.fixture(scope="module")
def plugin(lab: KubeLab, mount: KvfuseMount) -> Iterator[None]:
    """The plug-in, known to the kubelet."""
    lab.apply(lab.manifest(PLUGIN))
    wait_until(lambda: is_known(lab), "the plug-in")
    yield
    lab.kubectl("delete", "pods", "--all", "--wait=true", "--timeout=60s")


def is_known(lab: KubeLab) -> bool:
    drivers = lab.get("csinode", NODE)["spec"].get("drivers") or []
    return [row["name"] for row in drivers] == ["csi.kvfuse"]


def plugin_pod(lab: KubeLab) -> str:
    """The name of its pod, once it runs."""
    found: list[str] = []

    def runs() -> bool:
        pods = json.loads(lab.kubectl("-n", "kube-system", "get", "pods", "-l", "app=kvfuse-csi", "-o", "json"))
        found[:] = [
            row["metadata"]["name"]
            for row in pods["items"]
            if "deletionTimestamp" not in row["metadata"] and row["status"]["phase"] == "Running"
        ]
        return len(found) == 1

    wait_until(runs, "the pod of the plug-in")
    return found[0]


def room_of(lab: KubeLab, claimed: str) -> tuple[int, int] | None:
    """Capacity and free bytes of a claim, as the kubelet shows them."""
    stats = json.loads(lab.kubectl("get", "--raw", f"/api/v1/nodes/{NODE}/proxy/stats/summary"))
    for row in (row for found in stats["pods"] for row in found.get("volume", [])):
        if row.get("pvcRef", {}).get("name") == claimed:
            return row["capacityBytes"], row["availableBytes"]
    return None


def published(lab: KubeLab) -> list[Path]:
    return [
        row.point for row in all_mounts() if lab.kubelet in row.point.parents and "kubernetes.io~csi" in str(row.point)
    ]


def own_volume(**attributes: str) -> dict[str, object]:
    return {"csi": {"driver": "csi.kvfuse", "volumeAttributes": {"volume": "kv", **attributes}}}


@pytest.mark.usefixtures("plugin")
def test_pods_have_volumes_of_their_own_and_claimed_ones(lab: KubeLab, mount: KvfuseMount) -> None:
    lab.apply(*claim("llama", "kv/llama", "1Gi"))
    shared = {"persistentVolumeClaim": {"claimName": "llama"}}
    lab.apply(pod("one", WAIT, {"own": own_volume(capacity="64Mi"), "llama": dict(shared)}))
    lab.apply(pod("two", WAIT, {"own": own_volume(), "llama": dict(shared)}, securityContext={"runAsUser": 1000}))
    for name in ("one", "two"):
        lab.wait_for_pod(name)
        lab.execute(name, f"echo {name} > /own/{name}; echo {name} > /llama/{name}")
    assert [lab.execute(name, "ls /own").split() for name in ("one", "two")] == [["one"], ["two"]]
    assert lab.execute("two", "cat /llama/one").strip() == "one"
    assert (mount.point / "llama" / "two").read_text() == "two\n"
    assert len(list((mount.point / "ephemeral").iterdir())) == 2
    lab.delete("pod", "one")
    assert len(list((mount.point / "ephemeral").iterdir())) == 1, "its own volume has gone with it"
    assert lab.execute("two", "cat /llama/one").strip() == "one"
    lab.delete("pod", "two")
    assert published(lab) == []


@pytest.mark.usefixtures("plugin")
def test_a_claim_of_a_gibibyte_holds_that_and_not_a_slot_more(lab: KubeLab, mount: KvfuseMount) -> None:
    lab.apply(*claim("full", "kv/full", "1Gi"))
    lab.apply(pod("filler", WAIT, {"full": {"persistentVolumeClaim": {"claimName": "full"}}}))
    lab.wait_for_pod("filler")
    size = 4 << 20
    said = lab.execute(
        "filler",
        f"i=0; while dd if=/dev/zero of=/full/$i bs={size} count=1 2>/tmp/said; do i=$((i+1)); done; cat /tmp/said; "
        "rm /full/$i; echo $i",
    )
    assert "quota exceeded" in said
    assert int(said.split()[-1]) == (1 << 30) // size, "all of it, and nothing more"
    wait_until(lambda: room_of(lab, "full") == (1 << 30, 0), "the kubelet's figures")
    lab.delete("pod", "filler")
    subprocess.run(["rm", "-r", mount.point / "full"], check=True)
    lab.apply(*claim("after", "kv/after", "1Gi"))
    lab.apply(pod("after", WAIT, {"after": {"persistentVolumeClaim": {"claimName": "after"}}}))
    lab.wait_for_pod("after")
    lab.execute("after", "dd if=/dev/zero of=/after/file bs=1M count=1024 2>/dev/null; rm /after/file")


@pytest.mark.usefixtures("plugin")
def test_a_pod_goes_on_while_the_plugin_is_deleted_and_rolled(lab: KubeLab) -> None:
    """To another version and back; the pod's program would end with any error."""
    lab.apply(*claim("rolled", "kv/rolled", "256Mi"))
    claimed = {"persistentVolumeClaim": {"claimName": "rolled"}}
    volumes = {"own": own_volume(capacity="64Mi"), "llama": claimed}
    lab.apply(pod("unaware", 'exec python3 -c "$PROGRAM"', volumes, env=[{"name": "PROGRAM", "value": UNAWARE}]))
    lab.wait_for_pod("unaware")
    wait_until(lambda: "begun" in lab.kubectl("logs", "unaware"), "the program")
    first = plugin_pod(lab)
    lab.delete("pod", first, "-n", "kube-system")
    assert plugin_pod(lab) != first
    for tag, version in (("next", "+next"), ("latest", "")):
        lab.kubectl("-n", "kube-system", "set", "image", "daemonset/kvfuse-csi", f"csi=kvfuse:{tag}")
        lab.kubectl("-n", "kube-system", "rollout", "status", "daemonset/kvfuse-csi", "--timeout=60s")
        said = lab.kubectl("-n", "kube-system", "exec", plugin_pod(lab), "--", "kvfuse-csi", "--version").split()[-1]
        assert said.endswith(version)
        assert ("+" in said) == bool(version)
    wait_until(lambda: is_known(lab), "the plug-in")
    lab.apply(pod("later", WAIT, {"own": own_volume()}))
    lab.wait_for_pod("later")
    lab.execute("unaware", "touch /own/end")
    wait_until(lambda: "ended" in lab.kubectl("logs", "unaware"), "the end of the program")
    rounds, slowest = lab.kubectl("logs", "unaware").split()[-2:]
    print(f"{rounds} rounds, the slowest took {slowest} s")
    assert lab.get("pod", "unaware")["status"]["containerStatuses"][0]["restartCount"] == 0
    assert int(rounds) > 100
    lab.delete("pod", "unaware")
    lab.delete("pod", "later")


@pytest.mark.usefixtures("plugin")
def test_a_pod_without_rights_has_rings(lab: KubeLab, mount: KvfuseMount) -> None:
    """It may do nothing to the socket's folder."""
    own = own_volume(kind="blocks", rings="true")
    env = [{"name": "PROGRAM", "value": RINGS}]
    lab.apply(pod("ringed", WAIT, {"own": own}, env=env, securityContext=NO_RIGHTS))
    lab.wait_for_pod("ringed")
    assert lab.execute("ringed", 'python=/opt/kvfuse/bin/python; $python -c "$PROGRAM"').split() == ["2"]
    (folder,) = (mount.point / "ephemeral").iterdir()
    assert len(list((folder / "model").iterdir())) == 20
    said = lab.execute("ringed", "rm -f /own/.kvfuse/control.sock 2>&1 || rmdir /own/.kvfuse 2>&1 || echo refused")
    assert said.split()[-1] == "refused"
    lab.delete("pod", "ringed")
    assert list((mount.point / "ephemeral").iterdir()) == []


@pytest.mark.usefixtures("plugin")
def test_a_pod_waits_for_a_volume_that_is_not_mounted_yet(lab: KubeLab) -> None:
    """The kubelet tries again; events of the pod say what is missing."""
    base = lab.kvfuse / "volumes" / "late"
    base.mkdir(parents=True)
    mount = KvfuseMount(base, ["allow_other", "capacity=64MiB"])
    own = {"csi": {"driver": "csi.kvfuse", "volumeAttributes": {"volume": "late"}}}
    try:
        lab.apply(pod("early", WAIT, {"own": own}))
        wait_until(lambda: f"no kvfuse mount at {mount.point}" in lab.events("early"), "the event")
        mount.mount()
        lab.wait_for_pod("early")
        lab.execute("early", "echo hello > /own/file")
        lab.delete("pod", "early")
        mount.unmount()
        mount.fsck()
    finally:
        mount.remove()


def test_a_mount_made_in_a_pod_is_seen_by_the_node_and_other_pods(lab: KubeLab) -> None:
    """What holder and daemon in pods stand on: a FUSE mount propagates from a privileged container to others."""
    point = lab.kvfuse / "volumes" / "inner" / "mnt"
    point.mkdir(parents=True)
    inside = "/host/volumes/inner"
    host = {"hostPath": {"path": str(lab.kvfuse)}}
    lab.apply(
        pod(
            "mounter",
            f"exec kvfuse mount --foreground {inside}/volume {inside}/mnt -o allow_other,capacity=64MiB",
            {"host": {**host, "how": {"mountPropagation": "Bidirectional"}}},
            securityContext={"privileged": True},
        ),
        pod("seer", WAIT, {"host": {**host, "how": {"mountPropagation": "HostToContainer"}}}),
    )
    lab.wait_for_pod("mounter")
    lab.wait_for_pod("seer")
    wait_until(lambda: any(row.point == point for row in all_mounts()), "the mount on the node")
    lab.execute("seer", f"echo hello > {inside}/mnt/file")
    assert (point / "file").read_text() == "hello\n"
    lab.delete("pod", "mounter")
    wait_until(lambda: not any(row.point == point for row in all_mounts()), "its end")
    assert lab.execute("seer", f"ls -A {inside}/mnt") == ""
    lab.delete("pod", "seer")
