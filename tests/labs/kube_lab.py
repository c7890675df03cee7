"""A real cluster of one node (scripts/kube-lab), kvfuse's image on it, and objects that end with the test."""

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

    def events(self, name: str) -> str:
        return self.kubectl("get", "events", "--field-selector", f"involvedObject.name={name}")

    def manifest(self, path: Path) -> str:
        """A manifest of the repository, for this node's folders."""
        text = path.read_text().replace("/var/lib/kubelet", str(self.kubelet))
        return text.replace("/var/lib/kvfuse", str(self.kvfuse))


def pod(name: str, command: str, volumes: dict[str, dict[str, Any]], **more: Any) -> dict[str, Any]:
    """A pod of one container with kvfuse's image; ``volumes``: name, which is its folder below /, -> what it is.

    ``more`` goes into the container.
    """
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
def cluster() -> Iterator[KubeLab]:
    """An empty cluster with this tree's image, as kvfuse:latest and kvfuse:next. All of it ends."""
    require_lab("kubernetes")
    if not any(CACHE.glob("bin-*/kubectl")):  # the folder is named by what was mended in the sources
        pytest.skip("Kubernetes is not compiled; type: scripts/kube-lab build")
    # A short path: sockets lie below it.
    with tempfile.TemporaryDirectory(prefix="kvfuse-kube-") as name:
        lab = KubeLab(Path(name) / "lab")
        images = [build_image(Path(name)), build_image(Path(name), "next")]
        try:
            run(SCRIPT, "up", lab.folder)
            run(SCRIPT, "import", lab.folder, *images)
            yield lab
        finally:
            run(SCRIPT, "down", lab.folder)
