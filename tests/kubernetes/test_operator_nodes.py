"""Two nodes on one volume that they share: one is lost and comes back, is taken out of the cluster, and is drained."""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Iterator

import pytest
import trio
from helm_lab import release
from kube_lab import NODE, KubeLab, cluster
from operator_lab import (
    begin_load,
    condition,
    end_load,
    etcd_of,
    give_kubeconfig,
    phase,
    pod_name,
    program_pod,
    values_of,
    volume,
    wait_for_condition,
    wait_long,
)

from kvfuse.options import config
from kvfuse.volume.check.volume_check import fsck

pytestmark = [pytest.mark.root, pytest.mark.needs("kubernetes"), pytest.mark.timeout(3000)]
BLOCKS = "tenants/default/blocks"
DURABLE = """
import hashlib, os, signal, sys, time
from pathlib import Path
from kvfuse.usrbio.client import BlockStore

signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
does, point, folder, blocks = sys.argv[1], Path(sys.argv[2]), *sys.argv[3:]

def content(number):
    return hashlib.shake_128(b"%s %d" % (folder.encode(), number)).digest(1 << 20)

def sync(path):
    found = os.open(path, os.O_RDONLY)
    os.fsync(found)
    os.close(found)

def get(number):
    while (found := store.get(b"%s-%d" % (folder.encode(), number))) is None and time.monotonic() < began + PATIENCE_S:
        time.sleep(0.1)
    return found

PATIENCE_S = 30
store, began = BlockStore(point, blocks), time.monotonic()
if does == "write":
    (point / folder).mkdir(exist_ok=True)
    for number in range(24):
        (point / folder / f"{number}").write_bytes(content(number))
        sync(point / folder / f"{number}")
        store.put(b"%s-%d" % (folder.encode(), number), content(number))
    sync(point / folder)
    sync(point / blocks)
else:
    for number in range(24):
        assert (point / folder / f"{number}").read_bytes() == content(number), f"file {number}"
        found = get(number)
        assert found is not None, f"block {number} is missed for {PATIENCE_S} s"
        assert found == content(number), f"block {number}"
print(f"done after {time.monotonic() - began:.1f} s", flush=True)
signal.pause()
"""
"""writes files and blocks, and syncs them; or reads and compares them. A host that has just mounted may miss blocks,
until it has read the heads of all slabs"""


@pytest.fixture(scope="module")
def lab() -> Iterator[KubeLab]:
    """Two nodes, the chart with its operator on the first one, and the volume "shared" on both."""
    with cluster(nodes=2) as lab:
        give_kubeconfig(lab)
        values = values_of(lab)
        values["operator"] |= {"lostSeconds": 5, "nodeSelector": {"kubernetes.io/hostname": NODE}}
        with release(lab.folder / "kubeconfig", values):
            make_volume(lab)
            yield lab


def make_volume(lab: KubeLab) -> None:
    segments = lab.folder / "shared" / "segments"
    segments.mkdir(exist_ok=True)
    settings = {
        "volume": {"segment_size": "64MiB"},
        "cache": {"disk_path": "/var/lib/kvfuse/volumes/shared/disk", "disk_size": "64MiB"},
    }
    etcd = {"endpoints": [etcd_of(lab)]}
    lab.apply(
        volume("shared", capacity="512Mi", records={"etcd": etcd}, segments={"path": str(segments)}, config=settings)
    )
    meta = {"name": "blocks", "namespace": "default"}
    spec = {"volume": "shared", "quota": "256Mi", "settings": {"kind": "blocks"}}
    lab.apply({"apiVersion": "kvfuse.io/v1alpha1", "kind": "KvfuseNamespace", "metadata": meta, "spec": spec})
    wait_for_condition(lab, "blocks", "Ready", "True", "kvfusenamespace")
    wait_for_nodes(lab, "2/2")


def wait_for_nodes(lab: KubeLab, nodes: str) -> None:
    """Of the volume "shared"."""
    wait_long(lambda: status(lab)["nodes"] == nodes, f"the volume on {nodes} nodes")
    wait_for_condition(lab, "shared", "Ready", "True")


def status(lab: KubeLab) -> dict[str, object]:
    found = lab.get("kvfusevolume", "shared").get("status", {})
    return {"nodes": "", **found}


def play(lab: KubeLab, does: str, folder: str, node: int) -> None:
    """Write, or read, files and blocks in a pod of a node. It stays where it writes, with all that it has open."""
    name = f"{does}-{folder}-{node}"
    words = does, "/state/volumes/shared/mnt", folder, BLOCKS
    lab.apply(program_pod(lab, name, DURABLE, *words, node=lab.name_of(node)))
    wait_long(lambda: phase(lab, name) != "Pending", f"pod {name}")
    wait_long(lambda: "done" in lab.kubectl("logs", name) or phase(lab, name) == "Failed", f"{does} {folder}")
    said = lab.kubectl("logs", name)
    print(name, said)
    assert phase(lab, name) == "Running", said
    if does == "read":
        lab.delete("pod", name)


def free_size(lab: KubeLab) -> int:
    found = os.statvfs(lab.seen_by(1, lab.kvfuse / "volumes" / "shared" / "mnt"))
    return found.f_bavail * found.f_frsize


def check(lab: KubeLab) -> None:
    """fsck of the volume, which is mounted nowhere."""
    source = lab.folder / "shared.conf"
    report = trio.run(functools.partial(fsck, config.load(source).options, verify=True))
    assert report.clean, [problem.text for problem in report.problems][:10]


