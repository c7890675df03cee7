"""What a KvfuseVolume asks for, checked: mount.conf, and what the daemon's pods need for it. No I/O."""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvfuse.errors import ConfigError
from kvfuse.options import config
from kvfuse.sizes import format_size
from kvfuse.sizes import parse_size as size_of
from kvfuse_kubernetes.csi.volume_words import WrongRequest, read_quantity

NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")
SECRETS, FILES = "/etc/kvfuse/secrets", "/etc/kvfuse/files"
"""folders of the daemon's container with Secrets and ConfigMaps, each in a folder of its name"""
KNOWN = (
    *("capacity", "growth", "blockSizes", "cache", "records", "segments"),
    *("hostPaths", "nodeSelector", "metricsPort", "config"),
)

Sections = dict[str, dict[str, Any]]


class WrongSpec(ValueError):
    """A spec is wrong: the text says which field, and what is right."""


@dataclass(frozen=True)
class Growth:
    """The operator gives the volume more by itself: ``step`` bytes, up to ``maximum``, from the share ``above`` on."""

    step: int
    maximum: int
    above: float


@dataclass(frozen=True)
class RookPool:
    """A pool of a cluster that Rook runs, and a user of it."""

    namespace: str
    pool: str
    client: str


@dataclass(frozen=True)
class VolumePlan:
    """One volume."""

    name: str
    sections: Sections
    """of mount.conf"""
    capacity: int | None
    growth: Growth | None = None
    secrets: tuple[str, ...] = ()
    config_maps: tuple[str, ...] = ()
    host_paths: tuple[str, ...] = ()
    has_devices: bool = False
    node_selector: Mapping[str, str] | None = None
    metrics_port: int | None = None
    rook: RookPool | None = None
    is_shared: bool = field(default=False)
    """hosts share it: its names are in etcd"""

    @property
    def mount_conf(self) -> str:
        """The text of mount.conf. What JSON says of a value, TOML says, too."""
        lines = []
        for section, keys in sorted(self.sections.items()):
            lines += [f"[{section}]", *(f"{key} = {json.dumps(value)}" for key, value in sorted(keys.items())), ""]
        return "\n".join(lines)

    @property
    def fingerprint(self) -> str:
        """Of what a daemon reads when it starts. Capacity is not of that: it counts when a volume is made."""
        volume = {key: value for key, value in self.sections.get("volume", {}).items() if key != "capacity"}
        text = json.dumps({**self.sections, "volume": volume}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_volume(name: str, spec: Mapping[str, Any]) -> VolumePlan:
    """The plan of a KvfuseVolume. WrongSpec."""
    if not NAME.fullmatch(name):
        raise WrongSpec(f"name {name!r}: at most 40 small letters, digits and '-', as parts of names of other objects")
    for word in spec:
        if word not in KNOWN:
            near = difflib.get_close_matches(word, KNOWN, 1)
            raise WrongSpec(f"spec.{word} is unknown" + (f"; did you mean {near[0]!r}?" if near else ""))
    sections: Sections = {section: dict(keys) for section, keys in spec.get("config", {}).items()}
    volume = sections.setdefault("volume", {})
    capacity = _size(spec, "capacity")
    if capacity is not None:
        volume["capacity"] = format_size(capacity) if capacity % (1 << 20) == 0 else str(capacity)
    if spec.get("blockSizes"):
        volume["exact_sizes"] = [
            _quantity(f"blockSizes[{number}]", text) for number, text in enumerate(spec["blockSizes"])
        ]
    if spec.get("cache"):
        sections.setdefault("namespace", {}).setdefault("kind", "blocks")
    sections.setdefault("mount", {}).setdefault("allow_other", True)
    port = spec.get("metricsPort")
    if port:
        sections.setdefault("metrics", {}).setdefault("listen", f"0.0.0.0:{port}")
    is_shared, secrets = _read_records(spec.get("records") or {}, sections)
    volume.setdefault(*(("name", name) if is_shared else ("path", f"/var/lib/kvfuse/volumes/{name}/volume")))
    more_secrets, config_maps, rook = _read_segments(name, spec.get("segments") or {}, sections, is_shared=is_shared)
    plan = VolumePlan(
        name,
        sections,
        capacity,
        growth=_read_growth(spec.get("growth"), capacity),
        secrets=(*secrets, *more_secrets),
        config_maps=config_maps,
        host_paths=_host_paths(name, spec, sections),
        has_devices=bool(sections.get("segments", {}).get("devices")),
        node_selector=spec.get("nodeSelector"),
        metrics_port=port,
        rook=rook,
        is_shared=is_shared,
    )
    _check(plan)
    return plan


def _read_records(records: Mapping[str, Any], sections: Sections) -> tuple[bool, list[str]]:
    """Fill [records]; whether hosts share the volume, and Secrets that the daemon needs."""
    etcd = records.get("etcd")
    if etcd is None:
        return sections.get("records", {}).get("engine") == "etcd", []
    found, secrets = sections.setdefault("records", {}), []
    found["engine"] = "etcd"
    if (service := etcd.get("service")) is not None:
        host = f"{service['name']}.{service['namespace']}.svc" if service.get("namespace") else service["name"]
        found["endpoints"] = [f"{service.get('scheme', 'http')}://{host}:{service.get('port', 2379)}"]
    elif etcd.get("endpoints"):
        found["endpoints"] = list(etcd["endpoints"])
    else:
        raise WrongSpec("spec.records.etcd: name its endpoints, or a service")
    found |= {key: etcd[key] for key in ("prefix", "user") if etcd.get(key)}
    if (password := etcd.get("passwordSecret")) is not None:
        found["password_file"] = f"{SECRETS}/{password['name']}/{password.get('key', 'password')}"
        secrets.append(password["name"])
    if (tls := etcd.get("tlsSecret")) is not None:
        folder = f"{SECRETS}/{tls['name']}"
        found["ca_file"] = f"{folder}/ca.crt"
        if tls.get("clientCertificate"):
            found |= {"cert_file": f"{folder}/tls.crt", "key_file": f"{folder}/tls.key"}
        secrets.append(tls["name"])
    return True, list(dict.fromkeys(secrets))


def _read_segments(
    name: str, segments: Mapping[str, Any], sections: Sections, *, is_shared: bool
) -> tuple[list[str], tuple[str, ...], RookPool | None]:
    """Fill [segments]: Secrets and ConfigMaps that the daemon needs, and the pool of Rook."""
    engines = [word for word in ("path", "devices", "ceph", "rook") if segments.get(word)]
    if len(engines) > 1:
        raise WrongSpec(f"spec.segments: only one of {', '.join(engines)}")
    if not engines:
        return [], (), None
    found = sections.setdefault("segments", {})
    if engines[0] == "path":
        found |= {"engine": "file", "path": segments["path"]}
        return [], (), None
    if engines[0] == "devices":
        found |= {"engine": "block", "devices": list(segments["devices"])}
        return [], (), None
    if not is_shared:
        raise WrongSpec(f"spec.segments.{engines[0]} needs spec.records.etcd: hosts share the pool")
    ceph = segments[engines[0]]
    found |= {"engine": "rados", "pool": ceph["pool"]}
    if engines[0] == "rook":
        secret = f"{name}-rook"
        found |= {"user": ceph["client"], "conf_file": f"{SECRETS}/{secret}/ceph.conf"}
        found["keyring"] = f"{SECRETS}/{secret}/keyring"
        return [secret], (), RookPool(ceph.get("namespace", "rook-ceph"), ceph["pool"], ceph["client"])
    found |= {"user": ceph.get("user", "admin"), "conf_file": f"{FILES}/{ceph['configMap']}/ceph.conf"}
    found["keyring"] = f"{SECRETS}/{ceph['secret']}/keyring"
    return [ceph["secret"]], (ceph["configMap"],), None


def _host_paths(name: str, spec: Mapping[str, Any], sections: Sections) -> tuple[str, ...]:
    """Folders that the daemon's container needs beside the volume's own."""
    paths = list(spec.get("hostPaths") or [])
    own = f"/var/lib/kvfuse/volumes/{name}/"
    for section, key in (("segments", "path"), ("records", "path"), ("cache", "disk_path"), ("volume", "path")):
        path = sections.get(section, {}).get(key)
        if path and not str(path).startswith(own) and not any(Path(path).is_relative_to(found) for found in paths):
            paths.append(path)
    for path in paths:
        if not re.fullmatch(r"/[A-Za-z0-9._/-]+", path):
            raise WrongSpec(f"{path!r}: the whole path of a folder of the nodes is wanted")
    return tuple(paths)


def _read_growth(growth: Mapping[str, Any] | None, capacity: int | None) -> Growth | None:
    if growth is None:
        return None
    step, maximum = _size(growth, "step", "growth."), _size(growth, "maximum", "growth.")
    if not step or not maximum:
        raise WrongSpec("spec.growth: both step and maximum are needed")
    if capacity is not None and maximum < capacity:
        raise WrongSpec(f"spec.growth.maximum is less than spec.capacity, {format_size(capacity)}")
    return Growth(step, maximum, float(growth.get("above", 0.85)))


def _check(plan: VolumePlan) -> None:
    """Have kvfuse read its mount.conf. WrongSpec."""
    try:
        config.load(Path("/etc/kvfuse/mount.conf"), text=plan.mount_conf)
    except ConfigError as error:
        raise WrongSpec(str(error).removeprefix("/etc/kvfuse/mount.conf: ")) from None


def _size(found: Mapping[str, Any], word: str, where: str = "") -> int | None:
    text = found.get(word)
    return None if text is None else size_of(_quantity(f"{where}{word}", str(text)))


def _quantity(where: str, text: str) -> str:
    try:
        return read_quantity(text)
    except WrongRequest as error:
        raise WrongSpec(f"spec.{where}: {error}") from None
