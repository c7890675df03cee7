"""A real Redis server on loopback for tests."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from cluster_lab import MEMORY, running

from kvfuse.options.options import RedisIndexOptions
from kvfuse.remote.index.redis.store import RedisPlace
from kvfuse_cluster import redis


class RedisServer(redis.RedisServer):
    """With what opens a part of its keys."""

    def place(self, part: str, **more: Any) -> RedisPlace:
        """How to reach a part of the keys."""
        password = more.pop("password", self.password)
        ca_file = self.folder / "ca.pem" if self.tls else None
        options = RedisIndexOptions(**{"url": self.url, "ca_file": ca_file, "deadline": 30.0, **more})
        return RedisPlace(options, f"{part}/".encode(), password)


@contextmanager
def redis_server(**settings: Any) -> Iterator[RedisServer]:
    """One that only the caller uses: it may be killed and stopped. Skips where it is not installed."""
    if shutil.which("redis-server") is None:
        pytest.skip("needs Redis: apt-get install redis-server")

    def start(folder: Path) -> RedisServer:
        server = RedisServer(folder, **settings)
        server.begin()
        return server

    with running(start, "kvfuse-redis-", MEMORY) as server:
        yield server
