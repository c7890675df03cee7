"""The chart and its operator on a cluster of `kube_lab`, as tests install and ask them.

The cluster makes no tokens of service accounts: the operator gets a kubeconfig by which it is the chart's own, with the
rights that the chart gives it.
"""

from __future__ import annotations

import base64
import functools
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import trio
from kube_lab import KubeLab, pod
from mounting import wait_until
from places import LABS

from kvfuse.options import config
from kvfuse.volume.check.volume_check import fsck

TRIES = 6
"""of `wait_until`, for what containers start for on a busy machine"""
LOAD = (LABS / "pod_load.py").read_text()
WEBHOOK_PORT = 19443
WAIT = "trap 'exit 0' TERM; sleep 100000 & wait"


def wait_long(condition: Callable[[], bool], what: str) -> None:
    """As `wait_until`, but longer."""
    for _ in range(TRIES - 1):
        with suppress(AssertionError):
            return wait_until(condition, what)
    return wait_until(condition, what)


def values_of(lab: KubeLab, **more: Any) -> dict[str, Any]:
    """Values for this node: small requests, and a kubeconfig for the operator."""
    return {
        "image": {"tag": "latest", "pullPolicy": "Never"},
        "kubeletDir": str(lab.kubelet),
        "stateDir": str(lab.kvfuse),
        "runDir": str(lab.folder / "run"),
        "daemon": {"resources": {"requests": {"cpu": "10m", "memory": "128Mi"}}},
        "operator": {
            "hostNetwork": True,
            "kubeconfigSecret": "kubeconfig",
            "lookSeconds": 3,
            "webhook": {"enabled": True, "host": "127.0.0.1", "port": WEBHOOK_PORT},
        },
        "storageClasses": {"kvfuse": {"volume": "kv", "settings": {"kind": "files"}}},
        **more,
    }


def give_kubeconfig(lab: KubeLab) -> None:
    """Make the Secret by which the operator reaches the cluster."""
    text = base64.b64encode((lab.folder / "operator.kubeconfig").read_bytes()).decode()
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "kubeconfig"}}
    lab.apply({**secret, "data": {"kubeconfig": text}})


def volume(name: str, **spec: Any) -> dict[str, Any]:
    return {"apiVersion": "kvfuse.io/v1alpha1", "kind": "KvfuseVolume", "metadata": {"name": name}, "spec": spec}


def condition(lab: KubeLab, name: str, kind: str, of: str = "kvfusevolume") -> dict[str, Any]:
    rows = lab.get(of, name).get("status", {}).get("conditions", [])
    return next((row for row in rows if row["type"] == kind), {"status": "Unknown", "message": ""})


def wait_for_condition(lab: KubeLab, name: str, kind: str, status: str, of: str = "kvfusevolume") -> None:
    try:
        wait_long(lambda: condition(lab, name, kind, of)["status"] == status, f"{kind} of {name}")
    except AssertionError as error:
        said = lab.kubectl("describe", of, name) + lab.kubectl("get", "pods", "-o", "wide")
        said += lab.kubectl("logs", "deployment/kvfuse-operator", "--tail=50")
        raise AssertionError(said) from error


def capacity(lab: KubeLab, name: str) -> int:
    return int(lab.get("kvfusevolume", name).get("status", {}).get("capacityBytes", 0))


def check(lab: KubeLab, name: str) -> None:
    """fsck of a volume of the node's, which is unmounted."""
    folder = lab.kvfuse / "volumes" / name / "volume"
    report = trio.run(functools.partial(fsck, config.load(folder).options, verify=True))
    assert report.clean, [problem.text for problem in report.problems][:10]


def pod_name(lab: KubeLab, component: str, name: str = "kv", node: int = 1) -> str:
    labels = f"app.kubernetes.io/component={component},kvfuse.io/volume={name}"
    where = f"spec.nodeName={lab.name_of(node)}"
    rows = lab.kubectl("get", "pods", "-o", "name", "-l", labels, "--field-selector", where).split()
    assert len(rows) == 1, rows
    return rows[0].removeprefix("pod/")


def kill_container(lab: KubeLab, component: str, container: str, volume: str = "kv", *, by: str = "TERM") -> None:
    """A signal to the first process of a container of the first node: it ends, and the kubelet starts it again."""
    name = pod_name(lab, component, volume)
    before = restarts(lab, name, container)
    lab.signal(name, container, by)
    wait_long(lambda: restarts(lab, name, container) > before, f"{container} to end")


def restarts(lab: KubeLab, name: str, container: str) -> int:
    rows = lab.get("pod", name)["status"].get("containerStatuses", [])
    return next((int(row["restartCount"]) for row in rows if row["name"] == container), 0)


def has_images(lab: KubeLab, image: str) -> bool:
    """Both containers of the daemon run it."""
    rows = lab.get("pod", pod_name(lab, "daemon"))["status"].get("containerStatuses", [])
    return len(rows) == 2 and all(row["image"].endswith(image) and "running" in row["state"] for row in rows)


def program_pod(lab: KubeLab, name: str, program: str, *words: str, **more: Any) -> dict[str, Any]:
    """A pod that runs a program in Python with these arguments, once; the node's volumes are below /state/volumes."""
    state = {"hostPath": {"path": str(lab.kvfuse)}, "how": {"mountPropagation": "HostToContainer"}}
    command = f'exec /opt/kvfuse/bin/python3 -c "$PROGRAM" {" ".join(words)}'
    made = pod(name, command, {"state": state}, env=[{"name": "PROGRAM", "value": program}], **more)
    made["spec"]["restartPolicy"] = "Never"
    return made


def phase(lab: KubeLab, name: str) -> str:
    """Of a pod: Running, Succeeded, ..."""
    return str(lab.get("pod", name)["status"]["phase"])


def load_pod(
    lab: KubeLab, name: str, volume: str = "kv", folder: str = "", is_cache: bool = False, **more: Any
) -> dict[str, Any]:
    """A pod with `pod_load` in a folder of a volume, by default of its own name, and rings."""
    point = f"/state/volumes/{volume}/mnt"
    return program_pod(lab, name, LOAD, f"{point}/{folder or name}", point, "cache" if is_cache else "", **more)


def begin_load(lab: KubeLab, name: str, volume: str = "kv", **more: Any) -> None:
    """Start a load, and wait until it is under way."""
    lab.apply(load_pod(lab, name, volume, **more))
    lab.wait_for_pod(name)
    wait_long(lambda: "begun" in lab.kubectl("logs", name), "the load")


def end_load(lab: KubeLab, name: str, volume: str = "kv", folder: str = "") -> dict[str, Any]:
    """End a load: what it says. Any error has ended it before."""
    lab.execute(name, f"touch /state/volumes/{volume}/mnt/{folder or name}/end")
    wait_long(lambda: phase(lab, name) != "Running", "the end of the load")
    text = lab.kubectl("logs", name)
    print(text)
    assert phase(lab, name) == "Succeeded", text
    said: dict[str, Any] = json.loads(text.strip().splitlines()[-1])
    assert said["rounds"] > 50
    lab.delete("pod", name)
    return said


def etcd_of(lab: KubeLab) -> str:
    """URL of the cluster's own etcd, which has room for a volume."""
    pid = (lab.folder / "apiserver.pid").read_text().strip()
    words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return next(word.partition("=")[2] for word in words if word.startswith("--etcd-servers="))
