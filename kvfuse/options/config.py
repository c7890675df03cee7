"""Options of a mount: mount.conf (TOML) and ``-o`` words become frozen structs.

Order of precedence, lowest first: built-in default, mount.conf, ``-o``, the command line's SOURCE. Every effective
value knows where it came from (``Effective.origins``). What is wrong is a ``ConfigError`` that names the key, the line
and what was expected; nothing is ever ignored in silence, except words of fstab that concern mount(8) alone.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec
from msgspec import Meta

from kvfuse.errors import ConfigError
from kvfuse.options.options import (
    SIZES,
    BlockOptions,
    BucketOptions,
    ColdBucketOptions,
    EtcdIndexOptions,
    EtcdOptions,
    HttpOptions,
    KernelFlag,
    NamespaceOptions,
    OmapIndexOptions,
    RadosOptions,
    RedisIndexOptions,
    meant_kind,
)
from kvfuse.options.options import Options as Options
from kvfuse.sizes import GIB, MIB, format_size, parse_size

CAPACITY_DEFAULT_MAX = 64 * GIB


@dataclass(frozen=True)
class Effective:
    """Options, and for every key ("publish.mode") where its value came from."""

    options: Options
    origins: dict[str, str]
    source: Path | None = None
    """what the user named: the volume's folder or the mount.conf"""
    text: str | None = None
    """of the mount.conf"""

    def rows(self) -> Iterator[tuple[str, Any, str]]:
        """(key, value, origin) in the order of mount.conf."""
        for key, origin in self.origins.items():
            section, name = key.split(".")
            tables = (getattr(self.options, section), *(struct() for struct in TABLES[section].values()))
            value = next(getattr(table, name) for table in tables if hasattr(table, name))
            if key == "publish.mode" and value is None:
                value, origin = self.options.publish_mode, f"default with records.engine {self.options.records.engine}"
            yield key, value, origin


# -- what may be written ----------------------------------------------------------------------------

TABLES: dict[str, dict[Any, Any]] = {
    table.name: {struct.__struct_config__.tag: struct for struct in get_args(table.type) or (table.type,)}
    for table in msgspec.structs.fields(Options)
}
"""every table of mount.conf -> its struct, or those of its engines, by name; the first is the default"""


def _find_keys() -> Iterator[tuple[str, Any]]:
    for table, structs in TABLES.items():
        if len(structs) > 1:
            yield f"{table}.engine", Literal.__getitem__(tuple(structs))
        for struct in structs.values():
            own, fields = struct.__annotations__, msgspec.structs.fields(struct)
            for field in sorted(fields, key=lambda field: field.name not in own):
                yield f"{table}.{field.name}", field.type


KEYS: dict[str, Any] = dict(_find_keys())
"""every key of mount.conf -> the type of its value"""

UNSET: dict[str, str] = {
    "volume.path": "SOURCE",
    "volume.capacity": "the smaller of 64GiB and half of the free disk",
    "volume.slab_size": "chosen from the capacity",
    "volume.metadata_size": "a sixteenth of the capacity, at least 32MiB; with etcd at most 2GiB",
    "records.path": "records, in the volume's folder",
    "records.user": "none",
    "records.password_file": "none",
    "records.ca_file": "those that the system trusts",
    "records.cert_file": "none",
    "records.key_file": "none",
    "segments.path": "segments, in the volume's folder",
    "segments.pool": "must be set",
    "segments.namespace": "the volume's name",
    "segments.keyring": "as ceph.conf says",
    "segments.devices": "must be set",
    "segments.weights": "as the devices have room",
    "segments.domains": "each device fails alone",
    "segments.endpoint": "Amazon's, of the region",
    "segments.prefix": "the name of the volume's folder",
    "segments.bucket": "must be set",
    "segments.credentials_file": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment",
    "segments.ca_file": "those that the system trusts",
    "cold.endpoint": "Amazon's, of the region",
    "cold.prefix": "the name of the volume's folder",
    "cold.bucket": "must be set",
    "cold.capacity": "must be set",
    "cold.credentials_file": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment",
    "cold.ca_file": "those that the system trusts",
    "index.url": "must be set",
    "index.user": "the server's default",
    "index.password_file": "none",
    "index.ca_file": "those that the system trusts",
    **dict.fromkeys([f"namespace.{name}" for name in NamespaceOptions.__struct_fields__], "as stored in the volume"),
    "cache.tier_node": "whichever",
    "cache.disk_path": "nowhere",
    "cache.disk_size": "all of a device",
    "publish.mode": "strict where the record store is shared, else relaxed",
    "mount.default_permissions": "where users other than root may come in",
    "mount.outlive": "where the machine has all that takes",
    "mount.standby": "where there is memory for it: 512MiB in all, and 256MiB free",
    "usrbio.user_iov_size": "128 times the memory that the daemon may have",
    "usrbio.user_charged_size": "an eighth of the memory that the daemon may have",
    "peer.listen": "nowhere",
    "peer.rdma_devices": "those nearest to the daemon",
    "peer.rdma_depth": "256, for small blocks 1024",
    "peer.rdma_parallel_reads": "16",
    "peer.rdma_timeout": "14, for small blocks 12",
    "peer.rdma_retries": "5",
    "peer.rdma_mtu": "4096",
    "peer.rdma_traffic_class": "0",
    "metrics.listen": "nowhere",
    "http.listen": "nowhere",
    "http.users": "none",
    "http.certificate": "none: plain HTTP",
    "http.key": "none",
    "http.anonymous": "nobody",
    "trace.endpoint": "nowhere",
    "log.journal": "where stderr is the journal",
    "log.file": "log, in the volume's folder, or /var/log/kvfuse-NAME.log; in the foreground stderr",
}
"""texts for keys whose value is None, or an empty list that says nothing"""

