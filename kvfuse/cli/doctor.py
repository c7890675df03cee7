"""kvfuse doctor"""

from __future__ import annotations

import errno
import os
import platform
import re
import resource
import shutil
import socket
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click

import kvfuse
from kvfuse.cli import checks, mounts
from kvfuse.cli.console import print_json, print_table, say
from kvfuse.cli.findings import DEGRADED, MISSING, OK, WARN, Finding
from kvfuse.cli.version import installed_version
from kvfuse.errors import KvfuseError, MountError
from kvfuse.holder import status_socket
from kvfuse.holder.guarding import CONNECTIONS
from kvfuse.options import config
from kvfuse.options.config import Options
from kvfuse.options.options import BlockOptions, CacheOptions, ColdBucketOptions, RedisIndexOptions
from kvfuse.sizes import GIB, format_size

KERNEL_MIN = (5, 4)
"""what pyfuse3 and preadv2 need"""
CONNECT_SECONDS = 2.0
OPEN_FILES_MIN = 4096
SHARED_MEMORY_MIN = GIB
HELPERS = ("mount.kvfuse", "mount.fuse.kvfuse", "umount.kvfuse", "umount.fuse.kvfuse")
HELPER_FOLDERS = ("/sbin", "/usr/sbin")


def check_python() -> Iterator[Finding]:
    """The interpreter and the packages that kvfuse declares."""
    yield Finding("python", OK, platform.python_version() + f", {sys.executable}")
    for requirement in _requirements():
        name, _, needed = requirement.partition(">=")
        found = installed_version(name)
        remedy = f"{sys.executable} -m pip install '{requirement}'"
        if found is None:
            yield Finding(name, MISSING, "not installed", remedy)
        elif _numbers(found) < _numbers(needed):
            yield Finding(name, MISSING, f"{found} is too old", remedy)
        else:
            yield Finding(name, OK, found)


def _requirements() -> list[str]:
    """The packages that kvfuse needs at run time, as "name>=version"."""
    try:
        declared = metadata.requires("kvfuse") or []
    except metadata.PackageNotFoundError:  # run from a source tree
        project = tomllib.loads((Path(kvfuse.__file__).parents[1] / "pyproject.toml").read_text())["project"]
        declared = project["dependencies"]
    parts = (requirement.partition(";") for requirement in declared)
    return [requirement.strip() for requirement, _, marker in parts if _is_needed(marker)]


def _is_needed(marker: str) -> bool:
    """On this machine, as kvfuse writes its markers: no extra, "==" of one of some machines, or "!=" of all of them."""
    named = re.findall(r"platform_machine ([!=]=) [\"'](\w+)[\"']", marker)
    hits = [(sign == "==") == (name == platform.machine()) for sign, name in named]
    return "extra ==" not in marker and (not hits or (any(hits) if "==" in named[0] else all(hits)))


def _numbers(version: str) -> list[int]:
    """Of "1.20.3rc1": 1, 20, 3."""
    return [int(number) for number in re.findall(r"(?:^|\.)(\d+)", version)]


def check_kernel() -> Iterator[Finding]:
    """Linux, and FUSE in it."""
    release = platform.release()
    numbers = tuple(int(part) for part in release.split("-")[0].split(".")[:2] if part.isdigit())
    state, remedy = (OK, "") if numbers >= KERNEL_MIN else (WARN, "a newer kernel")
    yield Finding("kernel", state, release, remedy)
    if problem := checks.fuse_device_problem():
        yield Finding("/dev/fuse", MISSING, *problem)
    else:
        yield Finding("/dev/fuse", OK, "can be opened")


def check_fusermount() -> Iterator[Finding]:
    """The program and the right that a mount by another user than root needs."""
    program = shutil.which("fusermount3")
    root = os.geteuid() == 0
    if program:
        yield Finding("fusermount3", OK, program)
    else:
        state = WARN if root else MISSING
        yield Finding("fusermount3", state, "not found: only root can mount", "apt-get install fuse3")
    if root or checks.users_may_allow_other():
        yield Finding("allow_other", OK, "may be used")
    else:
        yield Finding("allow_other", WARN, "for root only", f"echo user_allow_other | sudo tee -a {checks.FUSE_CONF}")


def check_checksums() -> Iterator[Finding]:
    """CRC32C by the processor; in plain Python every byte would cost 60 times as much."""
    try:
        import google_crc32c

        implementation = google_crc32c.implementation
    except ImportError:
        return  # among the missing packages already
    if implementation == "c":
        yield Finding("CRC32C", OK, "by the processor")
    else:
        remedy = f"{sys.executable} -m pip install --force-reinstall google-crc32c"
        yield Finding("CRC32C", WARN, f"in software ({implementation}): reads and writes will be slow", remedy)


