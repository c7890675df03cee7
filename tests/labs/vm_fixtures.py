"""A plugin of pytest for tests in the virtual machine of scripts/rdma-vm: conftest.py imports too much there."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest
from nvmeof_lab import Target, target
from vm_mounts import vm_etcd

from kvfuse_cluster.etcd import EtcdServers

SEED = os.environ.get("KVFUSE_TEST_SEED", "0")
DISK_SIZE = 1 << 30
"""of the namespace; what was never written takes no memory"""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "root: needs to be root")


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    value = random.Random(f"{SEED} {request.node.nodeid}").randrange(1 << 32)
    print(f"seed {value} (KVFUSE_TEST_SEED={SEED})")
    return value


@pytest.fixture
def rng(seed: int) -> random.Random:
    return random.Random(seed)


@pytest.fixture(scope="session")
def fabric() -> Iterator[Target]:
    """A namespace over TCP and over RDMA."""
    with target(DISK_SIZE) as made:
        yield made


@pytest.fixture(scope="session")
def etcd() -> Iterator[EtcdServers]:
    with vm_etcd() as servers:
        yield servers