_FLAG_WORDS: dict[str, tuple[str, bool | str]] = {
    "cache": ("namespace.kind", "cache"),
    "ro": ("mount.read_only", True),
    "rw": ("mount.read_only", False),
    "atime": ("mount.atime", "relatime"),
    "noatime": ("mount.atime", "noatime"),
    "relatime": ("mount.atime", "relatime"),
    "norelatime": ("mount.atime", "relatime"),  # "the kernel's default", as mount(8) has it
    "strictatime": ("mount.atime", "strictatime"),
    "nostrictatime": ("mount.atime", "relatime"),
    "diratime": ("mount.diratime", True),
    "nodiratime": ("mount.diratime", False),
}
_FORMER_VALUES: dict[str, dict[bool | str, str]] = {
    "mount.atime": {True: "relatime", False: "noatime", "true": "relatime", "false": "noatime"}
}
"""former values of a key -> their present meaning"""
_SLASHED_KEYS = frozenset(("peer.advertise", "peer.rdma_devices"))
"""lists whose parts may have colons in them: slashes separate them in ``-o``"""
_SHORT_WORDS = {
    "publish": "publish.mode",
    # index has such keys, too, but had none when these words came into fstabs
    "password_file": "records.password_file",
    "ca_file": "records.ca_file",
    # likewise segments and cold, of engine s3
    "capacity": "volume.capacity",
    "endpoint": "trace.endpoint",
    "object_size": "segments.object_size",
    "prefix": "records.prefix",
    "rate": "scrub.rate",
}
# fmt: off
_URLS = ("records.endpoints", "index.url", "segments.endpoint", "cold.endpoint")
_IGNORED_WORDS = frozenset((
    "defaults", "_netdev", "nofail", "auto", "noauto", "comment", "user", "nouser", "users", "owner", "noowner",
    "group", "nogroup", "async", "lazytime", "nolazytime", "silent", "loud", "mand", "nomand", "iversion", "noiversion",
))
# fmt: on
"""words of fstab that are for mount(8), systemd or other file systems"""


_LAST_PARTS = Counter(key.split(".")[1] for key in KEYS)
NAMES = {key.split(".")[1]: key for key in KEYS if _LAST_PARTS[key.split(".")[1]] == 1}
NAMES |= {key: key for key in KEYS} | _SHORT_WORDS
"""``-o`` name -> key: every whole key, and its last part where no other key ends so"""


# -- one value --------------------------------------------------------------------------------------


def flag_words() -> Iterator[tuple[str, tuple[str, bool | str]]]:
    """(``-o`` word without a value, (key, value))."""
    yield from _FLAG_WORDS.items()


def expectation(key: str) -> str:
    """What a value of ``key`` looks like, in words."""
    return _expectation(KEYS[key])


def _holds_sizes(annotation: Any) -> bool:
    return annotation in SIZES or any(_holds_sizes(part) for part in get_args(annotation))


def is_size(key: str) -> bool:
    """The value of ``key`` is a number of bytes, or a list of them."""
    return _holds_sizes(KEYS[key])


