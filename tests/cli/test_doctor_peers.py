"""What the doctor says of where this host answers others."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from kvfuse.cli.doctor_peers import check_peers
from kvfuse.cli.findings import MISSING, OK, WARN
from kvfuse.options.options import PeerOptions


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def states(**options: Any) -> list[str]:
    return [finding.state for finding in check_peers(PeerOptions(**options))]


def test_a_mount_that_listens_nowhere_is_not_looked_at() -> None:
    assert states() == []


def test_addresses_of_this_host_can_be_reached(port: int) -> None:
    assert states(listen=f"127.0.0.1:{port}") == [OK]
    assert states(listen=f"[::]:{port}", advertise=("127.0.0.1", f"[::1]:{port}", "localhost")) == [OK] * 3


def test_a_mount_that_listens_there_already_is_reached(port: int) -> None:
    with socket.create_server(("127.0.0.1", port)):
        assert states(listen=f"127.0.0.1:{port}") == [OK]


def test_addresses_that_others_cannot_use_are_named(port: int) -> None:
    with socket.create_server(("127.0.0.3", port)):  # so that nobody else listens at the other addresses meanwhile
        found = list(
            check_peers(PeerOptions(listen=f"127.0.0.1:{port}", advertise=("127.0.0.2", "no-such-host.invalid")))
        )
    assert [finding.state for finding in found] == [WARN, WARN]
    assert found[0].detail == f"other hosts are told 127.0.0.2:{port}, which cannot be reached: Connection refused"
    assert f"no-such-host.invalid:{port}" in found[1].detail


def test_an_address_of_another_host_cannot_be_listened_at(port: int) -> None:
    (found,) = check_peers(PeerOptions(listen=f"192.0.2.7:{port}"))
    assert found.state == MISSING
    assert found.detail.startswith(f"nobody can listen at 192.0.2.7:{port}: Cannot assign requested address")