def check_native() -> Iterator[Finding]:
    """What is in C: with it clients find and copy blocks, and the daemon has fewer requests of the kernel to answer."""
    missing = [] if find_spec("kvfuse.native._blocks") is not None else ["look-ups and small gets"]
    if find_spec("kvfuse.native._fusewire") is None:
        missing.append("files of the mount")
    if missing:
        again = f"{sys.executable} -m pip install --force-reinstall FOLDER, of the source"
        remedy = f"apt-get install gcc python3-dev pkg-config libfuse3-dev, and {again}"
        yield Finding("native parts", WARN, f"were not built: {' and '.join(missing)} are slower", remedy)
    else:
        yield Finding("native parts", OK, "are there")


def check_bytecode() -> Iterator[Finding]:
    """What Python keeps of a module that it has compiled."""
    spec = find_spec("kvfuse.fs.mount_session")
    if spec is None or spec.cached is None or spec.origin is None:
        return
    is_made = not sys.dont_write_bytecode and os.access(Path(spec.origin).parent, os.W_OK)
    if is_made or Path(spec.cached).exists():
        yield Finding("bytecode", OK, "is there, or is made by the first start")
    else:
        remedy = f"{sys.executable} -m compileall -q {Path(kvfuse.__file__).parent}"
        yield Finding("bytecode", WARN, "is not kept: each start of a daemon takes half a second more", remedy)


def check_outliving() -> Iterator[Finding]:
    """What it takes for a mount to go on when its daemon is killed or replaced."""
    if problem := checks.outliving_problem():
        yield Finding("outliving", WARN, f"mounts end with their daemon: {problem.detail}", problem.remedy)
    elif not any(Path(folder).parent.is_dir() for folder in status_socket.list_folders(os.geteuid())):
        detail = "mounts go on, but 'kvfuse upgrade' has no place to reach them"
        yield Finding("outliving", WARN, detail, "set XDG_RUNTIME_DIR to a folder of this user's own")
    else:
        yield Finding("outliving", OK, "mounts go on when their daemon is killed or replaced")


def check_guard() -> Iterator[Finding]:
    """What ends a mount's connection where the daemon, or the process that keeps the mount, was killed."""
    if os.geteuid() == 0 or os.path.ismount(CONNECTIONS):
        yield Finding("guard", OK, "nobody waits for a mount whose processes were killed")
    else:
        detail = f"{CONNECTIONS} is missing: callers of a mount whose processes were killed may wait until 'umount -f'"
        yield Finding("guard", WARN, detail, f"as root: mount -t fusectl none {CONNECTIONS}")


def check_read_ahead() -> Iterator[Finding]:
    """The daemon raises its mount's readahead through /sys: 10 times the speed of cold reads."""
    knobs = [folder / "read_ahead_kb" for folder in Path("/sys/class/bdi").glob("*:*")]
    try:
        for knob in knobs[:1]:  # opening is the only sure test: a security module may refuse what permissions allow
            os.close(os.open(knob, os.O_WRONLY))
    except OSError:
        remedy = "mount as root, outside a container or with a writable /sys"
        yield Finding("readahead", WARN, "stays at the kernel's 128KiB: cold reads need more requests", remedy)
    else:
        yield Finding("readahead", OK, "can be raised")


def check_limits() -> Iterator[Finding]:
    """Open files, locked memory, shared memory."""
    _, files_max = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = files_max == resource.RLIM_INFINITY or files_max >= OPEN_FILES_MIN
    remedy = "" if enough else f"ulimit -Hn {OPEN_FILES_MIN} (as root, or in /etc/security/limits.conf)"
    yield Finding("open files", OK if enough else WARN, _limit(files_max), remedy)

    _, locked_max = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = locked_max == resource.RLIM_INFINITY or os.geteuid() == 0
    remedy = "" if unlimited else "ulimit -l unlimited (in /etc/security/limits.conf: memlock)"
    detail = "unlimited" if unlimited else format_size(locked_max)
    yield Finding("locked memory", OK if unlimited else WARN, detail, remedy)

    yield _shared_memory(Path("/dev/shm"))


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value:,}"


def _shared_memory(folder: Path) -> Finding:
    try:
        figures = os.statvfs(folder)
    except OSError as error:
        return Finding(str(folder), WARN, error.strerror or "absent", f"mount -t tmpfs tmpfs {folder}")
    free = figures.f_bavail * figures.f_frsize
    remedy = "" if free >= SHARED_MEMORY_MIN else f"mount -o remount,size=50% {folder}; in a container: --shm-size"
    return Finding(str(folder), OK if free >= SHARED_MEMORY_MIN else WARN, f"{format_size(free)} free", remedy)


