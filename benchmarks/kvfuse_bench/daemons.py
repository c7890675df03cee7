"""Daemons that a measurement needs, started as a user would and ended with it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from kvfuse.errors import MountError
from kvfuse.sizes import KIB, MIB
from kvfuse_cluster.process import signals_later

START_SECONDS_MAX = 60.0
END_SECONDS_MAX = 120.0

READ_AHEAD = MIB
"""bytes that the kernel reads ahead of a sequential reader: what kvfuse asks for by default, given to others as well"""

BAREFS = Path(__file__).with_name("barefs.py")
"""the reference file system, a program of its own"""
PASSTHROUGH = Path(__file__).with_name("passthrough.c")
"""another one in C, compiled at its first use"""


class Daemon(NamedTuple):
    """A mounted file system and its process."""

    mountpoint: Path
    pid: int
    start_seconds: float
    """from the start of the process until the mount answered"""


@contextlib.contextmanager
def signals_raised() -> Iterator[None]:
    """SIGTERM and SIGHUP unwind the body as Ctrl-C does: the servers have sessions of their own and would go on."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def kvfuse_mount(volume: Path, mountpoint: Path, *words: str, within: Sequence[str] = ()) -> Iterator[Daemon]:
    """The volume in the folder ``volume`` (made if it is not there), or of the mount.conf of that name.

    Its process is the daemon, not one that outlives it, unless a word asks for that. Mounted with ``-o`` ``words``.
    ``within``: a command that runs the daemon in its own place.
    """
    options = [part for word in ("outlive=false", *words) for part in ("-o", word)]
    command = [*within, sys.executable, "-m", "kvfuse.cli", "mount", "--foreground"]
    command += [str(volume), str(mountpoint), *options]
    with _mounted(command, mountpoint) as daemon:
        yield daemon


@contextlib.contextmanager
def fresh_volume(folder: Path) -> Iterator[Daemon]:
    """A new volume of 8 GiB in a folder, mounted; the folder is gone afterwards."""
    try:
        with kvfuse_mount(folder / "volume", folder / "mnt", "capacity=8GiB") as daemon:
            yield daemon
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def barefs_mount(mountpoint: Path) -> Iterator[Daemon]:
    """A bare pyfuse3 file system that keeps names in a dict and bytes in memory."""
    with _mounted([sys.executable, str(BAREFS), str(mountpoint)], mountpoint) as daemon:
        _set_read_ahead(mountpoint)
        yield daemon


@contextlib.contextmanager
def passthrough_mount(program: Path, directory: Path, mountpoint: Path) -> Iterator[Daemon]:
    """A file system in C (`compile_passthrough`) that passes requests on to a directory."""
    directory.mkdir(parents=True, exist_ok=True)
    with _mounted([str(program), str(directory), str(mountpoint)], mountpoint) as daemon:
        _set_read_ahead(mountpoint)
        yield daemon


