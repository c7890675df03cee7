"""Mounts as users of the command line see them: from ``kvfuse mount`` to the end of the daemon, whatever ends it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import pytest
from cli_lab import CAPACITY, NO_HOLDER, ROOT, Place, assert_fails, is_running, kvfuse, wait_for_end
from mounting import KVFUSE, PATIENCE_S, stopped, wait_until

from kvfuse import mounttable
from kvfuse.cli import MountBusy, mounts, umount
from kvfuse.mounttable import Mounted

BROKEN = """
import kvfuse.fs.mount_session
async def serve(*arguments, **options):
    raise RuntimeError("a mistake of ours")
kvfuse.fs.mount_session.serve_mount = serve
import kvfuse.cli
kvfuse.cli.main()
"""
WRITER = """
import itertools, sys
for number in itertools.count():
    try:
        open(f"{sys.argv[1]}/file-{number % 100}", "w").close()
    except OSError:
        pass
"""
ABORTED = """
import errno, pyfuse3
main = pyfuse3.main
async def main_until_aborted(*arguments, **options):
    await main(*arguments, **options)
    raise ExceptionGroup("workers", [OSError(errno.ECONNABORTED, "the connection went while a request was read")])
pyfuse3.main = main_until_aborted
import kvfuse.cli
kvfuse.cli.main()
"""


def test_a_mount_conf_as_the_source(place: Place) -> None:
    conf = place.base / "mount.conf"
    log = place.base / "kv.log"
    conf.write_text(f'[volume]\npath = "volume"\ncapacity = "64MiB"\n[log]\nlevel = "debug"\nfile = "{log}"\n')
    done = kvfuse("mount", "mount.conf", "mnt", cwd=place.base)
    assert done.returncode == 0, done.stderr
    assert done.stderr == f"made the volume {place.volume} with a capacity of 64MiB\n"
    row = mounts.kvfuse_mount_at(place.point)
    assert row.source == str(conf), "mount -a finds out by this that it is mounted"
    assert json.loads(kvfuse("status", conf, "--json").stdout)[0]["mountpoint"] == str(place.point)
    assert kvfuse("umount", "mnt", cwd=place.base).returncode == 0
    assert "is mounted on" in log.read_text()
    assert not (place.volume / "log").exists()


def test_the_volume_is_the_daemons_alone(place: Place) -> None:
    place.mount()
    modes = {path.name: path.stat().st_mode & 0o077 for path in (place.volume, *place.volume.rglob("*"))}
    assert not any(modes.values()), modes


def test_a_second_daemon_is_refused(place: Place) -> None:
    pid = place.mount()
    assert_fails(kvfuse("mount", place.volume, place.point), 5, f"is mounted already, from {place.volume}")
    elsewhere = place.base / "elsewhere"
    elsewhere.mkdir()
    done = kvfuse("mount", place.volume, elsewhere)
    assert_fails(done, 4, f"in use by process {pid} .*{place.point}")
    assert mounttable.top_mount(elsewhere) is None
    assert_fails(kvfuse("format", place.volume, "--force", "--capacity", "64MiB"), 4, f"in use by process {pid}")
    assert place.pid == pid, "the first goes on"


def test_who_looks_for_a_moment_does_not_keep_a_mount(place: Place) -> None:
    pid = place.mount()

    def follows_daemon() -> bool:
        """Just before its first attempt."""
        try:
            return any("pidfd" in os.readlink(link) for link in Path(f"/proc/{umount.pid}/fd").iterdir())
        except FileNotFoundError:
            return False  # one was closed meanwhile

    with (place.point / "open").open("wb"):
        umount = subprocess.Popen([*KVFUSE, "umount", place.point])
        wait_until(follows_daemon, "the command")
    assert umount.wait(PATIENCE_S) == 0
    wait_for_end(pid)


def test_a_busy_mount(place: Place) -> None:
    pid = place.mount()
    with (place.point / "open").open("wb") as file:
        done = kvfuse("umount", place.point)
        assert_fails(done, 4, rf"is busy: .* in use by \S+ \({os.getpid()}\); --lazy")
        assert place.pid == pid
        assert kvfuse("umount", place.point, "--lazy").returncode == 0
        assert not place.is_mounted
        file.write(b"written after it was detached")
    wait_for_end(pid)
    place.mount()
    assert (place.point / "open").read_bytes() == b"written after it was detached"


@pytest.mark.root
@pytest.mark.parametrize("where", ["a path", "a namespace"])
def test_a_mount_that_is_somewhere_else_too(place: Place, tmp_path: Path, where: str) -> None:
    """The daemon goes on for those who see it there: who unmounts is told so, and does not wait for them."""
    pid = place.mount()
    if where == "a path":
        subprocess.run(["mount", "--bind", place.point, tmp_path], check=True)
        done = kvfuse("umount", place.point)
        message = re.escape(str(tmp_path))
        subprocess.run(["umount", tmp_path], check=True)
    else:
        command = ["unshare", "--mount", "--propagation", "private", "cat"]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
            wait_until(lambda: Path(f"/proc/{process.pid}/comm").read_text() == "cat\n", "the namespace")
            done = kvfuse("umount", place.point)
            message = rf"namespace of process {process.pid} \(cat\)"
    assert_fails(done, 4, f"unmounted here, but still mounted at .*{message}")
    assert not place.is_mounted
    wait_for_end(pid)


def test_a_copy_of_the_mount_that_is_gone_at_the_second_look_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a container has one that starts: the unmount waits on, for the daemon."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as daemon:
        ended = os.pidfd_open(daemon.pid)
        looks = iter(["a container", None, "another", "another"])

        def look(_: object) -> str | None:
            return next(looks)

        monkeypatch.setattr(umount, "seen_elsewhere", look)
        monkeypatch.setattr(umount, "LOOK_SECONDS", 0.01)
        with pytest.raises(MountBusy, match="still mounted at another"):
            umount._wait_until_gone(ended, cast(Mounted, None), PATIENCE_S)
        os.close(ended)
        assert [*looks] == []


def test_a_daemon_that_died(place: Place) -> None:
    pid = place.mount(*NO_HOLDER)
    os.kill(pid, signal.SIGKILL)
    wait_for_end(pid)
    done = kvfuse("status", place.point)
    assert done.returncode == 1
    assert f"dead: its daemon is gone; type: kvfuse umount {place.point}" in done.stdout

    done = kvfuse("mount", place.volume, place.point, *NO_HOLDER)
    assert done.returncode == 0
    took = f"kvfuse: the daemon that had mounted {place.point} has died; the new mount takes its place\n"
    assert done.stderr == took
    pid = place.pid
    os.kill(pid, signal.SIGKILL)
    wait_for_end(pid)
    assert kvfuse("umount", place.point).returncode == 0
    assert not place.is_mounted


@contextmanager
def a_program_that_writes(folder: Path) -> Iterator[None]:
    """Meanwhile it makes files in ``folder``, as often as it can, and takes what errors there are."""
    process = subprocess.Popen([sys.executable, "-c", WRITER, folder])
    try:
        yield
    finally:
        process.kill()
        process.wait()


@pytest.fixture(params=["private", "shared"])
def propagated(place: Place, request: pytest.FixtureRequest) -> Iterator[None]:
    """The mount point lies in a mount that propagates to others, as all do under systemd, or in one that does not."""
    subprocess.run(["mount", "--bind", place.base, place.base], check=True)
    subprocess.run(["mount", f"--make-{request.param}", place.base], check=True)
    yield
    subprocess.run(["umount", place.base], check=True)


@pytest.mark.root
@pytest.mark.usefixtures("propagated")
def test_a_dead_mount_stays_until_the_new_one_is_in_its_place(place: Place) -> None:
    pid = place.mount(*NO_HOLDER)
    os.kill(pid, signal.SIGKILL)
    wait_for_end(pid)
    with a_program_that_writes(place.point):
        assert kvfuse("mount", place.volume, place.point).returncode == 0
        wait_until(lambda: any(place.point.iterdir()), "a file in the new mount")
    assert [row.point for row in mounts.kvfuse_mounts() if str(row.source) == str(place.volume)] == [place.point]
    assert kvfuse("umount", place.point).returncode == 0
    assert list(place.point.iterdir()) == []
    assert list(Path(tempfile.gettempdir()).glob("kvfuse-mount-*")) == []


@pytest.mark.root
def test_a_bound_folder_of_a_mount_is_no_mount_of_its_own(place: Place) -> None:
    """As pods have them: commands for folders work there, lists of mounts show the mount alone."""
    place.mount()
    folder, bound = place.point / "folder", place.base / "bound"
    assert kvfuse("namespace", "create", folder).returncode == 0
    bound.mkdir()
    subprocess.run(["mount", "--bind", folder, bound], check=True)
    try:
        rows = json.loads(kvfuse("status", place.volume, "--json").stdout)
        assert [row["mountpoint"] for row in rows] == [str(place.point)]
        assert "blocks" in kvfuse("namespace", "show", bound).stdout
    finally:
        subprocess.run(["umount", bound], check=True)


def test_a_folder_that_is_not_empty_is_refused_with_what_to_do(place: Place) -> None:
    (place.point / "file").touch()
    done = kvfuse("mount", place.volume, place.point, "-o", CAPACITY)
    assert_fails(done, 5, f"{place.point} is not empty.*move them away")
    (place.point / "file").unlink()


def test_a_mount_is_found_by_its_volume(place: Place) -> None:
    pid = place.mount()
    link = place.base / "link"
    link.symlink_to(place.volume)
    (place.point / "folder").mkdir()
    done = kvfuse("umount", place.point / "folder")
    assert_fails(done, 5, f"folder is not a mount point, but lies in the mount {place.point}")
    assert json.loads(kvfuse("stats", link, "--json").stdout)["pid"] == pid
    assert kvfuse("umount", place.volume).returncode == 0
    assert not place.is_mounted
    assert not is_running(pid)
    assert_fails(kvfuse("umount", place.volume), 5, "is not a mount point, nor a volume that is mounted")


def test_a_daemon_that_hangs_hangs_nobody_else(place: Place) -> None:
    """Also one that nobody replaces."""
    pid = place.mount("-o", "outlive=false")
    with stopped(pid):
        done = kvfuse("status", place.point)
        assert done.returncode == 1
        assert "hangs: no answer within 5 s" in done.stdout
        done = kvfuse("umount", place.point)
        assert (done.returncode, place.is_mounted) == (0, False)
        assert "does not answer" in done.stderr
    wait_for_end(pid)


def in_foreground(place: Place, *command: str) -> subprocess.Popen[str]:
    """A daemon that has mounted; its output is a pipe."""
    words = ["mount", str(place.volume), str(place.point), "--foreground", "-o", CAPACITY]
    daemon = subprocess.Popen([*command, *words], stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert daemon.stderr
    said = ""
    while "mounted on" not in said:
        said = daemon.stderr.readline()
        assert said, "it ended"
    return daemon


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_flushes_and_unmounts(place: Place, number: signal.Signals) -> None:
    with in_foreground(place, *KVFUSE) as daemon:
        try:
            (place.point / "file").write_text("kept\n")
            daemon.send_signal(number)
            _, rest = daemon.communicate(timeout=PATIENCE_S)
        finally:
            daemon.kill()
    assert daemon.returncode == 0, rest
    assert not place.is_mounted
    place.mount()
    assert (place.point / "file").read_text() == "kept\n"


def test_an_unmount_while_a_request_is_read_is_one_like_any_other(place: Place) -> None:
    """The kernel then answers the reader with another error."""
    with in_foreground(place, sys.executable, "-c", ABORTED) as daemon:
        try:
            (place.point / "file").write_text("kept\n")
            subprocess.run(["umount", place.point], check=True)
            _, rest = daemon.communicate(timeout=PATIENCE_S)
        finally:
            daemon.kill()
    assert daemon.returncode == 0, rest
    place.mount()
    assert (place.point / "file").read_text() == "kept\n"


@pytest.mark.parametrize("words", [["--foreground"], []], ids=["foreground", "background"])
def test_a_mistake_of_ours_is_in_the_log(place: Place, words: list[str]) -> None:
    command = [sys.executable, "-c", BROKEN, "mount", str(place.volume), str(place.point), *words, "-o", CAPACITY]
    command += NO_HOLDER  # whose daemons are other programs
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, cwd=ROOT, check=False)
    assert done.returncode == 1
    assert "kvfuse: internal error: RuntimeError: a mistake of ours" in done.stderr
    logged = done.stderr + (place.volume / "log").read_text() if not words else done.stderr
    assert logged.count("the daemon failed") == 1
    assert "in serve" in logged


@pytest.mark.parametrize("is_held", [False, True], ids=["alone", "held"])
def test_the_daemon_lets_go_of_everything_it_was_started_with(place: Place, is_held: bool) -> None:
    """Its terminal, its working directory and its output: else the shell, or a pipe's reader, would wait for it."""
    pid = place.mount(*(["-o", "outlive"] if is_held else NO_HOLDER))
    links = {int(path.name): os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()}
    assert links[0] == "/dev/null"
    assert links[1] == links[2] == str(place.volume / "log")
    assert os.readlink(f"/proc/{pid}/cwd") == "/"
    holder = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    assert os.getsid(pid) == (holder if is_held else pid)


