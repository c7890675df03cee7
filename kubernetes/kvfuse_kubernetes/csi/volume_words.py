"""What a request says of a volume, checked: which namespace of which volume, its settings, how a pod may use it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvfuse.cli.namespace import MEANINGS
from kvfuse.sizes import parse_size
from kvfuse_kubernetes.csi.csi_messages import MULTI_NODE_READER_ONLY, SINGLE_NODE_READER_ONLY

EPHEMERAL_FOLDER = "ephemeral"
"""folder of a volume with the namespaces of pods' ephemeral volumes"""
KUBELET_PREFIX = "csi.storage.k8s.io/"
"""of what the kubelet adds to a volume's attributes"""
OWN_WORDS = "volume", "namespace", "readOnly", "mode", "rings"
SETTINGS = tuple(name for name in MEANINGS if name != "token")
"""settings of a namespace that a volume's attributes may have: all but the secret"""
SIZES = frozenset({"capacity", "token_size", "bandwidth", "burst"})
"""settings that are sizes"""
MOUNT_FLAGS = "ro", "rw", "nosuid", "nodev", "noexec"
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
_SUFFIXES = {"k": "kB", "M": "MB", "G": "GB", "T": "TB", "P": "PB"} | {f"{word}i": f"{word}iB" for word in "KMGTP"}


class WrongRequest(ValueError):
    """A request is malformed: the text says which word is wrong, and what is right."""


@dataclass(frozen=True)
class WantedVolume:
    """What a pod is to get."""

    volume: str
    """name of the kvfuse volume"""
    namespace: str
    """path of the namespace's folder below the volume's root"""
    settings: Mapping[str, str]
    """settings that the namespace gets"""
    mode: int
    """mode of the folder, where it is made"""
    is_ephemeral: bool
    """it ends with the pod"""
    is_read_only: bool
    has_rings: bool
    """the pod may open rings"""
    no_exec: bool = False

    @property
    def name(self) -> str:
        return f"{self.volume}/{self.namespace}"


def read_publish(request: Any) -> WantedVolume:
    """What a NodePublishVolumeRequest asks for. WrongRequest."""
    said = dict(request.volume_context)
    is_ephemeral = said.get(f"{KUBELET_PREFIX}ephemeral") == "true"
    said = {name: value for name, value in said.items() if not name.startswith(KUBELET_PREFIX)}
    _refuse_unknown(said)
    flags = _read_capability(request.volume_capability)
    for_readers = request.volume_capability.access_mode.mode in (SINGLE_NODE_READER_ONLY, MULTI_NODE_READER_ONLY)
    place = _ephemeral_place(request.volume_id, said) if is_ephemeral else _lasting_place(request.volume_id, said)
    return WantedVolume(
        *place,
        settings=_read_settings(said),
        mode=_read_mode(said.get("mode", "0777")),
        is_ephemeral=is_ephemeral,
        is_read_only=request.readonly or "ro" in flags or for_readers or _read_bool("readOnly", said),
        has_rings=_read_bool("rings", said),
        no_exec="noexec" in flags,
    )


def is_lasting(volume_id: str) -> bool:
    """The volume is a PersistentVolume, VOLUME/NAMESPACE; the id of an ephemeral one has no slash."""
    return "/" in volume_id


def check_ephemeral_id(volume_id: str) -> str:
    """The id, which becomes a folder's name. WrongRequest."""
    if not re.fullmatch(_NAME, volume_id):
        raise WrongRequest(f"volume id {volume_id!r} of an ephemeral volume: letters, digits, '.', '_' and '-' only")
    return volume_id


def read_quantity(text: str) -> str:
    """A size in Kubernetes' words ("1Gi", "1G" for 10**9) or kvfuse's ("1GiB"), as kvfuse reads it. WrongRequest."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kMGTP]|[KMGTP]i)", text)
    said = found[1] + _SUFFIXES[found[2]] if found else text
    try:
        parse_size(said)
    except ValueError:
        raise WrongRequest(f'{text!r} is no size; write it like "64Gi"') from None
    return said


def _refuse_unknown(said: Mapping[str, str]) -> None:
    known = (*OWN_WORDS, *SETTINGS)
    for name in said:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; there are: {', '.join(known)}"
            raise WrongRequest(f"volume attribute {name!r} is unknown{hint}")


def _read_capability(capability: Any) -> list[str]:
    """The mount flags that it has."""
    if capability.HasField("block"):
        raise WrongRequest("a block device is asked for: kvfuse volumes are file systems (volumeMode: Filesystem)")
    if capability.mount.fs_type not in ("", "kvfuse"):
        raise WrongRequest(f"file system {capability.mount.fs_type!r}: leave fsType out")
    flags = list(capability.mount.mount_flags)
    for flag in flags:
        if flag not in MOUNT_FLAGS:
            raise WrongRequest(f"mount option {flag!r} is unknown; there are: {', '.join(MOUNT_FLAGS)}")
    return flags


def _ephemeral_place(volume_id: str, said: Mapping[str, str]) -> tuple[str, str]:
    """Volume and namespace. A pod's author must not name a namespace: it may be another tenant's."""
    check_ephemeral_id(volume_id)
    if "namespace" in said:
        raise WrongRequest("a pod's own volume gets a new namespace: to share one, make a PersistentVolume of it")
    if "volume" not in said:
        raise WrongRequest("volume attribute 'volume' is missing: the name of a kvfuse volume of the node")
    return _checked_name("volume", said["volume"]), f"{EPHEMERAL_FOLDER}/{volume_id}"


def _lasting_place(volume_id: str, said: Mapping[str, str]) -> tuple[str, str]:
    volume, _, namespace = volume_id.partition("/")
    if not namespace:
        raise WrongRequest(f"volumeHandle {volume_id!r} must be VOLUME/NAMESPACE, such as 'kv/llama'")
    for name, value in (("volume", volume), ("namespace", namespace)):
        if said.get(name, value) != value:
            raise WrongRequest(f"volumeHandle {volume_id!r} and volume attribute {name} = {said[name]!r} contradict")
    parts = [_checked_name("namespace", part) for part in namespace.split("/")]
    if parts[0] == EPHEMERAL_FOLDER:
        raise WrongRequest(f"folder {EPHEMERAL_FOLDER!r} has the volumes of pods alone: name another namespace")
    return _checked_name("volume", volume), namespace


def _checked_name(what: str, text: str) -> str:
    if not re.fullmatch(_NAME, text):
        rule = "a name has letters, digits, '.', '_' and '-', begins with a letter or digit, and has at most 128"
        raise WrongRequest(f"{what} {text!r}: {rule}")
    return text


def _read_settings(said: Mapping[str, str]) -> dict[str, str]:
    found = {name: said[name] for name in SETTINGS if name in said}
    for name in found.keys() - {"descriptor"}:
        if not re.fullmatch(r"\S+", found[name]):
            raise WrongRequest(f"volume attribute {name} = {found[name]!r}: one word is wanted")
    for name in found.keys() & SIZES:
        try:
            found[name] = read_quantity(found[name])
        except WrongRequest as error:
            raise WrongRequest(f"volume attribute {name}: {error}") from None
    return found


def _read_mode(text: str) -> int:
    if not re.fullmatch(r"0?[0-7]{3,4}", text):
        raise WrongRequest(f'volume attribute mode = {text!r}: write the mode of a folder in octal, such as "0770"')
    return int(text, 8)


def _read_bool(name: str, said: Mapping[str, str]) -> bool:
    text = said.get(name, "false")
    if text not in ("true", "false"):
        raise WrongRequest(f'volume attribute {name} = {text!r}: "true" or "false"')
    return text == "true"
