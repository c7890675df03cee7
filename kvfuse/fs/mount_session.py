"""Serves a volume at a mount point, from the mount to the flush after the unmount."""

from __future__ import annotations

import ctypes
import errno
import functools
import json
import logging
import math
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pyfuse3
import trio

import kvfuse
from kvfuse import failing
from kvfuse.errors import EngineError, MountError
from kvfuse.fs.control import call_when_cancelled
from kvfuse.fs.door_handover import KeptHandover
from kvfuse.fs.doors import Door, Doors, Service, run_services
from kvfuse.fs.kernel import FuseKernelCache
from kvfuse.fs.leaving import Leaving
from kvfuse.fs.ops import KvfuseOperations
from kvfuse.fs.turns import take_turns
from kvfuse.fs.virtual import Viewer, VirtualFolder
from kvfuse.fs.wakefulness import Wakefulness
from kvfuse.holder.daemon_side import KERNEL_RESENDS, NOT_SENT_AGAIN
from kvfuse.holder.guarding import Guarding
from kvfuse.holder.takeover import check, is_dead_mount, libc, replace_dead_mount, unmount
from kvfuse.kept.keeper import NO_KEEPER, Keeper, Kept, drop_unknown
from kvfuse.mounttable import all_mounts, top_mount
from kvfuse.native import fusewire
from kvfuse.options.options import MountOptions, Options
from kvfuse.volume.blocks.kernel_answers import NOT_KEPT, KeptRows
from kvfuse.volume.measures.profiling import PROFILE, RequestCounter
from kvfuse.volume.running import open_volume
from kvfuse.volume.views.kernel_cache import KernelCache
from kvfuse.volume.volume import Volume

log = logging.getLogger(__name__)

IDLE_TASKS = 16
"""tasks that wait for requests; with fewer pyfuse3 starts one for nearly every request"""
TASKS_MAX = 256
"""requests that may wait inside the volume at once, such as closes that share one strict commit"""
PUBLIC_SECTIONS = "volume", "publish", "mount", "cache", "usrbio"
"""tables of mount.conf whose values concern users of the mount"""
PUBLIC_STATS = "pid", "degraded", "space", "volume", "uptime", "metadata", "capacity", "slab_size"
"""statistics for every user: those of `df` among them"""
LISTINGS = "clients", "profile"
"""of `Volume.listings`: files of MNT/.kvfuse"""
MS_REMOUNT = 32
"""flag of mount(2)"""
ALLOWING = frozenset({"allow_other", "allow_root"})
"""flags for the kernel"""
SHARED_ATTR_SECONDS = 1.0
"""until the kernel drops attributes that are stale after another host's change, where an invalidation failed"""
KEPT = "fuse/connection"
"""keeper entry: INIT, and the descriptor; see `keeper`"""
KEPT_DEVICE = "fuse/device"
"""keeper entry: the mount's st_dev: an unmount may precede the next daemon's stat"""
END_SECONDS = 20.0
"""timeout of each step of the way out, so that SIGTERM always ends a daemon"""
DOORS_SECONDS = 5.0
"""timeout of doors that hand their state over to the next daemon"""


