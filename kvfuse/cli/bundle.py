"""What `kvfuse doctor --bundle` puts into one archive for a bug report. No bytes of blocks and files, no secrets."""

from __future__ import annotations

import io
import json
import os
import platform
import sys
import tarfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

import kvfuse
from kvfuse.cli import Failure, mounts
from kvfuse.cli.findings import Finding
from kvfuse.cli.redaction import Redaction, secrets_of
from kvfuse.cli.status import look_at
from kvfuse.errors import EngineTimeout, KvfuseError, MountError
from kvfuse.mounttable import Mounted
from kvfuse.options import config
from kvfuse.options.options import Options

LOG_SIZE = 1 << 20
"""bytes of the end of each log"""
FILE_SIZE_MAX = 1 << 20
SECONDS = 5.0
"""for each file of a disk that may hang"""
KERNEL_WORDS = "fuse", "kvfuse", "out of memory", "oom", "i/o error", "hung task", "blocked for more than"
PROCESS_FILES = "status", "limits", "cgroup", "wchan", "stack"
VIRTUAL_FILES = {"stats.json": "counters and gauges", "config.json": "options", "version.txt": "its version"}
"""of the archive, with the content of MNT/.kvfuse/NAME"""
SECRET_OPTIONS = "password_file", "key_file", "keyring", "key", "users"


class Part(NamedTuple):
    """One file of the archive."""

    name: str
    what: str
    text: str


class BundledMount(NamedTuple):
    """A mount of this machine, and what is known of its options."""

    folder: str
    """in the archive"""
    row: Mounted
    facts: dict[str, Any]
    """of `look_at`"""
    options: Options | None
    """None: neither its daemon nor its mount.conf tells"""

    @property
    def answers(self) -> bool:
        return self.facts["problem"] is None


def write_bundle(file: Path, findings: Sequence[Finding], source: Path | None, *, names: bool) -> list[Part]:
    """Make the archive, for its owner alone; what is in it. Failure where ``file`` exists, or cannot be written."""
    if file.exists():
        raise Failure(f"{file} exists: name a new file")
    found = [_look_at(number, row) for number, row in enumerate(mounts.kvfuse_mounts(), 1)]
    redaction = _redaction(found, source, names=names)
    parts = [part._replace(text=redaction.clean(part.text)) for part in _parts(found, findings, source, redaction)]
    listed = "".join(f"{part.name}: {part.what}\n" for part in parts)
    parts.insert(0, Part("CONTENTS.txt", "what each file is", listed))
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as stream, tarfile.open(fileobj=stream, mode="w:gz") as archive:
            for part in parts:
                data = part.text.encode("utf-8", "backslashreplace")
                entry = tarfile.TarInfo(f"kvfuse-bundle/{part.name}")
                entry.size, entry.mtime = len(data), int(time.time())
                archive.addfile(entry, io.BytesIO(data))
    except BaseException:
        file.unlink(missing_ok=True)
        raise
    return parts


def _parts(
    found: Iterable[BundledMount], findings: Sequence[Finding], source: Path | None, redaction: Redaction
) -> Iterator[Part]:
    yield Part("versions.txt", "versions of kvfuse, Python, packages and Linux", _versions())
    yield Part("machine.txt", "processors, memory, limits of the machine and its control group", _machine())
    yield Part("findings.json", "what kvfuse doctor found", _json([row._asdict() for row in findings]))
    yield Part("mounts.txt", "the table of mounts", _read(Path("/proc/self/mountinfo")))
    yield Part("dmesg.txt", "the kernel's lines about FUSE, memory and disks", _kernel_lines())
    if source is not None and source.is_file():
        yield Part("mount.conf", f"the text of {source.name}", _read(source))
    for one in found:
        yield from _of_mount(one, redaction)


def _of_mount(mount: BundledMount, redaction: Redaction) -> Iterator[Part]:
    row, folder, facts = mount.row, mount.folder, mount.facts
    yield Part(f"{folder}/status.json", "status of the mount, its daemon and its holder", _json(facts))
    for name, what in VIRTUAL_FILES.items() if mount.answers else ():
        yield Part(f"{folder}/{name}", f"{what}, as the daemon tells", _virtual(row.point, Path(name).stem, redaction))
    if (path := Path(row.source)).is_file():
        yield Part(f"{folder}/mount.conf", "its mount.conf", _read(path))
    holder = facts["holder"] or {}
    for name, pid in (("daemon", facts["pid"] or holder.get("pid")), ("holder", holder.get("holder"))):
        if pid is not None:
            yield Part(f"{folder}/{name}.txt", f"memory, limits and threads of the {name}", _process(int(pid)))
    if mount.options is not None:
        with suppress(KvfuseError):
            yield Part(f"{folder}/log.txt", "the end of its log", _read(mount.options.log_file, tail=LOG_SIZE))


def _look_at(number: int, row: Mounted) -> BundledMount:
    """Ask the daemon for its options only where it answers at all."""
    found = BundledMount(f"mount-{number}", row, look_at(row), None)
    return found._replace(options=_options_of(found))


# -- one part -----------------------------------------------------------------------------------------


def _json(content: object) -> str:
    return json.dumps(content, indent=1, default=str) + "\n"