@pytest.mark.parametrize("word", ["outlive=true", "outlive=false", None])
def test_a_mount_outlives_its_daemon_unless_told_not_to(place: Place, word: str | None) -> None:
    words = [] if word is None else ["-o", word]
    pid = place.mount(*words)
    holder = json.loads(kvfuse("status", place.point, "--json").stdout)[0]["holder"]
    assert (holder is None) == (word == "outlive=false")
    os.kill(pid, signal.SIGKILL)
    if holder is None:
        wait_for_end(pid)
        wait_until(lambda: mounts.is_dead(place.point), "the end of the mount")
    else:
        os.statvfs(place.point)
        assert place.pid != pid
        (place.volume / "log").read_text().index("is dead (SIGKILL)")


OLD_KERNEL = (
    "import os, sys\n"
    "said = tuple(os.uname())\n"
    "os.uname = lambda: os.uname_result((*said[:2], '6.1.0-test', *said[3:]))\n"
    "from kvfuse.cli import main\n"
    "main()\n"
)


def test_by_default_it_ends_with_its_daemon_on_an_old_kernel(place: Place) -> None:
    """And says so, once. What somebody asked for is done there, too, and the log warns."""
    command = [sys.executable, "-c", OLD_KERNEL, "mount", str(place.volume), str(place.point), "-o", CAPACITY]
    subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE_S)
    assert json.loads(kvfuse("status", place.point, "--json").stdout)[0]["holder"] is None
    said = (place.volume / "log").read_text()
    assert said.count("the mount ends with this process: the kernel does not send calls again") == 1
    assert "WARNING" not in said
    assert kvfuse("umount", place.point).returncode == 0
    subprocess.run([*command, "-o", "outlive=true"], check=True, capture_output=True, timeout=PATIENCE_S)
    assert json.loads(kvfuse("status", place.point, "--json").stdout)[0]["holder"] is not None
