"""Hosts that read from each other, as `kvfuse status` and `kvfuse top` show them: of ``peers`` in the statistics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

COLUMNS = "host", "state", "by", "received", "served", "to send", "1 MiB takes"
FAILURES = "absent", "moved", "busy", "wrong", "lost", "late"
"""why a read of another host was not right"""
REFUSALS = "refused", "malformed", "given_up"
"""why a connection of another host ended"""


class PeerRow(NamedTuple):
    """One other host. Counts are bytes since the mount, or since its place became known."""

    client: str
    name: str
    state: str
    transport: str
    received: int
    served: int
    load: int
    """bytes that it has still to send to others"""
    expected_ms: float | None
    """for a block of 1 MiB; None: it is not asked"""


def peers_of(stats: Mapping[str, Any]) -> Iterator[PeerRow]:
    """Hosts that answer, and those that only ask this one."""
    peers = stats.get("peers") or {}
    served = dict((peers.get("served") or {}).get("served") or {})
    for host in peers.get("hosts") or ():
        client = host["client"]
        yield PeerRow(
            client, ", ".join(host["addresses"]) or client, host["state"], _transport(host), host["received_bytes"],
            served.pop(client, 0), host["load_bytes"], host["expected_ms_of_1MiB"],
        )  # fmt: skip
    for client, count in served.items():
        yield PeerRow(client, f"client {client}", "asks only", "-", 0, count, 0, None)


def _transport(host: Mapping[str, Any]) -> str:
    count, by_rdma = host["connections"], host.get("rdma_connections", 0)
    if not count:
        return "-"
    return {0: "tcp", count: "rdma"}.get(by_rdma, "rdma, tcp")


def totals_of(stats: Mapping[str, Any]) -> Iterator[str]:
    """Lines: how reads from others ended, and how others were answered. None where nobody asked."""
    peers = stats.get("peers") or {}
    asked, served = peers.get("asked") or {}, peers.get("served") or {}
    if asked.get("rows"):
        hedged = f"; {asked['hedged']:,} hedged, {asked['overtaken']:,} overtaken" if asked["hedged"] else ""
        yield f"asked {asked['rows']:,}: {_counts(asked, ('right', *FAILURES))}{hedged}"
    if served.get("rows"):
        yield f"answered {served['rows']:,}: {_counts(served, ('here', 'absent', 'moved', 'elsewhere', 'busy'))}"
    if any(served.get(reason) for reason in REFUSALS):
        yield f"connections ended: {_counts(served, REFUSALS)}"


def _counts(row: Mapping[str, Any], names: tuple[str, ...]) -> str:
    """Those that are not 0."""
    return ", ".join(f"{row[name]:,} {name.replace('_', ' ')}" for name in names if row.get(name)) or "none"
