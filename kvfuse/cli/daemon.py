"""The daemon's process: in the foreground, or behind a parent that waits until it is ready.

The child reports once, through a pipe, as one line of JSON: ``{}`` when mounted, or a message and an exit status.
End of file without a report means that it died.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from kvfuse.cli import Failure, describe
from kvfuse.cli.checks import outliving_problem, stands_by
from kvfuse.cli.console import note, print_traceback
from kvfuse.cli.logs import SICK, start_logging
from kvfuse.cli.mounts import ANSWER_SECONDS, ask_health
from kvfuse.cli.tracing import tracing
from kvfuse.cli.volumes import ensure_volume
from kvfuse.errors import ConfigError, EngineTimeout, KvfuseError
from kvfuse.kept.keeper import CONTENT_SIZE_MAX, NO_KEEPER, Keeper
from kvfuse.options.config import Effective
from kvfuse.options.options import Options

if TYPE_CHECKING:
    from kvfuse.fs.doors import Door, Service
    from kvfuse.fs.leaving import Leaving
    from kvfuse.holder.daemon_side import Holding

log = logging.getLogger(__name__)

SWITCH_SECONDS = 0.00005
"""The event loop waits at most so long for a thread that computes: Python's 5 ms would be seen in every request."""

KEPT = "config"
"""what mount.conf said for the daemon that serves; see `keeper`"""

KEPT_VARIABLES = frozenset(
    ("PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "XDG_RUNTIME_DIR", "LD_LIBRARY_PATH")
)
KEPT_PREFIXES = (
    "LC_",
    "PYTHON",
    "KVFUSE_",
    "CEPH_",
    "SSL_CERT_",
    "RDMAV_",
    "IBV_",
    "MLX",
    "MALLOC_",
    "GLIBC_",
    "OPENBLAS_",
)
"""of the environment, what a daemon in the background keeps: as little as systemd would give it. What its starter's
variables say, as of a service manager or an agent, is for that one"""
KEPT_SIGNALS = frozenset({signal.SIGKILL, signal.SIGSTOP, signal.SIGPIPE, signal.SIGXFSZ})
"""the kernel's alone, and those that Python ignores"""

COLLECTIONS = 1000, 4, 5000
"""See `gc.set_threshold`: whenever there are 1000 objects more, those are searched for cyclic garbage, each fifth
time the newer ones, too. The event loop stands still meanwhile: 50 to 90 ms for 200,000 of them."""


def run(
    effective: Effective,
    point: Path,
    announce: Callable[[], None],
    log_file: Path | None = None,
    keeper: Keeper = NO_KEEPER,
    leaving: Leaving | None = None,
    on_open: Callable[[], None] = lambda: None,
) -> None:
    """Serve in this process until unmounted, or told to stop by SIGTERM, SIGINT or SIGHUP. Makes the volume if absent.

    ``announce`` is called once it is mounted. Everything is flushed and unmounted on return. It logs to ``log_file``,
    or to stderr, unless mount.conf says where. ``keeper``: of what outlives this process.
    ``leaving``: asks for all to be left to another daemon; then this returns with everything written, and mounted.
    ``on_open`` is called once the volume is open, before the mount is served.
    """
    import trio

    os.umask(0o077)  # the volume's files are the daemon's alone; what users see has its own modes
    refusal = be_nice(effective.options.mount.nice)
    sys.setswitchinterval(SWITCH_SECONDS)
    _, files_max = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files_max, files_max))  # rings and their memory take some each
    if made := ensure_volume(effective.options):
        note(made)
    start_logging(effective.options.log, log_file, point)
    if refusal is not None:
        log.warning("mount.nice is %d, which this process may not have: %s", effective.options.mount.nice, refusal)
    try:
        with tracing(effective.options, point):
            trio.run(_serve, effective, point, announce, keeper, leaving, on_open)
    except Exception as error:
        if not isinstance(error, KvfuseError):  # a mistake of ours: whoever reads the log wants to know where
            log.exception("the daemon failed")
        raise


def be_nice(value: int) -> str | None:
    """Give this thread a nice value, before there are others: they get it from this one. Why it may not have it.

    0: it stays as it is.
    """
    if not value:
        return None
    try:
        os.setpriority(os.PRIO_PROCESS, 0, value)
    except PermissionError as error:
        return os.strerror(error.errno or 0)
    return None