async def serve_mount(
    options: Options,
    mountpoint: Path,
    *,
    on_ready: Callable[[], None],
    source: Path | None = None,
    doors: Sequence[Door] = (),
    services: Sequence[Service] = (),
    keeper: Keeper = NO_KEEPER,
    leaving: Leaving | None = None,
    on_open: Callable[[], None] = lambda: None,
) -> None:
    """Mount the volume and answer requests until it is unmounted or this is cancelled; then flush and close it.

    Calls ``on_open`` once the volume is open, ``on_ready`` once the mount answers and ``doors`` are ready; closes the
    doors before it unmounts, or after an unmount by others. ``services`` start before the mount. ``source``: what mount
    tables show, by default the volume's folder. ``keeper``: has what outlives this process; if it has a mount's
    connection, this serves that mount, which stays where that fails. ``leaving``: once it asks, everything is handed
    over to the next daemon, and this returns as after an unmount. A cancellation unmounts: cleanly if the mount is not
    in use, else lazily after a sync. MountError where the machine does not allow the mount or a service, VolumeError
    and ConfigError where the volume cannot be opened.
    """
    drop_unknown(keeper)
    try:
        async with trio.open_nursery() as nursery:
            stop = trio.Event()
            nursery.start_soon(call_when_cancelled, stop.set)
            with trio.CancelScope() as scope:
                handover = KeptHandover(keeper) if keeper.outlives else None
                async with open_volume(options, os.path.abspath(mountpoint), keeper, handover) as volume:
                    # From here on a cancellation only sets ``stop``: the volume's own tasks must run until the kernel
                    # has written everything back, to flush it.
                    scope.shield = True
                    on_open()
                    words = build_kernel_options(options.mount, source or Path(options.title))
                    operations = make_operations(volume, options, handover)
                    fusewire.configure(is_shared=options.is_shared)
                    PROFILE.counter = RequestCounter(fusewire.profile_requests, fusewire.take_profile)
                    kernel = FuseKernelCache(volume.is_known_to_kernel, operations.names, operations.absences)
                    volume.connect_kernel(kernel)
                    leaving = leaving or Leaving()
                    opened = Doors(doors, volume, kernel, mountpoint, operations.admit_binder, keeper, leaving.begun)
                    guarding = Guarding(mountpoint, keeper)
                    session = _Session(mountpoint, options.mount, opened, guarding, keeper, handover, leaving)
                    volume.sections["service_failures"] = lambda: dict(failing.failures)
                    volume.sections["daemon_deaths"] = lambda: dict(keeper.deaths)
                    is_first = handover is None or handover.is_first
                    async with run_services(services, volume, must_begin=is_first):
                        with (
                            _answer_in_c(volume, operations, handover, options.mount.readers),
                            _keep_mount(session, operations, words),
                            failing.vital(),
                        ):
                            await _answer_kernel(session, operations, volume, stop, on_ready)
                leaving.is_done = handover is not None and handover.is_left
            nursery.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        raise _unwrap_error(group) from None


@contextmanager
def _answer_in_c(
    volume: Volume, operations: KvfuseOperations, handover: KeptHandover | None, readers: int
) -> Iterator[None]:
    """Have C answer requests that need no interpreter, in the body."""
    kept = KeptRows(handover.decisions.in_c, handover.handles.in_c) if handover is not None else NOT_KEPT
    way = volume.begin_kernel_answers(operations.attr_timeout, kept, operations.add_handle)
    if way is not None:
        fusewire.use(way, readers, operations.take_over)
    try:
        yield
    finally:
        volume.end_kernel_answers()