def compile_passthrough() -> Path:
    """The program of `PASSTHROUGH` in the user's cache. MountError: no compiler, no pkg-config or no libfuse."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvfuse-bench"
    program = cache / f"passthrough-{zlib.crc32(PASSTHROUGH.read_bytes()):08x}"
    if not program.exists():
        cache.mkdir(parents=True, exist_ok=True)
        unfinished = f"{program}.{os.getpid()}"
        flags = _output_of("pkg-config", "--cflags", "--libs", "fuse3").split()
        _output_of(os.environ.get("CC", "cc"), "-O2", "-std=gnu11", "-o", unfinished, str(PASSTHROUGH), *flags)
        os.rename(unfinished, program)
    return program


def _output_of(*command: str) -> str:
    try:
        return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True).stdout
    except FileNotFoundError as error:
        raise MountError(f"{command[0]} is not installed") from error
    except subprocess.CalledProcessError as error:
        raise MountError(f"{command[0]} failed: {error.stderr.strip()}") from error


@contextlib.contextmanager
def ceph_fuse_mount(conf_file: Path, mountpoint: Path) -> Iterator[Daemon]:
    """The CephFS of the cluster that ``conf_file`` names, with ceph-fuse's defaults but for the kernel's read-ahead."""
    with _mounted(["ceph-fuse", "-f", "-c", str(conf_file), str(mountpoint)], mountpoint) as daemon:
        _set_read_ahead(mountpoint)
        yield daemon


def _set_read_ahead(mountpoint: Path) -> None:
    """As the mount has it; left as it is where root does not own /sys, as kvfuse does."""
    device = mountpoint.stat().st_dev
    with contextlib.suppress(PermissionError, FileNotFoundError):
        knob = Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb")
        knob.write_text(f"{READ_AHEAD // KIB}")


@contextlib.contextmanager
def _mounted(command: Sequence[str], mountpoint: Path) -> Iterator[Daemon]:
    """Run ``command``, which mounts ``mountpoint`` and serves it until SIGTERM. MountError where it does not."""
    mountpoint.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    with tempfile.TemporaryFile() as log, contextlib.ExitStack() as stack:
        with signals_later():
            try:
                process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            except OSError as error:
                raise MountError(f"{command[0]} cannot be started: {error.strerror}") from error
            stack.callback(_end, process)
        _wait_until_mounted(process, mountpoint, log.fileno())
        yield Daemon(mountpoint, process.pid, time.perf_counter() - start)


def _wait_until_mounted(process: subprocess.Popen[bytes], mountpoint: Path, log: int) -> None:
    deadline = time.monotonic() + START_SECONDS_MAX
    while not os.path.ismount(mountpoint):
        if process.poll() is not None:
            raise MountError(f"{_text(process.args)} ended with status {process.returncode}: {_tail(log)}")
        if time.monotonic() > deadline:
            raise MountError(f"{_text(process.args)} mounted nothing within {START_SECONDS_MAX:.0f} s: {_tail(log)}")
        time.sleep(0.002)
    os.stat(mountpoint)


def _end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, and SIGKILL for one that does not listen."""
    process.terminate()
    try:
        process.wait(END_SECONDS_MAX)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise MountError(f"{_text(process.args)} did not end within {END_SECONDS_MAX:.0f} s of SIGTERM") from None


def _text(arguments: object) -> str:
    return " ".join(map(str, arguments)) if isinstance(arguments, list) else str(arguments)


def _tail(log: int) -> str:
    size = os.fstat(log).st_size
    return os.pread(log, 2000, max(0, size - 2000)).decode(errors="replace").strip() or "it said nothing"


class Memory(NamedTuple):
    """The memory of a process, in bytes."""

    resident: int
    anonymous: int
    file: int
    shared: int
    proportional: int
    """resident, with each shared page divided by the number of its users"""


def memory_of(pid: int) -> Memory:
    """Read from /proc."""
    process = Path("/proc") / str(pid)
    status = _kilobytes(process / "status")
    proportional = _kilobytes(process / "smaps_rollup")["Pss"]
    fields = (status[name] for name in ("VmRSS", "RssAnon", "RssFile", "RssShmem"))
    return Memory(*(1024 * size for size in (*fields, proportional)))


def cpu_seconds_of(pid: int) -> float:
    """CPU time of all threads of a process since its start."""
    clock = (~pid << 3) | 2  # what clock_getcpuclockid(3) answers on Linux
    return time.clock_gettime(clock)


def cpu_seconds_of_all(pid: int) -> float:
    """CPU time of a process, and of those that it started and that are there: a holder has daemons."""
    seconds = cpu_seconds_of(pid)
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # one has just ended
            seconds += sum(cpu_seconds_of_all(int(child)) for child in children.read_text().split())
    return seconds


def _kilobytes(path: Path) -> dict[str, int]:
    """The lines "Name:   123 kB" of a file in /proc."""
    fields = (line.split() for line in path.read_text().splitlines())
    return {row[0].rstrip(":"): int(row[1]) for row in fields if len(row) == 3 and row[2] == "kB"}