def test_what_was_durable_outlives_a_node(lab: KubeLab) -> None:
    """The other one reads it, has the room of what was not, and goes on; the node that comes back joins again."""
    play(lab, "write", "one", 2)
    play(lab, "read", "one", 1)
    free = free_size(lab)
    lab.kill_node(2)
    began = time.monotonic()
    play(lab, "read", "one", 1)
    wait_for_condition(lab, "shared", "NodesLost", "True")
    print(f"{condition(lab, 'shared', 'NodesLost')['message']} after {time.monotonic() - began:.1f} s")
    wait_long(lambda: "have adopted all" in condition(lab, "shared", "NodesLost")["message"], "the slabs")
    print(f"adopted after {time.monotonic() - began:.1f} s")
    assert status(lab)["hosts"] == {"alive": 1, "departedSlabs": 0}
    wait_for_nodes(lab, "1/1")
    play(lab, "read", "one", 1)
    filler = lab.seen_by(1, lab.kvfuse / "volumes" / "shared" / "mnt" / "filler")
    with filler.open("wb") as file:
        file.write(bytes(free - (64 << 20)))
        os.fsync(file.fileno())
    filler.unlink()
    wait_long(lambda: free_size(lab) >= free - (8 << 20), "the room again")
    lab.start_node(2)
    wait_for_nodes(lab, "2/2")
    wait_for_condition(lab, "shared", "NodesLost", "False")
    play(lab, "write", "two", 2)
    play(lab, "read", "two", 1)
    play(lab, "read", "one", 2)


def test_a_node_that_leaves_the_cluster(lab: KubeLab) -> None:
    """Killed, and its Node object deleted: nothing is left of it. Its machine may be a node again."""
    lab.kill_node(2)
    lab.kubectl("delete", "node", lab.name_of(2))
    wait_for_nodes(lab, "1/1")
    wait_long(lambda: status(lab)["hosts"] == {"alive": 1, "departedSlabs": 0}, "the slabs")
    wait_long(lambda: lab.name_of(2) not in lab.kubectl("get", "pods", "-o", "wide"), "its pods to go")
    wait_for_condition(lab, "shared", "NodesLost", "False")
    play(lab, "read", "two", 1)
    lab.start_node(2)
    wait_for_nodes(lab, "2/2")
    play(lab, "read", "two", 2)


def test_one_of_two_is_drained_under_load(lab: KubeLab) -> None:
    """The other one sees no error. Slabs are handed back before the host goes: nobody waits for a lease."""
    play(lab, "write", "three", 2)
    for name in lab.kubectl("get", "pods", "-o", "name", "--field-selector", f"spec.nodeName={lab.name_of(2)}").split():
        if "write-" in name:
            lab.delete("pod", name.removeprefix("pod/"))
    begin_load(lab, "load", "shared", node=NODE)
    lab.kubectl("annotate", "node", lab.name_of(2), "kvfuse.io/drain=true")
    began = time.monotonic()
    drained = f"{lab.name_of(2)} is drained"
    wait_long(lambda: drained in condition(lab, "shared", "Draining")["message"], "the drain")
    wait_long(lambda: status(lab)["hosts"] == {"alive": 1, "departedSlabs": 0}, "the host to leave")
    print(f"drained after {time.monotonic() - began:.1f} s")
    assert not (lab.seen_by(2, lab.kvfuse / "volumes" / "shared" / "mnt") / "load").exists()
    play(lab, "read", "three", 1)
    wait_long(lambda: status(lab)["nodes"] == "1/2", "the mount to be missed")
    lab.kubectl("annotate", "node", lab.name_of(2), "kvfuse.io/drain-")
    wait_for_nodes(lab, "2/2")
    play(lab, "read", "three", 2)
    end_load(lab, "load", "shared")


def test_a_daemon_ends_while_it_starts(lab: KubeLab) -> None:
    """A signal counts from its first moment: its pod does not wait for the end of its grace, which is 120 s."""
    former = pod_name(lab, "daemon", "shared", 2)
    lab.delete("pod", former)
    started = functools.partial(started_daemon, lab, former)
    wait_long(lambda: started() is not None, "the next one")
    lab.delete("pod", str(started()))
    wait_for_nodes(lab, "2/2")
    play(lab, "read", "three", 2)


def started_daemon(lab: KubeLab, former: str) -> str | None:
    """The pod that follows this one on node 2, once a container of it runs."""
    where = f"spec.nodeName={lab.name_of(2)}"
    labels = "app.kubernetes.io/component=daemon,kvfuse.io/volume=shared"
    found = json.loads(lab.kubectl("get", "pods", "-o", "json", "-l", labels, "--field-selector", where))
    for row in found["items"]:
        if row["metadata"]["name"] != former and any(
            "running" in state["state"] for state in row["status"].get("containerStatuses", [])
        ):
            return str(row["metadata"]["name"])
    return None


def test_a_volume_ends_while_a_node_is_lost(lab: KubeLab) -> None:
    """Its deletion does not wait for that node, which mounts nothing when it comes back."""
    (lab.folder / "shared.conf").write_text(lab.get("configmap", "kvfuse-shared")["data"]["mount.conf"])
    pod_name(lab, "holder", "shared", 2)
    lab.kill_node(2)
    wait_for_condition(lab, "shared", "NodesLost", "True")
    lab.kubectl("delete", "kvfusenamespace", "blocks", "--wait=true", "--timeout=120s")
    lab.kubectl("delete", "kvfusevolume", "shared", "--wait=true", "--timeout=120s")
    lab.start_node(2)
    wait_long(lambda: "kvfuse-shared" not in lab.kubectl("get", "pods"), "the pods to go")
    assert lab.kvfuse_mounts(2) == []
    check(lab)