async def _serve(
    effective: Effective,
    point: Path,
    announce: Callable[[], None],
    keeper: Keeper,
    leaving: Leaving | None,
    on_open: Callable[[], None],
) -> None:
    import trio

    from kvfuse import failing
    from kvfuse.cli.heap import give_memory_back
    from kvfuse.fs.mount_session import serve_mount
    from kvfuse.usrbio.daemon.listener import serve_rings

    options = effective.options
    doors: list[Door] = []
    if options.usrbio.enabled:
        from kvfuse.peer.rdma_memories import RdmaMemories

        handing_over = leaving.begun if leaving is not None else None
        rings = partial(serve_rings, options=options.usrbio, device_memories=RdmaMemories(), keeper=keeper)
        doors.append(partial(rings, handing_over=handing_over))

    def ready() -> None:
        calm_collector()
        log.info("%s is mounted on %s", options.title, point)
        if not keeper.outlives and options.mount.outlive is not False and (problem := outliving_problem()):
            level = logging.WARNING if options.mount.outlive else logging.INFO
            log.log(level, "the mount ends with this process: %s", problem.detail)
        announce()

    failure: KvfuseError | None = None
    async with trio.open_nursery() as nursery:
        if keeper.is_apart:
            await nursery.start(failing.vital_task, _pass_signals_on)
        else:
            await nursery.start(failing.vital_task, cancel_on_signal, nursery.cancel_scope)
        nursery.start_soon(failing.service, "heap", give_memory_back)
        if leaving is not None:
            nursery.start_soon(failing.vital_task, leaving.answer_holder)
        try:
            await serve_mount(
                options,
                point,
                on_ready=ready,
                source=effective.source,
                doors=doors,
                services=make_services(options),
                keeper=keeper,
                leaving=leaving,
                on_open=on_open,
            )
        except KvfuseError as error:  # carried past the nursery, which would wrap it in a group
            failure = error
        nursery.cancel_scope.cancel()
    if failure:
        raise failure
    how = "left to the next daemon" if leaving is not None and leaving.is_done else "unmounted"
    log.info("%s is %s, everything is written", point, how)


def make_services(options: Options) -> list[Service]:
    """What runs beside the requests of a volume, as options say."""
    from kvfuse.fs.doors import Service

    services: list[Service] = []
    if options.is_shared and (options.peer.listen is not None or options.peer.reads):
        from kvfuse.peer.service import serve_peers

        services.append(Service("peers", partial(serve_peers, options=options.peer)))
    if options.metrics.listen is not None:
        from kvfuse.metrics.server import serve_metrics

        services.append(Service("metrics", partial(serve_metrics, options=options.metrics)))

    if options.http.listen is not None:
        from kvfuse.http.http_door import serve_http

        services.append(Service("http", partial(serve_http, options=options.http)))
    return services


def calm_collector() -> None:
    """Keep Python's search for cyclic garbage from stopping the daemon again and again.

    A full search looks at every object of the daemon, about 0.1 s for 170,000 of them, and with Python's own thresholds
    one comes every few thousand new blocks; and there is next to nothing to find: storing blocks leaves no cycles.
    """
    gc.collect()
    gc.freeze()  # modules, and what the mount needs: it stays to the end
    gc.set_threshold(*COLLECTIONS)


async def cancel_on_signal(scope: Any, *, task_status: Any) -> None:
    """Cancel ``scope`` at the first signal; further ones do not interrupt the flush that follows."""
    import trio

    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
        task_status.started()
        async for number in signals:
            log.info("%s: flushing and unmounting", signal.Signals(number).name)
            scope.cancel()
            break
    for further in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(further, lambda *_: None)  # trio gave them back to Python, which would end the process


async def _pass_signals_on(*, task_status: Any) -> None:
    """Pass signals on to the supervisor, which has this daemon leave the mount to the next one: it is not to end."""
    import trio

    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
        task_status.started()
        async for _ in signals:
            os.kill(os.getppid(), signal.SIGTERM)


# -- with a holder ----------------------------------------------------------------------------------