def _unwrap_error(error: BaseException) -> BaseException:
    """Unwrap an error that nurseries wrapped in groups, if it is the only one."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def build_kernel_options(options: MountOptions, source: Path) -> set[str]:
    """Build the words of mount(8) and libfuse for ``options``. ``source``: what mount tables show."""
    ascii_only = str(source).encode("ascii", "replace").decode()  # pyfuse3 passes ASCII only
    shown = ascii_only.replace("\\", "\\\\").replace(",", "\\,")
    words = {f"fsname={shown}", "subtype=kvfuse"}
    is_for_root = os.geteuid() == 0 and not options.allow_other and not ALLOWING & set(options.flags)
    checks = options.default_permissions
    switches = {
        "default_permissions": not is_for_root if checks is None else checks,
        "allow_other": options.allow_other,
        "ro": options.read_only,
        "noatime": options.atime == "noatime",
        "suid": os.geteuid() == 0,  # as mount(8): libfuse would forbid both even to root
        "dev": os.geteuid() == 0,
    }
    words.update(word for word, wanted in switches.items() if wanted)
    for flag in options.flags:
        words.discard(flag.removeprefix("no") if flag.startswith("no") else f"no{flag}")
        words.add(flag)
    return words


def make_operations(volume: Volume, options: Options, handover: KeptHandover | None = None) -> KvfuseOperations:
    """Make the FUSE door to ``volume``, with the virtual files that describe this daemon.

    ``handover``: that of the opened volume. None: nothing outlives this daemon.
    """

    def make_stats(reader: Viewer) -> bytes:
        all_stats = {"pid": os.getpid(), "space": volume.space()._asdict(), **volume.stats(), "fs": operations.stats()}
        if reader.sees_all:
            return _encode_json(all_stats)
        public = {name: value for name, value in all_stats.items() if name in PUBLIC_STATS}
        return _encode_json({**public, **volume.stats_of(reader.uid)})

    def make_config(reader: Viewer) -> bytes:
        shown = msgspec.to_builtins(options, enc_hook=str)
        if not reader.sees_all:  # paths and addresses stay hidden from users of the mount
            shown["volume"].pop("path")
            shown = {section: shown[section] for section in PUBLIC_SECTIONS}
        return _encode_json(shown)

    def make_list(name: str, reader: Viewer) -> bytes:
        listing = volume.listings.get(name)
        return _encode_json({name: listing(None if reader.sees_all else reader.uid) if listing is not None else None})

    version = kvfuse.__version__.encode() + b"\n"
    texts: dict[bytes, Callable[[Viewer], bytes]] = {
        b"stats": make_stats,
        b"config": make_config,
        b"version": lambda _: version,
    }
    files = VirtualFolder(texts | {name.encode(): functools.partial(make_list, name) for name in LISTINGS})
    operations = KvfuseOperations(
        volume,
        files,
        entry_timeout=options.mount.entry_timeout,
        attr_timeout=min(options.mount.attr_timeout, SHARED_ATTR_SECONDS if options.is_shared else math.inf),
        negative_timeout=options.mount.negative_timeout,
        handover=handover,
        answered_in_c=volume.kernel_answers,
    )
    return operations


def _encode_json(content: object) -> bytes:
    return json.dumps(content, indent=2).encode() + b"\n"


@dataclass
class _Session:
    """One mount, from pyfuse3.init to pyfuse3.close."""

    mountpoint: Path
    options: MountOptions
    doors: Doors
    guarding: Guarding
    keeper: Keeper = NO_KEEPER
    handover: KeptHandover | None = None
    leaving: Leaving = field(default_factory=Leaving)
    is_ending: bool = False
    """this daemon ends the mount; not an unmount by others"""
    device: int | None = None
    """st_dev of the mount, once known"""
    detached: bool = False
    """the mount table has no row of the mount any more"""
    is_adopted: bool = False
    """a former daemon mounted it"""
    is_left: bool = False
    """the mount is handed over to the next daemon"""
    detaching: trio.Lock = field(default_factory=trio.Lock)

    @property
    def is_read_only_late(self) -> bool:
        """The kernel mounts read-write at first, as the bind of the socket makes a name; the volume refuses changes."""
        is_ours = os.geteuid() == 0 and not self.is_adopted and not self.keeper.is_apart
        return self.options.read_only and bool(self.doors) and is_ours


@contextmanager
def _keep_mount(session: _Session, operations: KvfuseOperations, words: set[str]) -> Iterator[None]:
    """Mount, or adopt the former daemon's mount; unmount after the body, unless the mount is handed over."""
    point = session.mountpoint
    if (left := session.keeper.take(KEPT)) is not None:
        with _adopt_mount(session, operations, words, left):
            yield
        return
    plain_point = os.path.realpath(point)  # later this daemon would have to answer it itself
    if session.is_read_only_late:
        words = words - {"ro"}
    replaces = is_dead_mount(Path(plain_point))
    with replace_dead_mount(Path(plain_point)) if replaces else nullcontext(point) as place:
        try:
            pyfuse3.init(operations, os.fspath(place), words)
        except RuntimeError as error:
            raise MountError(f"{point} cannot be mounted ({error}); 'kvfuse doctor' tells what is missing") from error
    with session.guarding:
        try:
            if row := top_mount(Path(plain_point)):
                session.guarding.start_guard(row.st_dev)
            else:
                log.warning("%s has no guard: it is not in the mount table", point)
            yield
        finally:
            stays = session.detached or session.is_left or _find_mount(session) != plain_point
            pyfuse3.close(unmount=not stays)
            if place != point and not stays:  # libfuse knows only the temporary folder
                unmount(Path(plain_point))


@contextmanager
def _adopt_mount(session: _Session, operations: KvfuseOperations, words: set[str], left: Kept) -> Iterator[None]:
    """Serve a mount that this process did not make; see `fusewire.replay`.

    An empty entry is of a mount that no daemon has served: the kernel's first request is still to be read.
    """
    (descriptor,) = left.descriptors
    session.is_adopted = bool(left.content)
    # libfuse owns the descriptor from here on, and unmounts nothing.
    pyfuse3.init(operations, f"/dev/fd/{descriptor}", words)
    if session.is_adopted:
        operations.add_socket()
        fusewire.replay(left.content, descriptor)
    with session.guarding:
        try:
            session.guarding.start_guard(None)
            yield
        finally:
            pyfuse3.close(unmount=False)
            stays = session.detached or session.is_left or session.keeper.is_apart
            if not stays and (on_top := _find_mount(session)) is not None:
                unmount(Path(on_top))