def _expectation(annotation: Any) -> str:
    """What a value of this type looks like, in words."""
    if annotation is bool:
        return "true or false"
    if annotation is Path:
        return "a path"
    if get_origin(annotation) is Literal:
        return "one of " + ", ".join(repr(choice) for choice in get_args(annotation))
    if get_origin(annotation) is tuple:
        return "a list of " + _expectation(get_args(annotation)[0])
    for part in get_args(annotation):
        if isinstance(part, Meta) and part.description:
            return part.description
    return _expectation(get_args(annotation)[0])


def _masked(text: str) -> str:
    """Without what stands before the last @ of a URL: it may be a password."""
    return re.sub(r"://.*@", "://***@", text, flags=re.DOTALL)


def _found(value: Any) -> str:
    text = {True: "true", False: "false"}[value] if isinstance(value, bool) else _masked(repr(value))
    return text if len(text) <= 60 else text[:57] + "..."


def _to_bytes(value: Any) -> Any:
    """Sizes written as text become numbers, also inside a list."""
    if isinstance(value, list):
        return [_to_bytes(part) for part in value]
    return parse_size(value) if isinstance(value, str) else value


def _hook(wanted: type, value: Any) -> Any:
    """msgspec asks here about the one type it does not know."""
    if wanted is Path and isinstance(value, str) and value and "\0" not in value:
        return Path(value).expanduser()
    raise ValueError("not a path")


def _convert(key: str, value: Any, base: Path, where: str, *, from_text: bool = False) -> Any:
    """``value`` as the type of ``key``; relative paths are below ``base``.

    ``from_text``: the value is text of an ``-o`` word, so that "5" may be a number.
    """
    annotation = KEYS[key]
    value = _FORMER_VALUES.get(key, {}).get(value, value) if isinstance(value, bool | str) else value
    try:
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError("not finite")
        plain = _to_bytes(value) if is_size(key) else value
        result = msgspec.convert(plain, annotation, strict=not from_text, dec_hook=_hook)
    except (ValueError, RuntimeError):  # RuntimeError: expanduser found no home
        if key in _URLS and "@" in str(value):
            where = where.partition("=")[0]  # the rest may be a password
            table = key.partition(".")[0]
            remedy = f"set {table}.user and {table}.password_file"
            if key in ("segments.endpoint", "cold.endpoint"):
                remedy = f"set {table}.credentials_file"
            raise ConfigError(f"{where}: {key}: a user and a password have no place in a URL: {remedy}") from None
        expected = _expectation(annotation)
        raise ConfigError(f"{_masked(where)}: {key} is wrong - expected {expected}; found {_found(value)}") from None
    return base / result if isinstance(result, Path) else result


def _nearest(word: str, known: Iterable[str], otherwise: str) -> str:
    """ " - did you mean ...?", or " - " and ``otherwise`` where no known word is like it."""
    names = list(known)
    last = word.split(".")[-1]
    if NAMES.get(last) in names:
        return f" - did you mean '{NAMES[last]}'?"
    same_last = [name for name in names if name.split(".")[-1] == last]
    near = difflib.get_close_matches(word, same_last, 1, 0.0) or difflib.get_close_matches(word, names, 1, 0.6)
    return f" - did you mean '{near[0]}'?" if near else f" - {otherwise}"


# -- mount.conf -------------------------------------------------------------------------------------

_TABLE_LINE = re.compile(r"\s*\[\s*([^\[\]]+?)\s*\]\s*(#.*)?$")
_KEY_LINE = re.compile(r"""\s*((?:[\w-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[\w-]+|"[^"]*"|'[^']*'))*)\s*=""")


def _key_lines(text: str) -> dict[str, int]:
    """Line on which each table and key of a TOML text stands (tomllib does not tell)."""
    lines: dict[str, int] = {}
    table = ""
    for number, line in enumerate(text.splitlines(), 1):
        if match := _TABLE_LINE.match(line):
            table = re.sub(r"""\s|["']""", "", match[1])
            lines.setdefault(table, number)
        elif match := _KEY_LINE.match(line):
            key = re.sub(r"""\s|["']""", "", match[1])
            lines.setdefault(f"{table}.{key}" if table else key, number)
    return lines