def _read(path: Path, tail: int | None = None) -> str:
    """The text of a file, or its end; where it cannot be read, the reason. Never waits long."""

    def read() -> bytes:
        with path.open("rb") as file:
            if tail is not None and (size := os.fstat(file.fileno()).st_size) > tail:
                file.seek(size - tail)
            return file.read(tail or FILE_SIZE_MAX)

    try:
        return mounts.within(SECONDS, read).decode("utf-8", "backslashreplace")
    except (OSError, EngineTimeout) as error:
        return f"(not readable: {getattr(error, 'strerror', None) or error})\n"


def _versions() -> str:
    names = sorted({one.metadata["Name"] for one in metadata.distributions() if one.metadata["Name"]})
    native = [name for name in ("_native", "_fusewire", "_blocks", "_peers") if find_spec(f"kvfuse.native.{name}")]
    lines = [
        f"kvfuse {kvfuse.__version__} in {Path(kvfuse.__file__).parent}",
        f"native parts: {', '.join(native) or 'none'}",
        f"Python {platform.python_version()} {sys.executable}",
        f"Linux {platform.release()} {platform.version()} {platform.machine()}",
        *(f"{name} {metadata.version(name)}" for name in names),
    ]
    return "\n".join(lines) + "\n"


def _machine() -> str:
    parts = [f"processors: {os.cpu_count()}, usable: {len(os.sched_getaffinity(0))}\nuser: {os.geteuid()}\n"]
    files = "/proc/meminfo", "/proc/loadavg", "/proc/pressure/memory", "/proc/pressure/io", "/proc/self/limits"
    group = Path("/sys/fs/cgroup")
    limits = [group / name for name in ("memory.max", "memory.current", "cpu.max", "pids.max")]
    for path in (*map(Path, files), *(path for path in limits if path.exists())):
        parts.append(f"\n== {path}\n{_read(path)}")
    shared = os.statvfs("/dev/shm") if Path("/dev/shm").is_dir() else None
    if shared is not None:
        parts.append(
            f"\n/dev/shm: {shared.f_bavail * shared.f_frsize} of {shared.f_blocks * shared.f_frsize} bytes free\n"
        )
    return "".join(parts)


def _kernel_lines() -> str:
    """Of the kernel's ring buffer, where this user may read it."""
    try:
        descriptor = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        return f"(not readable: {error.strerror})\n"
    lines: list[str] = []
    with open(descriptor, "rb", buffering=0) as stream:
        while True:
            try:
                record = os.read(stream.fileno(), 8192).decode("utf-8", "backslashreplace")
            except BlockingIOError:
                return "".join(lines)
            except OSError:  # EPIPE: it was overwritten meanwhile
                continue
            head, _, message = record.partition(";")
            if any(word in message.lower() for word in KERNEL_WORDS):
                lines.append(f"{int(head.split(',')[2]) / 1e6:.6f} {message.splitlines()[0]}\n")


def _process(pid: int) -> str:
    """What /proc says of a process and each of its threads: where one hangs is seen here."""
    folder = Path(f"/proc/{pid}")
    parts = [f"== {name}\n{_read(folder / name)}\n" for name in PROCESS_FILES]
    with suppress(OSError):
        for thread in sorted((folder / "task").iterdir(), key=lambda path: int(path.name)):
            words = [_read(thread / name).strip() for name in ("comm", "wchan", "stack")]
            parts.append(f"== thread {thread.name} {' '.join(words)}\n")
    return "".join(parts)


def _virtual(point: Path, name: str, redaction: Redaction) -> str:
    """A file of MNT/.kvfuse; where the daemon does not answer, that."""
    try:
        if name == "version":
            return _read(point / ".kvfuse" / name)
        content = mounts.read_virtual(point, name)
    except MountError as error:
        return _json({"problem": str(error)})
    if not redaction.names:
        _hide_namespaces(content)
    return _json(content)


def _hide_namespaces(content: dict[str, Any]) -> None:
    """Paths of namespaces are names of folders of the mount."""
    for row in content.get("namespaces") or ():
        if row.get("path") != "/":
            row["path"] = f"namespace {row.get('number')}"


# -- what is removed ----------------------------------------------------------------------------------


def _options_of(mount: BundledMount) -> Options | None:
    """As its daemon tells, else as its mount.conf or volume does."""
    if mount.answers:
        with suppress(MountError, msgspec.ValidationError):
            content = mounts.read_virtual(mount.row.point, "config")
            return msgspec.convert(content, Options, strict=False, dec_hook=lambda kind, value: kind(value))
    with suppress(KvfuseError, OSError):
        return config.load(Path(mount.row.source)).options
    return None


def _redaction(found: Sequence[BundledMount], source: Path | None, *, names: bool) -> Redaction:
    options = [one.options for one in found if one.options is not None]
    if source is not None:
        with suppress(KvfuseError):
            options.append(config.load(source).options)
    files = [path for one in options for path in _secret_files(one)]
    places = [Path(sys.prefix), Path(sys.base_prefix), Path(kvfuse.__file__).parent, *files]
    places += [Path(one.row.source) for one in found] + ([source] if source is not None else [])
    for one in options:
        with suppress(KvfuseError):
            places.append(one.log_file)
    points = [one.row.point for one in found]
    return Redaction(secrets_of(_read, files), places, points, names=names)


def _secret_files(options: Options) -> Iterator[Path]:
    for section in (options.records, options.segments, options.index, options.http):
        for name in SECRET_OPTIONS:
            if (path := getattr(section, name, None)) is not None:
                yield path
