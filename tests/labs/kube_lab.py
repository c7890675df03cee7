"""A real cluster (scripts/kube-lab), kvfuse's image on it, and objects that end with the test."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from mounting import wait_until
from places import ROOT
from rings import require_lab

SCRIPT = ROOT / "scripts" / "kube-lab"
BUILD_IMAGE = ROOT / "deploy" / "image" / "build"
LAB_SECONDS = 900
"""for a build of the image or a start of the cluster; the first build takes minutes"""
CACHE = Path(os.environ.get("KUBE_CACHE", Path.home() / ".cache" / "kvfuse-kube"))
SOURCE = CACHE / "src" / "kubernetes"
NODE = "localhost"
"""the first node"""


def run(*command: object, seconds: float = LAB_SECONDS, given: str | None = None) -> str:
    """Standard output of a command that succeeds."""
    words = [str(word) for word in command]
    done = subprocess.run(words, input=given, capture_output=True, text=True, timeout=seconds, check=False)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout


class KubeLab:
    """A cluster; ``folder`` is shared with its pods by propagation."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kubelet, self.kvfuse = folder / "kubelet", folder / "kvfuse"

    def name_of(self, node: int) -> str:
        """As the cluster calls node 1, 2, ..."""
        return NODE if node == 1 else f"127.0.0.{node}"

    def seen_by(self, node: int, path: Path) -> Path:
        """A path as programs of that node see it, with its mounts: another one after the node was started anew."""
        return Path(f"/proc/{self._pid(node)}/root{path}")

    def kvfuse_mounts(self, node: int = 1) -> list[str]:
        """Lines of a node's mount table: mounts of kvfuse in the cluster's folder."""
        lines = Path(f"/proc/{self._pid(node)}/mountinfo").read_text().splitlines()
        return [line for line in lines if "fuse.kvfuse" in line and f" {self.folder}/" in line]

    def _pid(self, node: int) -> str:
        part = "" if node == 1 else f"node-{node}/"
        return (self.folder / f"{part}containerd.pid").read_text().strip()

    def kill_node(self, node: int) -> None:
        """End all its programs at once, as where it loses its power."""
        run(SCRIPT, "kill-node", self.folder, node)

    def start_node(self, node: int) -> None:
        run(SCRIPT, "start-node", self.folder, node)

    def kubectl(self, *words: object, given: str | None = None) -> str:
        return run(SCRIPT, "kubectl", self.folder, *words, given=given, seconds=120)

    def apply(self, *objects: dict[str, Any] | str) -> None:
        """Objects, or texts with several in YAML."""
        for found in objects:
            self.kubectl("apply", "-f", "-", given=found if isinstance(found, str) else json.dumps(found))

    def delete(self, kind: str, name: str, *words: str) -> None:
        """Until it is gone."""
        self.kubectl("delete", kind, name, "--wait=true", "--timeout=60s", *words)

    def get(self, kind: str, name: str, *words: str) -> dict[str, Any]:
        found = json.loads(self.kubectl("get", kind, name, "-o", "json", *words))
        assert isinstance(found, dict)
        return found

    def is_ready(self, pod: str) -> bool:
        statuses = self.get("pod", pod)["status"].get("containerStatuses", [])
        return bool(statuses) and all(row["ready"] for row in statuses)

    def wait_for_pod(self, pod: str) -> None:
        try:
            wait_until(lambda: self.is_ready(pod), f"pod {pod}")
        except AssertionError as error:
            raise AssertionError(self.kubectl("describe", "pod", pod)) from error

    def execute(self, pod: str, command: str) -> str:
        """Standard output of a shell's command in a pod."""
        return self.kubectl("exec", pod, "--", "sh", "-ec", command)

    def signal(self, pod: str, container: str, signal: str) -> None:
        """To the first process of a container, which the first node runs."""
        rows = self.get("pod", pod)["status"]["containerStatuses"]
        (found,) = (row["containerID"].removeprefix("containerd://") for row in rows if row["name"] == container)
        socket = self.folder / "containerd.sock"
        run("ctr", "--address", socket, "--namespace", "k8s.io", "task", "kill", "--signal", f"SIG{signal}", found)

    def programs(self, node: int = 1) -> list[str]:
        """Command lines of all that runs on a node, its pods too."""
        pids = run(SCRIPT, "processes", self.folder, node).split()
        found = (Path(f"/proc/{pid}/cmdline") for pid in pids)
        return [path.read_bytes().replace(b"\0", b" ").decode() for path in found if path.exists()]

    def events(self, name: str) -> str:
        return self.kubectl("get", "events", "--field-selector", f"involvedObject.name={name}")

    def manifest(self, path: Path) -> str:
        """A manifest of the repository, for this node's folders."""
        text = path.read_text().replace("/var/lib/kubelet", str(self.kubelet))
        return text.replace("/var/lib/kvfuse", str(self.kvfuse))


def pod(name: str, command: str, volumes: dict[str, dict[str, Any]], **more: Any) -> dict[str, Any]:
    """A pod of one container with kvfuse's image; ``volumes``: name, which is its folder below /, -> what it is.

    ``more`` goes into the container, but for ``node``, the name of the node that is to run it.
    """
    where = {"nodeName": more.pop("node")} if "node" in more else {}
    mounts = [{"name": name, "mountPath": f"/{name}", **volume.pop("how", {})} for name, volume in volumes.items()]
    container = {
        "name": "main",
        "image": "kvfuse:latest",
        "imagePullPolicy": "Never",
        "command": ["sh", "-ec", command],
        "volumeMounts": mounts,
        **more,
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            **where,
            "hostNetwork": True,
            "terminationGracePeriodSeconds": 5,
            "containers": [container],
            "volumes": [{"name": name, **volume} for name, volume in volumes.items()],
        },
    }


def claim(name: str, handle: str, capacity: str, **attributes: str) -> list[dict[str, Any]]:
    """A PersistentVolume of a namespace, and the claim that has it."""
    csi = {"driver": "csi.kvfuse", "volumeHandle": handle, "volumeAttributes": {"capacity": capacity, **attributes}}
    common = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
    return [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": name},
            "spec": {
                **common,
                "capacity": {"storage": capacity},
                "persistentVolumeReclaimPolicy": "Retain",
                "claimRef": {"namespace": "default", "name": name},
                "csi": csi,
            },
        },
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": name},
            "spec": {**common, "volumeName": name, "resources": {"requests": {"storage": capacity}}},
        },
    ]


def build_image(folder: Path, label: str = "") -> Path:
    """The archive of this tree's image: kvfuse:latest, or kvfuse:LABEL."""
    require_lab("kubernetes")
    path = folder / f"kvfuse-{label or 'latest'}.tar"
    run(BUILD_IMAGE, path, *(["--label", label] if label else []))
    return path


@contextmanager
def cluster(nodes: int = 1) -> Iterator[KubeLab]:
    """An empty cluster with this tree's image, as kvfuse:latest and kvfuse:next. All of it ends."""
    require_lab("kubernetes")
    if not any(CACHE.glob("bin-*/kubectl")):  # the folder is named by what was mended in the sources
        pytest.skip("Kubernetes is not compiled; type: scripts/kube-lab build")
    # A short path: sockets lie below it.
    with tempfile.TemporaryDirectory(prefix="kvfuse-kube-") as name:
        lab = KubeLab(Path(name) / "lab")
        images = [build_image(Path(name)), build_image(Path(name), "next")]
        try:
            run(SCRIPT, "up", lab.folder, "--nodes", nodes)
            run(SCRIPT, "import", lab.folder, *images)
            yield lab
        finally:
            run(SCRIPT, "down", lab.folder)