async def _answer_kernel(
    session: _Session,
    operations: KvfuseOperations,
    volume: Volume,
    stop: trio.Event,
    on_ready: Callable[[], None],
) -> None:
    """Answer the kernel until the mount ends, by ``stop`` or an unmount, or is handed over to the next daemon."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(failing.vital_task, _announce_mount, session, on_ready, nursery)
        nursery.start_soon(failing.vital_task, _leave_when_asked, session, operations, volume)
        nursery.start_soon(failing.vital_task, _end_when_stopped, stop, session, nursery.cancel_scope)
        try:
            with failing.vital():
                await _run_main_loop(session, operations)
            session.detached |= not (session.is_ending or session.is_left)  # only an unmount ends the loop otherwise
        finally:
            if not session.is_left:
                await _release_waiters(session)
        nursery.cancel_scope.cancel()


async def _run_main_loop(session: _Session, operations: KvfuseOperations) -> None:
    """Run pyfuse3's main loop. Returns when the connection has ended, or after `pyfuse3.terminate`."""
    wakefulness = Wakefulness(wanted=session.options.keep_awake)
    take_turns(wakefulness, session.leaving.gate)
    operations.answer_at_once()
    try:
        await pyfuse3.main(min_tasks=IDLE_TASKS, max_tasks=TASKS_MAX)
    except* OSError as group:
        # The kernel answers so, instead of "no such device", where an unmount coincides with a read of a request.
        _, others = group.split(lambda error: isinstance(error, OSError) and error.errno == errno.ECONNABORTED)
        if others is not None:
            raise others from None
    finally:
        fusewire.end_readers()
        fusewire.answer_at_once()
        wakefulness.close()


async def _announce_mount(session: _Session, on_ready: Callable[[], None], nursery: trio.Nursery) -> None:
    """Wait until the mount answers, raise its read-ahead, open the doors, and report that it is ready."""
    await trio.to_thread.run_sync(os.statvfs, session.mountpoint)  # the kernel never answers that by itself
    if (left := session.keeper.take(KEPT_DEVICE)) is not None:
        device = int(left.content)
    else:
        device = (await trio.to_thread.run_sync(os.stat, session.mountpoint)).st_dev
        session.keeper.keep(KEPT_DEVICE, b"%d" % device)
    session.device = device
    if (begun := fusewire.connection()) is not None and not session.is_adopted:
        session.keeper.keep(KEPT, begun[0], [begun[1]])
        if session.keeper.outlives and fusewire.kernel() < KERNEL_RESENDS:
            log.warning("this kernel does not send calls again that a killed daemon had taken: %s", NOT_SENT_AGAIN)
    if session.handover is not None and session.handover.lost:
        await trio.to_thread.run_sync(_drop_lost, session.doors.kernel, set(session.handover.lost))
        session.handover.end_losses()
    if session.options.read_ahead and not session.keeper.is_apart:
        set_read_ahead(device, session.options.read_ahead)
    if session.doors:
        nursery.start_soon(failing.vital_task, session.doors.run_doors, device)
        await session.doors.opened.wait()
    if session.is_read_only_late:
        await trio.to_thread.run_sync(_make_read_only, session.mountpoint, device)
    await trio.lowlevel.checkpoint_if_cancelled()  # another task may have failed just now
    on_ready()


def _drop_lost(kernel: KernelCache, lost: set[int]) -> None:
    """Invalidate pages of files that were unstored when the former daemon was killed."""
    for ino in lost:
        with suppress(EngineError):
            kernel.drop_content(ino)


