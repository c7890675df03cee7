"""A volume on a mount point, from the mount to the flush after the unmount."""

from __future__ import annotations

import functools
import json
import logging
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pyfuse3
import trio

import kvfuse
from kvfuse.config import MountOptions, Options
from kvfuse.errors import MountError
from kvfuse.fs.ops import KvfuseOperations
from kvfuse.fs.virtual import VirtualFolder
from kvfuse.volume.api import VolumeApi
from kvfuse.volume.volume import open_volume

log = logging.getLogger(__name__)

IDLE_TASKS = 16
"""tasks that wait for requests; below that pyfuse3 starts one for nearly every request"""
TASKS_MAX = 256
"""requests that may wait inside the volume at once, such as closes that share one strict commit"""
END_SECONDS = 20.0
"""for each step of the way out, so that a daemon that is told to end does"""


async def serve(
    options: Options, mountpoint: Path, *, on_ready: Callable[[], None], source: Path | None = None
) -> None:
    """Mount the volume and answer requests until it is unmounted or this is cancelled; then flush and close it.

    ``on_ready`` is called once the mount answers. ``source`` is what mount tables show, by default the volume's
    folder. A cancellation unmounts: cleanly if nobody uses the mount, else lazily after a sync. MountError where
    the machine does not allow the mount, VolumeError and ConfigError where the volume cannot be opened.
    """
    try:
        async with trio.open_nursery() as nursery:
            stop = trio.Event()
            nursery.start_soon(_set_when_cancelled, stop)
            with trio.CancelScope() as scope:
                async with open_volume(options, os.path.abspath(mountpoint)) as volume:
                    # From here on a cancellation only sets ``stop``: the volume's own tasks must go on until
                    # the kernel has written everything back, or they could not flush it.
                    scope.shield = True
                    words = kernel_options(options.mount, source or options.volume_path)
                    with _mounted(make_operations(volume, options), mountpoint, words) as session:
                        await _answer(session, stop, options.mount.read_ahead, on_ready)
            nursery.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        raise _alone(group) from None


async def _set_when_cancelled(stop: trio.Event) -> None:
    try:
        await trio.sleep_forever()
    finally:
        stop.set()


def _alone(error: BaseException) -> BaseException:
    """A failure that nurseries wrapped in groups, as itself if it is the only one."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def kernel_options(options: MountOptions, source: Path) -> set[str]:
    """The words of mount(8) and libfuse that ``options`` stand for. ``source`` is what mount tables show."""
    ascii_only = str(source).encode("ascii", "replace").decode()  # pyfuse3 passes nothing else on
    shown = ascii_only.replace("\\", "\\\\").replace(",", "\\,")
    words = {f"fsname={shown}", "subtype=kvfuse"}
    switches = {
        "default_permissions": options.default_permissions,
        "allow_other": options.allow_other,
        "ro": options.read_only,
        "noatime": not options.atime,
        "suid": os.geteuid() == 0,  # as mount(8): libfuse would forbid both even to root
        "dev": os.geteuid() == 0,
    }
    words.update(word for word, wanted in switches.items() if wanted)
    for flag in options.flags:
        words.discard(flag.removeprefix("no") if flag.startswith("no") else f"no{flag}")
        words.add(flag)
    return words


def make_operations(volume: VolumeApi[Any], options: Options) -> KvfuseOperations:
    """The door to ``volume``, with the virtual files that tell about this daemon."""

    def stats() -> bytes:
        return _json(
            {
                "pid": os.getpid(),
                "space": volume.space()._asdict(),
                **volume.stats(),
                "fs": operations.stats(),
            }
        )

    def config() -> bytes:
        return _json(msgspec.to_builtins(options, enc_hook=str))

    def version() -> bytes:
        return kvfuse.__version__.encode() + b"\n"

    operations = KvfuseOperations(
        volume,
        VirtualFolder({b"stats": stats, b"config": config, b"version": version}),
        entry_timeout=options.mount.entry_timeout,
        attr_timeout=options.mount.attr_timeout,
        negative_timeout=options.mount.negative_timeout,
    )
    return operations


def _json(content: object) -> bytes:
    return json.dumps(content, indent=2).encode() + b"\n"


@dataclass
class _Session:
    """One mount, from pyfuse3.init to pyfuse3.close."""

    mountpoint: Path
    detached: bool = False
    """this process took the mount out of the mount table"""


@contextmanager
def _mounted(operations: KvfuseOperations, mountpoint: Path, words: set[str]) -> Iterator[_Session]:
    """Mount, and leave no mount behind however the body ends."""
    try:
        pyfuse3.init(operations, os.fspath(mountpoint), words)
    except RuntimeError as error:
        raise MountError(f"{mountpoint} cannot be mounted ({error}); 'kvfuse doctor' tells what is missing") from error
    session = _Session(mountpoint)
    try:
        yield session
    finally:
        pyfuse3.close(unmount=not session.detached)


async def _answer(session: _Session, stop: trio.Event, read_ahead_size: int, on_ready: Callable[[], None]) -> None:
    """Answer the kernel until the mount is gone, which ``stop`` brings about."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_announce, session.mountpoint, read_ahead_size, on_ready)
        nursery.start_soon(_end_when_told, stop, session, nursery.cancel_scope)
        await pyfuse3.main(min_tasks=IDLE_TASKS, max_tasks=TASKS_MAX)
        nursery.cancel_scope.cancel()