def hold(effective: Effective, point: Path, words: Sequence[str], report: int | None = None) -> NoReturn:
    """This process becomes the holder of the mount, and starts the daemon: see `holder.main`.

    ``words``: of the command by which each daemon is started; ``report``: the pipe of a parent that waits.
    """
    from kvfuse.holder import daemon_side as holding

    config = {
        "command": [sys.executable, "-P", "-m", "kvfuse.cli", *words],  # -P: not from where the command was begun
        "folder": "/",
        "point": os.fspath(point),
        "standby": stands_by(effective.options.mount),
        "log": None if report is None else os.fspath(effective.options.log_file),
        "report": report,
    }
    command = holding.build_command(config)
    os.execv(command[0], command)


def supervise(point: Path, words: Sequence[str], hold_socket: Path, *, standby: bool) -> NoReturn:
    """This process becomes the supervisor of a mount that `kvfuse hold` keeps: see `holder.hold`.

    ``words``: of the command by which each daemon is started.
    """
    from kvfuse.holder import daemon_side as holding

    config = {
        "command": [sys.executable, "-P", "-m", "kvfuse.cli", *words],
        "folder": "/",
        "point": os.fspath(point),
        "standby": standby,
        "log": None,
        "report": None,
        "hold": os.fspath(hold_socket),
    }
    command = holding.build_command(config)
    os.execv(command[0], command)


def run_held(load: Callable[..., Effective], point: Path, holding: Holding, *, in_background: bool) -> None:
    """Be a daemon of a holder: when it is this one's turn, serve the mount that is there, or make it.

    ``load``: reads mount.conf. That counts in the first daemon and in upgrades; in another one, what it said before.
    """
    effective, problem = None, None
    try:
        effective = load()
        _ = effective.options.title
    except ConfigError as error:
        problem = error
    preload(effective.options if effective is not None else None)
    standby = stands_by(effective.options.mount) if effective is not None else None
    is_first = holding.wait_for_turn(str(problem) if problem is not None else "", standby)
    if not holding.is_afresh and (kept := holding.take(KEPT)) is not None:
        effective = load(text=kept.content.decode())
    elif effective is None or problem is not None:
        raise problem or AssertionError
    _be_daemon(effective, point, holding, is_first=is_first, in_background=in_background)


def _be_daemon(effective: Effective, point: Path, holding: Holding, *, is_first: bool, in_background: bool) -> None:
    from kvfuse import failing
    from kvfuse.fs.leaving import Leaving
    from kvfuse.holder.daemon_side import end_daemon

    options = effective.options
    leaving = Leaving(holding)
    log_file = options.log_file if in_background else None
    if not is_first:
        failing.end_by(partial(end_daemon, holding))

    def announce() -> None:
        if in_background:
            _redirect(options.log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 1, 2)
        elif is_first:
            note(f"mounted on {point}")
        text = (effective.text or "").encode()
        if 0 < len(text) <= CONTENT_SIZE_MAX:
            holding.keep(KEPT, text)
        holding.report_ready()
        failing.end_by(partial(end_daemon, holding))  # the first one: from here on there is a next one

    def on_open() -> None:
        if holding.is_apart:  # an error must not end the mount, which is another process's
            failing.end_by(partial(end_daemon, holding))

    try:
        run(effective, point, announce, log_file, holding, leaving, on_open)
    except Exception as error:
        failing.end_process(error)
        message, exit_status = describe(error)
        holding.report_end({"message": message, "exit_status": exit_status})
        if not in_background:
            raise
        if os.environ.get("KVFUSE_DEBUG"):
            print_traceback(error)
        if log.hasHandlers():
            log.error("%s", message)
        sys.exit(exit_status)
    if leaving.is_done:
        holding.report_left()
        os._exit(0)  # nothing of this process is to take time now
    failing.end_by(None)
    holding.report_end()


