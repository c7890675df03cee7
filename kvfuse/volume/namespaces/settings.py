"""The settings of a namespace: what they may be, and their record.

A *namespace* is a folder with one policy for itself and what is below it, but for namespaces in it. It has the number
of its folder's inode; the root's, which every volume has, is ``ROOT``. A namespace of kind "files" never loses a file;
blocks of one of kind "blocks" are rows of the block store, and go when their room is needed, in the order of its
policy; its files that are no blocks stay.
"""

from __future__ import annotations

import difflib
import secrets
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta

from kvfuse.errors import InvalidArgument
from kvfuse.policy import ADMISSIONS, DEFAULT_ADMISSION, DEFAULT_POLICY, POLICIES
from kvfuse.sizes import parse_size
from kvfuse.volume.measures.gates import is_lock
from kvfuse.volume.namespaces.descriptors import parse_descriptor

SHOWN_TOKENS = "none", "set"
"""what is shown of a token: there is none, or there is one, which is not told"""
ROOT = 0
"""the number of the root's namespace"""
EPOCHS = 1 << 32

Kind = Literal["files", "blocks", "cache"]
"""cache: of volumes of before, whose blocks were files"""
Tiers = Literal["all", "dram", "disk", "remote"]
Compression = Literal["none", "zstd"]
Cold = Literal["none", "used", "all"]
Size = Annotated[int, Meta(ge=0, le=1 << 62)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Weight = Annotated[float, Meta(ge=0.01, le=100)]
Share = Annotated[float, Meta(gt=0, le=1)]


class Settings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The settings of one namespace. Stored as a map, so that later programs may add to them."""

    kind: Kind = "files"
    capacity: Size = 0
    """bytes of slots that it may hold, with the namespaces in it; 0: as many as the one above it"""
    blocks: Size = 0
    """files that it may hold; 0: any number"""
    eviction: str = DEFAULT_POLICY
    """the order in which blocks go, by name (`policy.POLICIES`)"""
    admission: str = DEFAULT_ADMISSION
    """which blocks a full cache stores, by name (`policy.ADMISSIONS`)"""
    ttl: Seconds = 0.0
    """seconds after which a block that was not written again is gone; 0: never"""
    high_water: Share = 0.98
    """share of the capacity from which blocks are evicted ahead of need"""
    low_water: Share = 0.96
    """share of the capacity down to which they are then"""
    bandwidth: Size = 0
    """bytes a second that its callers read and write, those of namespaces in it included; 0: any number"""
    iops: Size = 0
    """operations a second, likewise"""
    burst: Size = 0
    """bytes that may be ahead of ``bandwidth``; 0: what it allows in a twentieth of a second"""
    weight: Weight = 1.0
    """its share of memory for writes where several namespaces wait for that"""
    soft_pin: bool = False
    """blocks of the caches without it go first, where room of the volume or of a namespace above is wanted"""
    tiers: Tiers = "all"
    """tiers of a host that may get copies of its blocks: both, one of them, or none (remote)"""
    compression: Compression = "none"
    """whole chunks that it stores from now on are compressed where a smaller slot holds them then"""
    cold: Cold = "none"
    """blocks that go to the cold tier when they leave the volume: none, those that were read since then, all"""
    recompute_speed: Size = 0
    """tokens a second that an engine computes; 0: look-ups do not compare"""
    token_size: Size = 0
    """bytes of blocks that one token has"""
    token: str = ""
    """lock of the token without which only those use it whom the folder's mode lets in (`gates`); "": it has none"""
    descriptor: str = ""
    """what its blocks are (`descriptors`); "": anything"""
    epoch: Size = 0
    """32 bits, of its blocks: those of another epoch are none any more. Nobody sets it"""

    @property
    def is_blocks(self) -> bool:
        return self.kind == "blocks"

    @property
    def recompute_rate(self) -> int:
        """Bytes of blocks that an engine computes in a second; 0: that is not known."""
        return self.recompute_speed * self.token_size

    @property
    def shown(self) -> dict[str, Any]:
        """What anybody may see, by name: not the lock."""
        shown = {**msgspec.structs.asdict(self), "token": SHOWN_TOKENS[self.token != ""]}
        del shown["epoch"]
        return shown

    def cleared(self) -> Settings:
        """These settings, in the next epoch."""
        return msgspec.structs.replace(self, epoch=(self.epoch + 1) % EPOCHS)

    def begun(self) -> Settings:
        """Those of a namespace that is new: blocks of an earlier one of the folder may still be on the medium."""
        return msgspec.structs.replace(self, epoch=secrets.randbelow(EPOCHS - 1) + 1)

    def changed(self, changes: Mapping[str, Any]) -> Settings:
        """These settings with ``changes``, whose values may be text. InvalidArgument says what is allowed."""
        values = msgspec.structs.asdict(self)
        for name, value in changes.items():
            if name not in self.shown:
                raise InvalidArgument(f"a namespace has no setting {name!r}{_nearest(name, self.shown)}")
            values[name] = _convert(name, value)
        settings = Settings(**values)
        if settings.low_water > settings.high_water:
            raise InvalidArgument(f"low_water {settings.low_water:g} is above high_water {settings.high_water:g}")
        return settings


_TYPES = {field.name: field.type for field in msgspec.structs.fields(Settings)}
_WORDS: dict[str, tuple[str, ...]] = {
    "kind": get_args(Kind),
    "tiers": get_args(Tiers),
    "compression": get_args(Compression),
    "cold": get_args(Cold),
    "eviction": tuple(POLICIES),
    "admission": tuple(ADMISSIONS),
}
_SAID = {"kind": ("files", "blocks")}
"""words that a message names, where those are not all"""
_SIZES = "capacity", "token_size", "bandwidth", "burst"
_EXPECTED = {
    "capacity": 'a size such as "64GiB", or 0 for as much as the namespace above it',
    "blocks": "a number of files, or 0 for any number",
    "ttl": "a number of seconds, 0 or more; 0: blocks do not expire",
    "high_water": "a share of the capacity, above 0 and up to 1",
    "low_water": "a share of the capacity, above 0 and up to 1",
    "bandwidth": 'bytes a second such as "200MB" or "1GiB", or 0 for any number',
    "iops": "a number of operations a second, or 0 for any number",
    "burst": 'a size such as "10MiB", or 0 for what bandwidth allows in a twentieth of a second',
    "weight": "a number from 0.01 to 100",
    "soft_pin": "true or false",
    "recompute_speed": "a number of tokens a second, or 0 to read whatever is there",
    "descriptor": "a JSON object",
    "token_size": 'bytes that a token has in blocks, such as "160KiB"',
}


def _nearest(word: str, known: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(word, known, 1)
    return f": did you mean {near[0]!r}?" if near else f"; it has {', '.join(known)}"


def _convert(name: str, value: Any) -> Any:
    if (words := _WORDS.get(name)) is not None:
        if value not in words:
            raise InvalidArgument(f"{name} is one of {', '.join(_SAID.get(name, words))}, not {value!r}")
        return value
    if name == "descriptor" and isinstance(value, str):
        return parse_descriptor(value)
    if name == "token":
        if not isinstance(value, str) or (value and not is_lock(value)):
            raise InvalidArgument("token is no lock of one")
        return value
    try:
        plain = parse_size(value) if name in _SIZES and isinstance(value, str) else value
        return msgspec.convert(plain, _TYPES[name], strict=False)
    except ValueError:
        raise InvalidArgument(f"{name} is {_EXPECTED[name]}; not {value!r}") from None


encode_settings = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(dict[str, Any]).decode


def decode_settings(value: bytes) -> Settings:
    """Of a record. Settings that this program does not know, of a later one, are left out. ValueError."""
    known = {name: found for name, found in _decode(value).items() if name in _TYPES}
    epoch = known.pop("epoch", 0)
    try:
        return msgspec.structs.replace(Settings().changed(known), epoch=msgspec.convert(epoch, Size))
    except InvalidArgument as error:
        raise ValueError(str(error)) from None