def check_rdma() -> Iterator[Finding]:
    """Devices by which hosts read from each other; those without do so by TCP."""
    from kvfuse.options.options import PeerOptions
    from kvfuse.peer.devices import find_devices
    from kvfuse.peer.rdma import usable_devices
    from kvfuse.peer.verbs import NoDevice

    try:
        found = ", ".join(f"{info} ({info.link_layer})" for info in usable_devices(PeerOptions()))
        yield Finding("RDMA", OK, f"{found}: nearest to this process")
    except NoDevice as error:
        if not find_devices():
            yield Finding("RDMA", OK, "this host has no device: other hosts are read by TCP")
        else:
            remedy = "apt-get install python3-pyverbs ibverbs-providers, and bring the device's network interface up"
            yield Finding("RDMA", WARN, f"not used: {error}", remedy)


def check_helpers() -> Iterator[Finding]:
    """The helpers that mount(8), fstab and systemd call."""
    absent = [name for name in HELPERS if not any((Path(folder) / name).exists() for folder in HELPER_FOLDERS)]
    if absent:
        detail = f"'mount -t kvfuse' does not work: no {', '.join(absent)}"
        yield Finding("mount helpers", WARN, detail, "scripts/install, in the source of kvfuse")
    else:
        yield Finding("mount helpers", OK, "mount -t kvfuse works")


def check_mounts() -> Iterator[Finding]:
    """Whether what is written to the mounts of this machine is stored."""
    rows, are_well = mounts.kvfuse_mounts(), True
    for row in rows:
        try:
            stats = mounts.read_virtual(row.point, "stats", CONNECT_SECONDS)
        except MountError as error:
            are_well = False
            yield Finding(f"mount {row.point}", WARN, str(error), "kvfuse status")
            continue
        for trouble in stats.get("degraded") or []:
            are_well = False
            yield Finding(f"mount {row.point}", DEGRADED, mounts.degraded(trouble), trouble["remedy"])
    if rows and are_well:
        yield Finding("mounts", OK, f"{len(rows)} here, what is written to them is stored")


def check_engines(options: Options) -> Iterator[Finding]:
    """Whether the record store and the segment store of one volume answer this user."""
    import trio

    for endpoint in getattr(options.records, "endpoints", ()):
        if problem := _connection_problem(endpoint):
            yield Finding(endpoint, WARN, problem, "start that member of etcd, or let this host reach its port")
    yield trio.run(_ask_records, options)
    if isinstance(options.segments, BlockOptions):
        yield from _devices(options.segments)
    else:
        yield trio.run(_ask_segments, options)
    if isinstance(options.index, RedisIndexOptions):
        yield trio.run(_ask_index, options)
    if options.cache.disk_path is not None:
        yield _disk_tier(options.cache)
    if isinstance(options.cold, ColdBucketOptions):
        yield trio.run(_ask_cold, options)
    if options.peer.listen is not None:
        from kvfuse.cli.doctor_peers import check_peers

        yield from check_peers(options.peer)


def _connection_problem(endpoint: str) -> str:
    parts = urlsplit(endpoint)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname or "", port), CONNECT_SECONDS).close()
    except OSError as error:
        return f"cannot be reached: {error.strerror or error}"
    return ""


async def _ask_records(options: Options) -> Finding:
    from kvfuse.volume.opening import engines, formatting

    if not options.is_shared:
        there = formatting.is_volume(options.volume_path)
        return Finding("records", OK, f"lmdb in {options.records_path}" + ("" if there else ", to be made"))
    begin = time.monotonic()
    try:
        async with engines.open_records(options) as records:
            what = "no volume yet" if await formatting.is_vacant(records) else "a volume"
    except KvfuseError as error:
        return Finding("records", MISSING, str(error), "see docs/engines.md, etcd")
    return Finding("records", OK, f"{options.title}: {what}, answers in {(time.monotonic() - begin) * 1000:.0f} ms")


async def _ask_segments(options: Options) -> Finding:
    from kvfuse.volume.opening import engines

    try:
        free, place = await engines.free_space(options)
    except KvfuseError as error:
        return Finding("segments", MISSING, str(error), "see docs/engines.md, rados")
    size = "an unknown number of bytes" if free is None else format_size(free)
    return Finding("segments", OK, f"{options.segments.engine}: {size} free {place}")


async def _ask_cold(options: Options) -> Finding:
    from kvfuse.volume.opening import cold_opening

    begin = time.monotonic()
    try:
        title = await cold_opening.ask_bucket(options)
    except KvfuseError as error:
        return Finding("cold tier", MISSING, str(error), "see docs/cold.md")
    return Finding("cold tier", OK, f"{title}: answers in {(time.monotonic() - begin) * 1000:.0f} ms")