def preload(options: Options | None) -> None:
    """Import and measure what serving takes: the most of what a start costs. No thread begins: forks are to serve."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # of numpy: as many as processors, for what is not used here
    import trio  # noqa: F401

    import kvfuse.fs.mount_session
    import kvfuse.peer.rdma_memories
    import kvfuse.usrbio.daemon.listener
    import kvfuse.volume.opening.engines
    from kvfuse.volume.measures.speeds import memory_bandwidth

    memory_bandwidth()
    if options is None or options.is_shared:
        import kvfuse.peer.service
        import kvfuse.remote.records.etcd.store
    if options is None or not options.is_shared:
        import kvfuse.remote.records.lmdb.store  # noqa: F401


# -- in the background ------------------------------------------------------------------------------


def start(effective: Effective, point: Path, words: Sequence[str] | None) -> None:
    """Start a daemon and return once its mount answers. Its failure is raised here, with its exit status.

    ``words``: of a command that mounts the same again, for a holder; None: there is to be none.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, nobody would learn how the daemon ended
    reader, writer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _let_go(writer)
        if words is not None:
            os.set_inheritable(writer, True)
            hold(effective, point, words, writer)
        _child(effective, point, writer)
    os.close(writer)
    try:
        with os.fdopen(reader) as pipe:
            report = pipe.readline()
    except KeyboardInterrupt:
        os.kill(pid, signal.SIGTERM)
        os.waitpid(pid, 0)
        raise
    if not report:
        _, wait_status = os.waitpid(pid, 0)
        how, log_file = _how(wait_status), effective.options.log_file
        raise Failure(f"the daemon died before it was mounted ({how}); its log: {log_file}")
    content = json.loads(report)
    if content:
        os.waitpid(pid, 0)
        raise Failure(content["message"], content["exit_status"])
    _check_answers(point)


def _let_go(writer: int) -> None:
    """Of all that this process has from its starter, but for its output, which goes to the log once it is mounted.

    Else a lock of the starter's were held, its terminal not closed, its folder busy, for as long as the mount lasts.
    """
    os.setsid()
    os.chdir("/")
    os.umask(0o022)
    _redirect(Path(os.devnull), os.O_RDONLY, 0)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor > 2 and descriptor != writer:
            with suppress(OSError):  # that of the listing
                os.close(descriptor)
    for number in signal.valid_signals() - KEPT_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for name in [name for name in os.environ if name not in KEPT_VARIABLES and not name.startswith(KEPT_PREFIXES)]:
        del os.environ[name]


def _check_answers(point: Path) -> None:
    try:
        ask_health(point, 2 * ANSWER_SECONDS)
    except (OSError, EngineTimeout) as error:
        raise Failure(f"{point} is mounted but does not answer: {error}") from error


def _how(wait_status: int) -> str:
    code = os.waitstatus_to_exitcode(wait_status)
    return f"exit status {code}" if code >= 0 else signal.Signals(-code).name


def _child(effective: Effective, point: Path, writer: int) -> NoReturn:
    """The daemon. It never returns to the parent's code."""
    exit_status = 1
    try:
        run(effective, point, lambda: _report_ready(effective, writer), effective.options.log_file)
        exit_status = 0
    except BaseException as error:
        exit_status = _report_failure(error, writer)
    finally:
        os._exit(exit_status)


def _redirect(path: Path, flags: int, *descriptors: int) -> None:
    """To nowhere, where the disk of a log cannot make it."""
    try:
        opened = os.open(path, flags, 0o600)
    except OSError as error:
        if error.errno not in SICK:
            raise
        opened = os.open(os.devnull, os.O_WRONLY)
    for descriptor in descriptors:
        os.dup2(opened, descriptor)
    os.close(opened)


def _report_ready(effective: Effective, writer: int) -> None:
    """From here on the daemon speaks to its log: whoever waits for the end of the parent's output gets it."""
    _redirect(effective.options.log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 1, 2)
    os.write(writer, b"{}\n")
    os.close(writer)


def _report_failure(error: BaseException, writer: int) -> int:
    """The exit status of ``error``, told to the parent if it still waits, and to the log."""
    message, exit_status = describe(error) if isinstance(error, Exception) else (repr(error), 1)
    if os.environ.get("KVFUSE_DEBUG"):
        print_traceback(error)
    if log.hasHandlers():  # before there is a log, the parent alone says it
        log.error("%s", message)
    try:
        os.write(writer, json.dumps({"message": message, "exit_status": exit_status}).encode() + b"\n")
    except OSError:  # closed: it was ready before it failed
        pass
    return exit_status
