"""`helm uninstall`: nothing of kvfuse is left on the node but what volumes hold, and the next release has that."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from helm_lab import release
from kube_lab import KubeLab, cluster
from operator_lab import check, give_kubeconfig, values_of, wait_long

pytestmark = [pytest.mark.root, pytest.mark.needs("kubernetes"), pytest.mark.timeout(3000)]
VOLUME = {"config": {"volume": {"capacity": "256MiB", "segment_size": "64MiB"}}}
CLUSTER = {"kubelet", "containerd"}
"""programs of a node without pods"""


def programs(lab: KubeLab) -> set[str]:
    """Names of all that the node runs."""
    return {Path(line.split()[0]).name for line in lab.programs() if line}


def test_an_uninstall_leaves_data_alone(lab_of_one: KubeLab) -> None:
    lab, content = lab_of_one, os.urandom(5_000_000)
    point = lab.kvfuse / "volumes" / "kv" / "mnt"
    values: dict[str, Any] = values_of(lab, volumes={"kv": VOLUME})
    for turn in range(2):
        with release(lab.folder / "kubeconfig", values):
            wait_long(lambda: bool(lab.kvfuse_mounts()) and (point / ".kvfuse").exists(), "the mount")
            if turn == 0:
                (point / "folder").mkdir()
                (point / "folder" / "file").write_bytes(content)  # and nothing is synced
            assert (point / "folder" / "file").read_bytes() == content
            assert programs(lab) > CLUSTER
        began = time.monotonic()
        wait_long(lambda: not lab.kubectl("get", "pods", "-o", "name").split(), "the pods to go")
        print(f"all pods are gone after {time.monotonic() - began:.1f} s")
        wait_long(lambda: programs(lab) == CLUSTER, "all other programs to end")
        assert lab.kvfuse_mounts() == []
        assert lab.kubectl("get", "all,configmaps,daemonsets", "-l", "app.kubernetes.io/name=kvfuse").strip() == ""
        check(lab, "kv")


@pytest.fixture
def lab_of_one() -> Any:
    with cluster() as lab:
        give_kubeconfig(lab)
        yield lab
