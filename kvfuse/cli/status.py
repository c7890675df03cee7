"""kvfuse status"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from kvfuse.cli import Failure, holders
from kvfuse.cli.console import fill_lines, page_size, print_fitting, print_json, say, say_each
from kvfuse.cli.mounts import ask_health, degraded, kvfuse_mounts, read_virtual
from kvfuse.cli.peers import COLUMNS, PeerRow, peers_of, totals_of
from kvfuse.errors import EngineTimeout, MountError
from kvfuse.mounttable import DEAD, Mounted
from kvfuse.sizes import format_size


def look_at(row: Mounted) -> dict[str, Any]:
    """One mount; "problem" is None when its daemon answers, "degraded" is empty when all that it stores is stored."""
    facts: dict[str, Any] = {
        "mountpoint": str(row.point),
        "source": row.source,
        "read_only": row.read_only,
        "pid": None,
        "space": None,
        "metadata": None,
        "peers": None,
        "cold": None,
        "answer_ms": None,
        "holder": holders.look_at(row),
        "degraded": [],
        "problem": None,
    }
    try:
        facts["answer_ms"] = round(ask_health(row.point) * 1000, 2)
        content = read_virtual(row.point, "stats")
        facts |= {name: content.get(name) for name in ("pid", "space", "metadata", "peers")}
        facts["cold"] = (content.get("store") or {}).get("cold")
        facts["degraded"] = content.get("degraded") or []
    except EngineTimeout as error:
        facts["problem"] = f"hangs: {error}"
    except PermissionError:
        facts["problem"] = "another user's, and mounted without allow_other"
    except OSError as error:
        what = "its daemon is gone" if error.errno in DEAD else error.strerror
        facts["problem"] = f"dead: {what}; type: kvfuse umount {row.point}"
    except MountError as error:
        facts["problem"] = str(error)
    return facts


def _share(used: int, size: int) -> str:
    return f"{format_size(used)} ({used / size:.0%})" if size else format_size(used)


def _row(facts: dict[str, Any]) -> list[Any]:
    space = facts["space"] or {}
    metadata = facts["metadata"] or {}
    return [
        facts["mountpoint"],
        facts["source"],
        "ro" if facts["read_only"] else "rw",
        format_size(space["size"]) if space else None,
        _share(space["size"] - space["free"], space["size"]) if space else None,
        space["files"] - space["files_free"] if space else None,
        _share(metadata["bytes"], metadata["limit"]) if metadata.get("bytes") is not None else None,
        str(facts["pid"] or "-"),
        facts["problem"] or _health(facts),
    ]


def _health(facts: dict[str, Any]) -> str:
    if not facts["degraded"]:
        return f"ok, answers in {facts['answer_ms']} ms"
    return "; ".join([f"{degraded(row)}: {row['remedy']}" for row in facts["degraded"]])


def _print_peers(facts: dict[str, Any]) -> None:
    """Other hosts, where the mount's daemon tells this user of them."""
    if rows := [_peer_row(peer) for peer in peers_of(facts)]:
        print_fitting(COLUMNS, rows, f"other hosts, for {facts['mountpoint']}")
        for line in totals_of(facts):
            say(line)


def _peer_row(peer: PeerRow) -> list[Any]:
    sizes = [format_size(size) for size in (peer.received, peer.served, peer.load)]
    expected = None if peer.expected_ms is None else f"{peer.expected_ms:g} ms"
    return [peer.name, peer.state, peer.transport, *sizes, expected]


def _print_cold(facts: dict[str, Any]) -> None:
    """The cold tier, where the mount has one and its daemon tells this user of it."""
    if (cold := facts["cold"]) is None:
        return
    lost = f", {cold['surrendered']:,} lost, as the bucket was too slow" if cold.get("surrendered") else ""
    state = f"does not answer: {cold['failure']}" if cold["failure"] else "answers"
    if not cold["is_loaded"] and not cold["failure"]:
        state = "is being looked at"
    say(
        f"{facts['mountpoint']}: cold tier: {cold['blocks']:,} blocks,"
        f" {_share(cold['used_bytes'], cold['capacity'])} of {format_size(cold['capacity'])}{lost}; its bucket {state}"
    )


def _print_daemons(facts: dict[str, Any]) -> None:
    """What the holder of a mount tells of its daemons."""
    if facts["holder"]:
        pieces = [facts["mountpoint"], *holders.described(facts["holder"]).split("; ")]
        first, *others = fill_lines(pieces, page_size()[0] - 2)
        say_each([first, *(f"  {line}" for line in others)])


def _matches(row: Mounted, target: Path) -> bool:
    absolute = os.path.abspath(target)
    return str(row.point) == absolute or row.source == absolute


@click.command()
@click.argument("target", required=False, type=Path)
@click.option("--json", "as_json", is_flag=True, help="For programs: a list of objects, sizes in bytes.")
def status(target: Path | None, as_json: bool) -> None:
    """The kvfuse mounts of this machine: capacity, use, daemon, health. Never hangs, whatever a daemon does.

    TARGET, a mount point or a volume, narrows it to one. Exit status 1 when a mount is not well - its daemon does not
    answer, or it is degraded: what is new cannot be stored at present -, or TARGET is not mounted. With --json those
    are "problem" and "degraded", a list of rows with reason, what, why, since (seconds since the epoch), failures and
    remedy. For root also the hosts that a mount reads from, how reads from them ended (docs/peers.md), and its
    cold tier.

    \b
    Examples:
      kvfuse status
      kvfuse status /mnt/kv --json
    """
    rows = [row for row in kvfuse_mounts() if target is None or _matches(row, target)]
    found = [look_at(row) for row in rows]
    if as_json:
        print_json(found)
    elif found:
        columns = ["mount point", "source", "mode", "capacity", "used", "files", "metadata", "pid", "health"]
        print_fitting(columns, map(_row, found))
        for facts in found:
            _print_peers(facts)
            _print_cold(facts)
            _print_daemons(facts)
    if target is not None and not found:
        raise Failure(f"{target} is not mounted by kvfuse")
    if not found and not as_json:
        say("No kvfuse mount here. To make one: kvfuse mount FOLDER MOUNTPOINT")
    if any(facts["problem"] or facts["degraded"] for facts in found):
        raise click.exceptions.Exit(1)