async def _ask_index(options: Options) -> Finding:
    from kvfuse.volume.opening import engines

    begin = time.monotonic()
    try:
        async with engines.open_index(options) as index:
            if index is not None:
                await index.find([bytes(16)])
            return Finding(
                "index", OK, f"{options.index.engine}: answers in {(time.monotonic() - begin) * 1000:.0f} ms"
            )
    except KvfuseError as error:
        return Finding("index", MISSING, str(error), "see docs/engines.md, the index of blocks")


def _devices(options: BlockOptions) -> Iterator[Finding]:
    """Each device of the volume, and the connections through which the kernel may have it."""
    from kvfuse.remote.segments.block import fabrics, making

    for path in options.devices:
        try:
            size, content = making.describe(Path(path))
            yield Finding(path, OK, f"{format_size(size)}, {content}")
        except KvfuseError as error:
            yield Finding(path, MISSING, str(error), "see docs/engines.md, block")
    for found in fabrics.controllers(options.deadline):
        detail = f"NVMe over {found.transport}"
        if found.problems:
            yield Finding(found.name, WARN, f"{detail}: {'; '.join(found.problems)}", "; ".join(found.remedies))
        else:
            yield Finding(found.name, OK, f"{detail}, fails in time")


def _disk_tier(options: CacheOptions) -> Finding:
    from kvfuse.volume.disk.disk_tier import examined_place

    try:
        return Finding("disk tier", OK, examined_place(options))
    except KvfuseError as error:
        return Finding("disk tier", MISSING, str(error), "see docs/cache.md, a disk near the host")
    except OSError as error:
        if error.errno in (errno.EBUSY, errno.EAGAIN):
            return Finding("disk tier", OK, f"{options.disk_path} is in use, as by a mount of this volume")
        detail = f"{options.disk_path} cannot be used: {error.strerror}"
        return Finding("disk tier", MISSING, detail, "correct cache.disk_path, or run this as the mount's user")


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    check_kernel,
    check_fusermount,
    check_python,
    check_checksums,
    check_native,
    check_bytecode,
    check_outliving,
    check_guard,
    check_read_ahead,
    check_limits,
    check_rdma,
    check_helpers,
    check_mounts,
)


class _Doctor(click.Command):
    """The command, and `kvfuse doctor gpu`, which is one of its own."""

    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **more: Any) -> click.Context:
        if args[:1] == ["gpu"]:
            from kvfuse.cli.doctor_gpu import gpu

            return gpu.make_context(f"{info_name} gpu", args[1:], *rest, **more)
        return super().make_context(info_name, args, *rest, **more)


@click.command(cls=_Doctor)
@click.argument("source", required=False, type=Path)
@click.option("--json", "as_json", is_flag=True, help="For programs: a list of objects.")
@click.option("--bundle", type=Path, metavar="FILE.tar.gz", help="Write one archive for a bug report.")
@click.option("--names", is_flag=True, help="With --bundle: names of files stay in it.")
def doctor(source: Path | None, as_json: bool, bundle: Path | None, names: bool) -> None:
    """What is missing on this machine, and the command that mends it. Changes nothing.

    With SOURCE, a volume's folder or a mount.conf: also whether what that volume lies on answers. "missing" is needed
    for a mount, and a mount that is "degraded" cannot store what is new (exit status 1); "warn" costs speed or comfort.
    'kvfuse doctor gpu' is about GPUs.

    --bundle collects what a bug report needs: versions, machine, options, status, counters and logs of all mounts, and
    lists it. Passwords, tokens, keys and names of files are removed; bytes of files are never in it. Read it before you
    send it.

    \b
    Examples:
      kvfuse doctor
      kvfuse doctor --bundle report.tar.gz
      kvfuse doctor gpu
      kvfuse doctor /etc/kvfuse/mount.conf
    """
    if names and bundle is None:
        raise click.UsageError("--names is for --bundle")
    findings = [finding for check in CHECKS for finding in check()]
    if source is not None:
        findings += check_engines(config.load(source).options)
    if bundle is not None:
        _write_bundle(bundle, findings, source, names=names)
        return
    if as_json:
        print_json([finding._asdict() for finding in findings])
    else:
        print_table(["", "state", "found", "to mend it"], findings)
    if any(finding.state in (MISSING, DEGRADED) for finding in findings):
        raise click.exceptions.Exit(1)


def _write_bundle(file: Path, findings: Sequence[Finding], source: Path | None, *, names: bool) -> None:
    from kvfuse.cli.bundle import write_bundle

    parts = write_bundle(file, findings, source, names=names)
    print_table(["file", "bytes", "what it is"], [(part.name, len(part.text), part.what) for part in parts])
    say(f"{file}: read it before you send it; nothing was sent")