def _make_read_only(mountpoint: Path, device: int) -> None:
    """Remount read-only, if the mount is still file system ``device``. The volume refuses changes anyhow."""
    try:
        point = os.open(mountpoint, os.O_PATH)
        try:
            if os.fstat(point).st_dev == device:
                # All other options stay: mount(2) wants these again. The ST_ flags are its own.
                kept = os.fstatvfs(point).f_flag & (os.ST_NOSUID | os.ST_NODEV | os.ST_NOEXEC | os.ST_SYNCHRONOUS)
                flags = ctypes.c_ulong(MS_REMOUNT | os.ST_RDONLY | kept)
                check(libc.mount(b"kvfuse", b"/proc/self/fd/%d" % point, None, flags, None))
        finally:
            os.close(point)
    except OSError as error:
        log.warning("%s: the kernel does not know that it is read-only: %s", mountpoint, error.strerror)


def set_read_ahead(device: int, size: int) -> None:
    """Set the kernel's read-ahead of the mount, in bytes. That needs root: without, log it and go on."""
    knob = Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb")
    try:
        knob.write_text(str(size // 1024))
    except OSError as error:
        log.info("read-ahead stays as it is: %s", error)


async def _leave_when_asked(session: _Session, operations: KvfuseOperations, volume: Volume) -> None:
    """End the main loop once everything can be handed over to the next daemon; see `leaving`."""
    if not await session.leaving.wait_to_leave(operations, volume):
        return
    session.is_left = True
    volume.hand_over()
    await session.doors.leave_doors(DOORS_SECONDS)
    pyfuse3.terminate()
    session.leaving.gate.end()


async def _end_when_stopped(stop: trio.Event, session: _Session, scope: trio.CancelScope) -> None:
    """Wait for ``stop``, then end the main loop: each step runs where the one before did not suffice."""
    await stop.wait()
    if session.is_left:
        return
    session.is_ending = True
    session.leaving.give_up_leaving()
    with trio.move_on_after(END_SECONDS):
        await session.doors.close_doors()
        if await _detach_mount(session):
            await trio.sleep_forever()  # the loop ends by itself, unless another mount namespace has the mount too
    pyfuse3.terminate()
    await trio.sleep(END_SECONDS)  # requests in flight may end meanwhile
    log.error("%s: requests are still not answered after %g s: they are given up", session.mountpoint, END_SECONDS)
    scope.cancel()


async def _release_waiters(session: _Session) -> None:
    """Abort the connection, as the loop has ended: waiting callers, also own threads (`holder.guard`), get errors."""
    if session.guarding.abort_connection() and not session.detached:  # libfuse would take it for unmounted
        with trio.move_on_after(END_SECONDS, shield=True):
            await _detach_mount(session)


async def _detach_mount(session: _Session) -> bool:
    """Unmount while the main loop still answers, so that the kernel can write back.

    False where the mount is in use: then it is detached lazily, after a sync, and lives until the main loop ends.
    """
    async with session.detaching:  # the main loop may end before the first unmount returns
        return session.detached or await _detach_once(session)


async def _detach_once(session: _Session) -> bool:
    command = ["umount", "-i"] if os.geteuid() == 0 else ["fusermount3", "-u"]
    lazily = "-l" if os.geteuid() == 0 else "-z"
    path = _find_mount(session)
    if path is None:
        log.error("%s is beneath another mount, and stays there without a daemon", session.mountpoint)
        await _run_command(["sync"])
        return False
    session.detached = await _run_command([*command, path])
    if session.detached:
        return True
    log.warning("%s is in use and is cut off from its users", path)
    await _run_command(["sync", "-f", path])
    session.detached = await _run_command([*command, lazily, path])
    return False


def _find_mount(session: _Session) -> str | None:
    """Find where the mount is on top, as it may have been moved. None: nowhere, as beneath another mount."""
    row = top_mount(session.mountpoint)
    if session.device is None or (row is not None and row.st_dev == session.device):
        return os.fspath(row.point if row is not None else session.mountpoint)
    on_top = {str(row.point): row.st_dev for row in all_mounts()}
    return next((point for point, device in on_top.items() if device == session.device), None)


async def _run_command(command: list[str]) -> bool:
    """Run a command and log its stderr. A cancellation abandons it, as it may wait for the kernel. True: success."""
    run = functools.partial(subprocess.run, command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    try:
        done = await trio.to_thread.run_sync(run, abandon_on_cancel=True)
    except OSError as error:
        log.warning("%s: %s", command[0], error)
        return False
    if done.returncode != 0:
        log.info("%s: %s", subprocess.list2cmdline(command), os.fsdecode(done.stderr).strip())
    return done.returncode == 0
