"""An engine's adapter in a pod without any right: LMCache, with the engine's packages from the node."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_host import Engine
from engine_python import engine_python
from helm_lab import release
from kube_lab import NODE, KubeLab, cluster, pod
from operator_lab import (
    check,
    give_kubeconfig,
    kill_container,
    values_of,
    volume,
    wait_for_condition,
    wait_long,
)
from places import ROOT

pytestmark = [pytest.mark.root, pytest.mark.needs("kubernetes", "lmcache"), pytest.mark.timeout(3000)]
NO_RIGHTS = {"runAsUser": 1000, "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
NAMES = [f"chunk {number}" for number in range(16)]


@pytest.fixture(scope="module")
def lab() -> Iterator[KubeLab]:
    """The chart with its operator, and the volume "kv"."""
    with cluster() as lab:
        give_kubeconfig(lab)
        with release(lab.folder / "kubeconfig", values_of(lab)):
            lab.apply(volume("kv", capacity="512Mi", config={"volume": {"segment_size": "64MiB"}}))
            wait_for_condition(lab, "kv", "Ready", "True")
            yield lab


def folder_of_node(path: Path) -> dict[str, Any]:
    return {"hostPath": {"path": str(path), "type": "Directory"}, "how": {"readOnly": True}}


def engine_pod(lab: KubeLab, name: str) -> dict[str, Any]:
    """`lmcache_driver` with the node's own Python and packages; it answers at a socket in a folder of the node."""
    python = engine_python("lmcache")
    base, packages = subprocess.run(
        [python, "-c", "import sys, sysconfig; print(sys.base_prefix, sysconfig.get_path('purelib'))"],
        stdout=subprocess.PIPE, text=True, check=True,
    ).stdout.split()  # fmt: skip
    calls = lab.folder / name
    calls.mkdir()
    calls.chmod(0o777)
    attributes = {"volume": "kv", "capacity": "128Mi", "kind": "blocks", "rings": "true"}
    volumes = {
        "python": folder_of_node(Path(base)),
        "engine": folder_of_node(Path(packages)),
        "tree": folder_of_node(ROOT),
        "calls": {"hostPath": {"path": str(calls), "type": "Directory"}},
        "shm": {"emptyDir": {"medium": "Memory"}},
        "cache": {"csi": {"driver": "csi.kvfuse", "volumeAttributes": attributes}},
    }
    env = {
        "PYTHONPATH": "/engine:/tree:/tree/tests/labs",
        "LD_LIBRARY_PATH": "/python/lib",
        "PYTHONWARNINGS": "ignore",
        "HOME": "/tmp",
    }
    made = pod(
        name,
        "umask 0; exec /python/bin/python3 -B /tree/tests/labs/lmcache_driver.py /calls/socket",
        volumes,
        env=[{"name": key, "value": value} for key, value in env.items()],
        securityContext=NO_RIGHTS,
        node=NODE,
    )
    for row in made["spec"]["containers"][0]["volumeMounts"]:
        if row["name"] == "shm":
            row["mountPath"] = "/dev/shm"
    return made


def test_lmcache_in_a_pod_outlives_the_daemon(lab: KubeLab) -> None:
    """Chunks are there after each end of the daemon, and the engine goes on by itself."""
    lab.apply(engine_pod(lab, "lmcache"))
    lab.wait_for_pod("lmcache")
    wait_long(lambda: "ready" in lab.kubectl("logs", "lmcache"), "the engine's imports")
    assert lab.execute("lmcache", "id -u; grep CapEff /proc/self/status").split() == ["1000", "CapEff:", "0" * 16]
    with Engine(str(lab.folder / "lmcache" / "socket")) as engine:
        engine.start_engine("/cache", "llama")
        engine.put(NAMES)
        assert engine.get(NAMES) == [True] * len(NAMES)
        for container, signal in (("serve-a", "KILL"), ("serve-b", "KILL")):
            kill_container(lab, "daemon", container, by=signal)
            wait_long(engine.is_up, "the engine's store")
            assert engine.contains(NAMES) == len(NAMES)
            assert engine.get(NAMES) == [True] * len(NAMES), f"after the end of {container}"
            more = [f"{name} after {container}" for name in NAMES]
            engine.put(more)
            assert engine.get(more) == [True] * len(more)
        assert engine.get(["absent"]) == [False]
        assert engine.leaks() == 0
        engine.close_engine()
    lab.delete("pod", "lmcache")


def test_it_ends_clean(lab: KubeLab) -> None:
    lab.kubectl("delete", "kvfusevolume", "kv", "--wait=true", "--timeout=120s")
    check(lab, "kv")
