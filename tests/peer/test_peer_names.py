"""Names of hosts: resolved anew for each connection, so that a host may move."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import trio
from peer_hosts import peer_hosts, until
from peer_lab import PROXY_HOST, PeerProxy

from kvfuse.peer import neighbour as neighbour_module

NAME = "moving-host"


class Resolver(trio.abc.HostnameResolver):
    """Knows one name. Of all others the system's resolver."""

    def __init__(self) -> None:
        self.address: str | None = PROXY_HOST
        """None: nobody knows the name"""
        self.asked = 0

    async def getaddrinfo(
        self, host: bytes | None, port: bytes | str | int | None, family: int = 0, type: int = 0, proto: int = 0,
        flags: int = 0,
    ) -> Any:  # fmt: skip
        is_known = host == NAME.encode()
        self.asked += is_known
        if is_known and self.address is None:
            raise socket.gaierror(socket.EAI_NONAME, "unknown name")
        return socket.getaddrinfo(self.address if is_known else host, port, family, type, proto, flags)

    async def getnameinfo(self, sockaddr: Any, flags: int) -> tuple[str, str]:
        return socket.getnameinfo(sockaddr, flags)


@pytest.fixture
def proxies() -> Iterator[list[PeerProxy]]:
    made: list[PeerProxy] = []
    yield made
    for proxy in made:
        proxy.close()


async def test_a_name_is_resolved_anew_for_each_connection(
    proxies: list[PeerProxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """First it is that of a proxy, then of nobody, then of the host itself."""
    monkeypatch.setattr(neighbour_module, "RETRY_MAX", 0.25)
    resolver = Resolver()
    trio.socket.set_custom_hostname_resolver(resolver)

    def through(port: int) -> str:
        proxies.append(PeerProxy(port))
        return f"{NAME}:{port}"

    async with peer_hosts(2, through, deadline=20.0) as (writer, reader):
        writer.neighbourhood.blocks[1], reader.neighbourhood.holders[1] = secrets.token_bytes(100_000), 1
        proxy = proxies[0]
        await reader.until_ready(1)
        assert await reader.read(writer.wanted(1)) == ([True], [writer.neighbourhood.blocks[1]])
        assert proxy.answers == 1

        resolver.address = None
        proxy.close()
        await until(lambda: "unknown name" in reader.peers.neighbours[1].state)
        assert (await reader.read(writer.wanted(1)))[0] == [False]

        resolver.address = "127.0.0.1"
        await reader.until_ready(1)
        asked = resolver.asked
        assert await reader.read(writer.wanted(1)) == ([True], [writer.neighbourhood.blocks[1]])
        assert proxy.answers == 1
        assert asked >= 3