async def _announce(mountpoint: Path, read_ahead_size: int, on_ready: Callable[[], None]) -> None:
    """Wait until the mount answers, raise its read-ahead, say that it is ready."""
    status = await trio.to_thread.run_sync(os.stat, mountpoint)
    if read_ahead_size:
        _set_read_ahead(status.st_dev, read_ahead_size)
    on_ready()


def _set_read_ahead(device: int, size: int) -> None:
    """How far the kernel reads ahead on the mount, in bytes. It is a speed-up that needs root: without, go on."""
    knob = Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb")
    try:
        knob.write_text(str(size // 1024))
    except OSError as error:
        log.info("read-ahead stays as it is: %s", error)


async def _end_when_told(stop: trio.Event, session: _Session, scope: trio.CancelScope) -> None:
    """Wait for ``stop``, then see to it that the main loop ends: each step is for what the one before left."""
    await stop.wait()
    with trio.move_on_after(END_SECONDS):
        if await _detach(session):
            await trio.sleep_forever()  # the loop ends by itself, unless another mount namespace has the mount too
    pyfuse3.terminate()
    await trio.sleep(END_SECONDS)  # for requests under way
    log.error("%s: requests are still not answered after %g s: they are given up", session.mountpoint, END_SECONDS)
    scope.cancel()


async def _detach(session: _Session) -> bool:
    """Take the mount out of the mount table while the main loop still answers, so that the kernel can write back.

    False where somebody uses the mount: then it is detached all the same, after a sync, but lives on until
    the main loop ends.
    """
    command = ["umount", "-i"] if os.geteuid() == 0 else ["fusermount3", "-u"]
    lazily = "-l" if os.geteuid() == 0 else "-z"
    path = os.fspath(session.mountpoint)
    session.detached = await _succeeds([*command, path])
    if session.detached:
        return True
    log.warning("%s is in use and is cut off from its users", path)
    await _succeeds(["sync", "-f", path])
    session.detached = await _succeeds([*command, lazily, path])
    return False


async def _succeeds(command: list[str]) -> bool:
    """Run a command; its complaints go to the log. A cancellation leaves it behind: it may wait for the kernel."""
    run = functools.partial(subprocess.run, command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    try:
        done = await trio.to_thread.run_sync(run, abandon_on_cancel=True)
    except OSError as error:
        log.warning("%s: %s", command[0], error)
        return False
    if done.returncode != 0:
        log.info("%s: %s", subprocess.list2cmdline(command), os.fsdecode(done.stderr).strip())
    return done.returncode == 0
