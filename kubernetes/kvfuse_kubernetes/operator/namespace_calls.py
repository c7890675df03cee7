"""Namespaces of volumes, by commands in daemons' containers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvfuse_kubernetes.csi.volume_words import SETTINGS, SIZES, WrongRequest, read_quantity
from kvfuse_kubernetes.operator.cluster_api import ClusterApi, CommandFailed, Place
from kvfuse_kubernetes.operator.volume_plan import WrongSpec, read_volume
from kvfuse_kubernetes.operator.volume_state import find_daemons, mount_point

NAMES = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
ENSURE = (
    'path=$1 size=$2 what=set; shift 2; mkdir -p "${path%/*}"; '
    'kvfuse namespace show "$path" >/dev/null 2>&1 || what=create; '
    'if [ "$size" = 0 ]; then kvfuse namespace $what "$path" "$@"; '
    'else head -c "$size" | kvfuse namespace $what "$path" --token @/dev/stdin "$@"; fi >/dev/null; '
    'if [ $what = create ] && [ "$size" = 0 ]; then chmod 0777 "$path"; fi'
)
"""makes a namespace, or changes it; the token comes by standard input, and is in no log of the cluster. A token closes
the folder to all but its owner"""
REMOVE = 'if [ -d "$1" ]; then kvfuse namespace clear "$1" >/dev/null 2>&1 || true; rm -rf "$1"; fi'
REMOVE_SECONDS = 600.0


@dataclass(frozen=True)
class WantedNamespace:
    """``path``: below the volume's root; ``settings``: as words of 'kvfuse namespace create'."""

    volume: str
    path: str
    settings: Mapping[str, str] = field(default_factory=dict)
    token: bytes = b""


class NotServed(Exception):
    """No daemon of the volume can be asked now."""


def check_settings(found: Mapping[str, Any]) -> dict[str, str]:
    """Settings, with sizes as kvfuse reads them. WrongSpec."""
    read = {}
    for name, value in found.items():
        if name not in SETTINGS:
            raise WrongSpec(f"setting {name!r} is unknown; there are: {', '.join(SETTINGS)}")
        try:
            read[name] = read_quantity(str(value)) if name in SIZES else str(value)
        except WrongRequest as error:
            raise WrongSpec(f"setting {name}: {error}") from None
    return read


async def places_of(api: ClusterApi, volume: str) -> list[Place]:
    """Containers in which a volume's namespaces are changed: one, where hosts share it; else one of each node.

    NotServed.
    """
    places = await find_daemons(api, volume)
    if not places:
        raise NotServed(f"volume {volume!r} is mounted on no node")
    found = await api.get("KvfuseVolume", volume)
    if found is None:
        return places
    try:
        is_shared = read_volume(volume, found.get("spec", {})).is_shared
    except WrongSpec:
        is_shared = False
    return places[:1] if is_shared else places


async def ensure(api: ClusterApi, wanted: WantedNamespace, places: Sequence[Place]) -> None:
    """Make a namespace, or give it these settings. CommandFailed: the daemon's reason."""
    path = f"{mount_point(wanted.volume)}/{wanted.path}"
    words = [part for name, value in sorted(wanted.settings.items()) for part in (f"--{name.replace('_', '-')}", value)]
    command = ["sh", "-ec", ENSURE, "ensure", path, str(len(wanted.token)), *words]
    for place in places:
        try:
            await api.execute(place, command, stdin=wanted.token)
        except CommandFailed as failure:
            reason = str(failure).replace(path, wanted.path)
            raise CommandFailed(f"{place.node}: {reason}") from None


async def remove(api: ClusterApi, volume: str, path: str, places: Sequence[Place]) -> None:
    """Remove a namespace, and all in it; it may be absent. CommandFailed."""
    command = ["sh", "-ec", REMOVE, "remove", f"{mount_point(volume)}/{path}"]
    for place in places:
        await api.execute(place, command, seconds=REMOVE_SECONDS)


def find_row(stats: Mapping[str, Any], path: str) -> dict[str, Any] | None:
    """What a mount's counters say of a namespace; None: it is absent there."""
    return next((row for row in stats.get("namespaces", []) if row["path"] == f"/{path}"), None)


def as_descriptor(said: Mapping[str, Any]) -> str:
    """A descriptor as kvfuse reads it."""
    return json.dumps(said, sort_keys=True, separators=(",", ":"))
