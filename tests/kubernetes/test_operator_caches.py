"""Volumes that are caches on a cluster: pods that use them see no error, whatever ends or follows the daemon."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
from helm_lab import CHART, release
from kube_lab import NODE, KubeLab, cluster
from operator_lab import (
    begin_load,
    check,
    end_load,
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

pytestmark = [pytest.mark.root, pytest.mark.needs("kubernetes"), pytest.mark.timeout(3000)]
BLOCK, CAPACITY = 256 << 10, 128 << 20
"""of `pod_load`, and of the volume, in bytes"""
TENANT = "tenants/default/llama"


@pytest.fixture(scope="module")
def lab() -> Iterator[KubeLab]:
    with cluster() as lab:
        give_kubeconfig(lab)
        yield lab


@pytest.fixture(scope="module")
def helm(lab: KubeLab) -> Iterator[Any]:
    with release(lab.folder / "kubeconfig", values_of(lab)) as config:
        yield config


def namespace(**settings: str) -> dict[str, Any]:
    meta = {"name": "llama", "namespace": "default"}
    spec = {"volume": "kv", "quota": "48Mi", "settings": {"kind": "blocks", **settings}}
    return {"apiVersion": "kvfuse.io/v1alpha1", "kind": "KvfuseNamespace", "metadata": meta, "spec": spec}


def test_a_cache_that_evicts_outlives_its_daemons(lab: KubeLab, helm: Any) -> None:
    """Two loads, in the root and in a namespace with a quota, both full; kills, a roll and back."""
    settings = {"volume": {"segment_size": "64MiB"}, "cache": {"tier_size": "32MiB"}}
    lab.apply(volume("kv", capacity=f"{CAPACITY >> 20}Mi", cache=True, config=settings), namespace(eviction="lru"))
    wait_for_condition(lab, "kv", "Ready", "True")
    wait_for_condition(lab, "llama", "Ready", "True", "kvfusenamespace")
    holder = pod_name(lab, "holder")
    begin_load(lab, "load", is_cache=True, node=NODE)
    begin_load(lab, "tenant", folder=TENANT, is_cache=True, node=NODE)
    for container, signal in (("serve-a", "KILL"), ("serve-b", "KILL"), ("serve-a", "TERM"), ("serve-b", "TERM")):
        kill_container(lab, "daemon", container, by=signal)
        assert "begun" in lab.kubectl("logs", "load").splitlines()[-1]
    for tag in ("next", "latest"):
        helm.upgrade(CHART, "kvfuse", values_of(lab, image={"tag": tag, "pullPolicy": "Never"}))
        wait_long(functools.partial(has_images, lab, f"kvfuse:{tag}"), f"daemons of {tag}")
    kill_container(lab, "holder", "hold", by="KILL")
    wait_for_condition(lab, "kv", "Ready", "True")
    assert pod_name(lab, "holder") == holder
    assert restarts(lab, holder, "hold") == 1
    for name, folder in (("load", ""), ("tenant", TENANT)):
        said = end_load(lab, name, folder=folder)
        assert said["rounds"] * BLOCK > CAPACITY, "it has put more than there is room for"
        assert said["found"] > said["rounds"] // 2, "few blocks go as soon as they are put"


@pytest.mark.usefixtures("helm")
def test_it_ends_clean(lab: KubeLab) -> None:
    lab.delete("kvfusenamespace", "llama")
    lab.kubectl("delete", "kvfusevolume", "kv", "--wait=true", "--timeout=120s")
    check(lab, "kv")