def _text_of(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        raise ConfigError(f"{file} is not a text file: a mount.conf is TOML in UTF-8") from None


def _read_file(file: Path, text: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(key -> value, key -> "FILE:line") of a mount.conf."""
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        message, _, place = str(error).partition(" (at ")
        line = re.match(r"line (\d+)", place)
        where = f"{file.name} line {line[1]}" if line else file.name
        raise ConfigError(f"{where}: not TOML: {message}") from None
    lines = _key_lines(text)
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for key, value in _flatten(tree):
        line_number = lines.get(key) or lines.get(key.split(".")[0])
        where = f"{file.name} line {line_number}" if line_number else file.name
        if key not in KEYS:
            tables = f"the tables are {', '.join(Options.__struct_fields__)}"
            raise ConfigError(f"{where}: unknown key '{key}'{_nearest(key, KEYS, tables)}")
        values[key] = _convert(key, value, file.parent.absolute(), where)
        origins[key] = f"{file}:{line_number}" if line_number else str(file)
    return values, origins


def _flatten(tree: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Dotted key and value of everything one table deep. A table's name alone is a key too, if it is no table."""
    for section, content in tree.items():
        if isinstance(content, dict) and content:
            for name, value in content.items():
                yield f"{section}.{name}", value
        elif not isinstance(content, dict) or section not in Options.__struct_fields__:
            yield section, content


# -- -o words ---------------------------------------------------------------------------------------


def _split_list(key: str, text: str) -> list[str]:
    """Parts between colons; of URLs, which have colons in them, between those before the next URL.

    Of HOST:PORT between slashes, as mount.ceph has it.
    """
    if key in _SLASHED_KEYS:
        return text.split("/")
    return re.split(":(?=https?://)", text) if "://" in text else text.split(":")


def _read_words(texts: Sequence[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """(key -> value, key -> "-o word") of mount options; a later word wins."""
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for word in (word.strip() for text in texts for word in text.split(",")):
        name = word.partition("=")[0]
        if not word or name in _IGNORED_WORDS or name.lower().startswith("x-"):
            continue
        key, value = _read_word(word)
        if key == "mount.flags":
            value = (*values.get(key, ()), *value)
        values[key] = value
        origins[key] = f"{origins[key]},{word}" if key == "mount.flags" and key in origins else f"-o {word}"
    return values, origins


def _read_word(word: str) -> tuple[str, Any]:
    """Key and value of one ``-o`` word that is not ignored."""
    name, equals, text = word.partition("=")
    if name == "remount":
        raise ConfigError("-o remount is not supported: unmount and mount again")
    if not equals and name in _FLAG_WORDS:
        return _FLAG_WORDS[name]
    if not equals and name in get_args(KernelFlag):
        return "mount.flags", (name,)
    key = NAMES.get(name)
    if key is None:
        known = [*NAMES, *_FLAG_WORDS, *get_args(KernelFlag), *_IGNORED_WORDS]
        help_there = "'kvfuse config' lists the keys"
        raise ConfigError(f"-o {_masked(word)}: unknown option '{name}'{_nearest(name, known, help_there)}")
    if not equals and KEYS[key] in (bool, bool | None):
        return key, True
    value: Any = _split_list(key, text) if get_origin(KEYS[key]) is tuple else text
    return key, _convert(key, value, Path.cwd(), f"-o {word}", from_text=True)


# -- the whole --------------------------------------------------------------------------------------


def load(
    source: Path | None = None, *, file: Path | None = None, words: Sequence[str] = (), text: str | None = None
) -> Effective:
    """The effective options of ``kvfuse mount [-c file] source ... [-o words]``.

    ``source`` is a volume's folder (absent or not), or a mount.conf. ConfigError where something is wrong.
    ``text``: what the mount.conf said when it was read before, and may not say any more.
    """
    source = source.absolute() if source else None
    if text is not None and file is None:
        file = source
    elif source and source.is_file():
        if file is not None:
            raise ConfigError(f"{source} is a file and -c gives {file}: only one of them can be the mount.conf")
        file = source
    elif source and not source.exists() and source.suffix in (".conf", ".toml"):
        raise ConfigError(f"{source} does not exist")
    values: dict[str, Any] = {}
    origins = dict.fromkeys(KEYS, "default")
    if file and text is None:
        text = _text_of(file)
    from_file = _read_file(file, text) if file and text is not None else ({}, {})
    for more_values, more_origins in (from_file, _read_words(words)):
        values |= more_values
        origins |= more_origins
    if source and source != file:
        values["volume.path"], origins["volume.path"] = source, "command line"
    options = _build(values)
    _check_combination(options, origins)
    if (kind := options.namespace.kind) is not None:
        meant = meant_kind(kind)
        options = msgspec.structs.replace(options, namespace=msgspec.structs.replace(options.namespace, kind=meant))
    return Effective(options, origins, source or file, text)


def _build(values: dict[str, Any]) -> Options:
    """Without the keys that other engines have: `_check_combination` finds them."""
    tables = {}
    for table, structs in TABLES.items():
        struct = structs[values.get(f"{table}.engine", next(iter(structs)))]
        keys = {name: f"{table}.{name}" for name in struct.__struct_fields__}
        tables[table] = struct(**{name: values[key] for name, key in keys.items() if key in values})
    return Options(**tables)


# -- which options go together ----------------------------------------------------------------------

_ONLY_BESIDE = {"volume.name": "records.prefix", "client.lease": "records.deadline"}
"""keys that say nothing where the engine has no such other one"""


def _check_combination(options: Options, origins: dict[str, str]) -> None:
    """ConfigError where options that were given do not go together, or one that the others need is not given."""
    for key in (key for key, origin in origins.items() if origin != "default"):
        table, name = _ONLY_BESIDE.get(key, key).split(".")
        if not hasattr(getattr(options, table), name):
            engine = next(engine for engine, struct in TABLES[table].items() if hasattr(struct, name))
            here = getattr(options, table).engine
            raise ConfigError(f"{origins[key]}: {key} is for {table}.engine '{engine}', which here is '{here}'")
    _check_disk_tier(options, origins)
    _check_devices(options)
    _check_index(options)
    _check_buckets(options)
    _check_http(options.http)
    if isinstance(options.records, EtcdOptions):
        _check_shared(options, options.records, origins)
    elif isinstance(options.segments, RadosOptions):
        raise ConfigError(
            "segments.engine 'rados' needs records.engine 'etcd': records in 'lmdb' are one host's, and others that"
            " reach the pool would not see them"
        )


def _check_disk_tier(options: Options, origins: dict[str, str]) -> None:
    path, size = options.cache.disk_path, options.cache.disk_size
    if path is None and size is not None:
        raise ConfigError("cache.disk_size is for cache.disk_path, which is not set: give both, or none")
    if path is not None and not options.is_shared:
        raise ConfigError(
            f"{origins['cache.disk_path']}: cache.disk_path is for volumes whose segments are elsewhere (records.engine"
            " 'etcd'): this one's are files of this host, copies of which would only take room"
        )


def _check_devices(options: Options) -> None:
    segments = options.segments
    if not isinstance(segments, BlockOptions):
        return
    if not segments.devices:
        raise ConfigError("segments.devices is not set: name the block devices that the hosts of the volume share")
    if len(set(segments.devices)) < len(segments.devices):
        raise ConfigError("segments.devices names a device twice")
    for key, values in (("weights", segments.weights), ("domains", segments.domains)):
        if values and len(values) != len(segments.devices):
            raise ConfigError(
                f"segments.{key} has {len(values)} items, segments.devices {len(segments.devices)} paths:"
                " give one for each, or none"
            )


def _check_index(options: Options) -> None:
    index = options.index
    if isinstance(index, EtcdIndexOptions | RedisIndexOptions) and not options.is_shared:
        raise ConfigError(
            f"index.engine '{index.engine}' needs records.engine 'etcd': a volume of one host, as this is, has no index"
        )
    if isinstance(index, OmapIndexOptions) and not isinstance(options.segments, RadosOptions):
        here = options.segments.engine
        raise ConfigError(f"index.engine 'omap' needs segments.engine 'rados', which here is '{here}'")
    if not isinstance(index, RedisIndexOptions):
        return
    if index.url is None:
        raise ConfigError("index.url is not set: name the Redis server of the index")
    if index.user is not None and index.password_file is None:
        raise ConfigError("index.user needs index.password_file")
    if index.ca_file is not None and not index.url.startswith("rediss:"):
        raise ConfigError("index.ca_file is for rediss://, but index.url is of redis://")


def _check_buckets(options: Options) -> None:
    cold = options.cold
    for table, bucket in (("segments", options.segments), ("cold", cold)):
        if isinstance(bucket, BucketOptions):
            if bucket.bucket is None:
                raise ConfigError(f"{table}.bucket is not set: {table}.engine 's3' needs the name of a bucket")
            if options.is_shared and table == "segments":
                raise ConfigError(f"{table}.engine 's3' is for volumes of one host: records.engine 'lmdb'")
    if isinstance(cold, ColdBucketOptions):
        if isinstance(options.index, RedisIndexOptions):
            raise ConfigError(
                "cold.engine 's3' of a shared volume needs index.engine 'etcd' or 'omap', and not 'redis': a Redis"
                " server that restarts may forget which blocks were removed"
            )
        if cold.capacity is None:
            raise ConfigError("cold.capacity is not set: say how many bytes of the bucket the volume may use")
        if cold.capacity < 4 * cold.object_size:
            raise ConfigError("cold.capacity is to be four times cold.object_size, at least")


def _check_http(http: HttpOptions) -> None:
    if (http.certificate is None) != (http.key is None):
        raise ConfigError("http.certificate and http.key go together: give both, or none")
    if http.listen is None:
        return
    is_socket = http.listen.startswith("unix:")
    if is_socket and (http.users or http.certificate or http.anonymous):
        raise ConfigError(
            "http.listen is a socket, whose clients the kernel names: http.users, http.certificate and http.anonymous"
            " are for HOST:PORT"
        )
    is_loopback = http.listen.rpartition(":")[0] in ("localhost", "127.0.0.1", "[::1]")
    if http.anonymous is not None and not is_loopback:
        raise ConfigError(f"http.anonymous is for a loopback address, and http.listen is {http.listen}")
    if not (is_socket or http.users or http.anonymous):
        raise ConfigError(
            "http.listen needs http.users, a file with users and hashes of their tokens: type 'kvfuse serve-http"
            " --new-token NAME'; or, on a loopback address, http.anonymous = UID:GID"
        )


def _check_shared(options: Options, records: EtcdOptions, origins: dict[str, str]) -> None:
    segments, folder = options.segments, getattr(options.segments, "path", None)
    _ = options.key_prefix  # ConfigError where the volume has no name
    if options.namespace.blocks is not None:
        origin = origins["namespace.blocks"]
        raise ConfigError(f"{origin}: namespace.blocks is not offered for a volume that several hosts share")
    if options.has_segment_files and options.volume.path is None and folder is None:
        raise ConfigError("segments.path is not set: name the segments' folder, on a file system that all hosts share")
    if isinstance(segments, RadosOptions) and segments.pool is None:
        raise ConfigError("segments.pool is not set: name the RADOS pool of the segments")
    if options.volume.path is not None and (not options.has_segment_files or folder is not None):
        raise ConfigError(
            f"{origins['volume.path']}: volume.path is {options.volume.path}, but this volume has no folder: its"
            " records are in etcd; give the mount.conf alone"
        )
    for one, other in (("user", "password_file"), ("cert_file", "key_file")):
        if (getattr(records, one) is None) != (getattr(records, other) is None):
            raise ConfigError(f"records.{one} and records.{other} go together: give both, or none")
    uses_tls = {endpoint.startswith("https://") for endpoint in records.endpoints}
    if len(uses_tls) != 1:
        raise ConfigError("records.endpoints must be one or more URLs, all of http:// or all of https://")
    for name in ("ca_file", "cert_file"):
        if getattr(records, name) is not None and uses_tls == {False}:
            raise ConfigError(f"records.{name} is for https://, but records.endpoints are of http://")
    if records.deadline >= options.client.lease:
        raise ConfigError(
            f"client.lease is {options.client.lease:g} s: it must be longer than records.deadline,"
            f" {records.deadline:g} s, or one slow call would lose it"
        )
    if isinstance(segments, RadosOptions | BlockOptions) and 1.5 * segments.deadline >= options.client.lease:
        raise ConfigError(
            f"client.lease is {options.client.lease:g} s: it must be longer than one and a half times"
            f" segments.deadline, {segments.deadline:g} s: a write is begun only if it ends before the lease may"
        )


# -- the space below --------------------------------------------------------------------------------


def disk_free(path: Path) -> int:
    """Bytes that this user may still write where ``path`` is, or will be."""
    existing = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())
    figures = os.statvfs(existing)
    return figures.f_bavail * figures.f_frsize


def default_capacity(free: int) -> int:
    """The smaller of 64 GiB and half of the ``free`` bytes below the segments, in whole MiB."""
    return min(CAPACITY_DEFAULT_MAX, free // 2) // MIB * MIB


def check_capacity(capacity: int, free: int, place: str) -> None:
    """ConfigError where the ``free`` bytes of ``place`` could not keep the promise of ``capacity`` bytes."""
    if capacity > free:
        raise ConfigError(
            f"a capacity of {format_size(capacity)} is more than the {format_size(free)} that are free {place}"
        )
