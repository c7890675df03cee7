"""Mounts that outlive their daemon where things are missing: root, a writable /run, capabilities, parts in C, a kernel
that sends calls again."""

from __future__ import annotations

import errno
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from mounting import KVFUSE, PATIENCE_S, KvfuseMount, in_own_mounts, temporary_mount, wait_until
from outlive_guest import daemon_of
from places import ROOT
from test_outlive import OUTLIVE, settle
from test_upgrade import other_python

from kvfuse.mounttable import top_mount
from kvfuse.options import config
from kvfuse.volume.check.volume_check import fsck

pytestmark = pytest.mark.root

FOREGROUND = [*KVFUSE, "mount", "--foreground"]
GUEST = [sys.executable, str(Path(__file__).parents[1] / "labs" / "outlive_guest.py")]
USER = 65534
# Python may be in a place that only root can go to.
AS_USER = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups"]
AS_USER += ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder with a mount point; the volume in it is clean at the end."""
    folder = Path(tempfile.mkdtemp(prefix="kvfuse-test-"))
    folder.chmod(0o755)
    try:
        (folder / "mnt").mkdir()
        yield folder
        report = trio.run(functools.partial(fsck, config.load(folder / "volume").options, verify=True))
        assert report.clean, [problem.text for problem in report.problems][:10]
    finally:
        if os.path.ismount(folder / "mnt"):
            subprocess.run(["umount", "-l", folder / "mnt"], check=False)
        shutil.rmtree(folder)


def seen_by(command: list[str], **variables: str) -> dict[str, Any]:
    """What the guest tells."""
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=6 * PATIENCE_S,
        env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


def own(folder: Path) -> None:
    for path in (folder, *folder.iterdir()):
        os.chown(path, USER, USER)


def log_of(folder: Path) -> str:
    return (folder / "volume" / "log").read_text()


@pytest.mark.parametrize("words", [[], ["allow_other"]], ids=["own", "allow_other"])
def test_another_user_than_root(place: Path, words: list[str]) -> None:
    (place / "run").mkdir()
    (place / "fuse.conf").write_text("user_allow_other\n")
    own(place)
    inside = f'mount --bind {place}/fuse.conf /etc/fuse.conf && exec "$@"'
    command = [*in_own_mounts(place, "private"), "sh", "-c", inside, "sh", *AS_USER, *GUEST]
    seen = seen_by([*command, str(place), "0", *words], XDG_RUNTIME_DIR=str(place / "run"), HOME=str(place))
    assert seen["names"] == ["file", "other-0", "other-1"]
    assert f"user_id={USER}" in seen["table"]
    assert ("allow_other" in seen["table"]) == bool(words)
    assert "calls waited" in seen["upgrade"]
    assert seen["status"]["holder"]["deaths"] == 2
    assert log_of(place).count("has no guard") <= 1, "it is said once, not by each daemon"
    assert not list((place / "run").rglob("*.sock"))


def test_another_user_without_a_folder_for_sockets(place: Path) -> None:
    own(place)
    command = ["env", "-u", "XDG_RUNTIME_DIR", *AS_USER, *GUEST, str(place), "0"]
    seen = seen_by(command, HOME=str(place))
    assert seen["status"]["holder"] is None
    assert log_of(place).count("cannot ask the holder") == 1
    assert f"/run/user/{USER}" in log_of(place)


def test_the_end_of_another_users_holder(place: Path) -> None:
    """By SIGTERM after a kill, and by SIGKILL: nobody waits for ever, nothing is left."""
    (place / "run").mkdir()
    own(place)
    variables = {**os.environ, "XDG_RUNTIME_DIR": str(place / "run"), "PYTHONPATH": str(ROOT)}
    point = place / "mnt"

    def mounted() -> int:
        words = [*KVFUSE, "mount", str(place / "volume"), str(point), "-o", "outlive=true,capacity=64MiB"]
        subprocess.run([*AS_USER, *words], check=True, env=variables, timeout=PATIENCE_S, capture_output=True)
        return as_user_status()["holder"]["holder"]

    def as_user_status() -> dict[str, Any]:
        done = subprocess.run(
            [*AS_USER, *KVFUSE, "status", str(point), "--json"], env=variables, capture_output=True, check=False
        )
        return dict(json.loads(done.stdout)[0])

    holder = mounted()
    os.kill(as_user_status()["pid"], signal.SIGKILL)
    wait_until(lambda: as_user_status()["problem"] is None, "the next daemon")
    os.kill(holder, signal.SIGTERM)
    wait_until(lambda: not Path(f"/proc/{holder}").exists(), "the end of the holder")
    assert not os.path.ismount(point)
    holder = mounted()
    os.kill(holder, signal.SIGKILL)

    wait_until(lambda: "its daemon is gone" in (as_user_status()["problem"] or ""), "an error for who asks")
    subprocess.run([*AS_USER, "fusermount3", "-u", str(point)], check=True)


def test_a_read_only_mount(place: Path) -> None:
    seen_by([*GUEST, str(place), "0"])
    seen = seen_by([*GUEST, str(place), "0", "ro"])
    assert seen["names"] == ["file", "other-0", "other-1"]
    assert seen["error"] == errno.EROFS
    assert seen["flags"] & os.ST_RDONLY
    assert "calls waited" in seen["upgrade"]


CONTAINER = """
mount --bind --make-private /run /run && mount -o remount,ro,bind /run &&
exec setpriv --bounding-set=-all,+sys_admin,+dac_override,+dac_read_search,+chown,+fowner,+kill \
--inh-caps=-all "$@"
"""


def test_a_container_whose_first_process_is_the_holder(place: Path) -> None:
    """With a table of processes of its own, few capabilities, and a /run that cannot be written to."""
    inside = [*in_own_mounts(place, "private", "--pid", "--fork", "--mount-proc"), "sh", "-c", CONTAINER, "sh"]
    command = [*inside, *FOREGROUND, str(place / "volume"), str(place / "mnt"), "-o", "outlive=true,capacity=64MiB"]
    log = (place / "log").open("ab")
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        wait_until(lambda: b"mounted on" in (place / "log").read_bytes() or process.poll() is not None, "the mount")
        assert process.poll() is None, (place / "log").read_text()
        (first,) = children_of(process.pid)
        enter = ["nsenter", f"--target={first}", "--pid", "--mount"]
        seen = seen_by([*enter, *GUEST, str(place), "1"])
        assert seen["names"] == ["file", "other-0", "other-1"]
        assert seen["status"]["holder"] is None
        said = (place / "log").read_text()
        assert said.count("cannot ask the holder") == 1
        assert said.count("is dead (SIGKILL)") == 2
        # What loses its parent is the first process's to bury.
        subprocess.run([*enter, "sh", "-c", "(true &)"], check=True)
        wait_until(lambda: "Z" not in states_of_children(first), "the end of what nobody waits for")
        os.kill(first, signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        log.close()


def children_of(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(number) for number in text.split()]


def states_of_children(pid: int) -> set[str]:
    states = set()
    for child in children_of(pid):
        stat = Path(f"/proc/{child}/stat")
        if stat.exists():
            states.add(stat.read_text().rpartition(")")[2].split()[0])
    return states


def test_a_holder_that_sees_the_processes_of_another_place(place: Path) -> None:
    """Its children have other numbers in /proc."""
    shutil.rmtree(place)
    place.mkdir()
    mount = KvfuseMount(place, (*OUTLIVE, "capacity=64MiB"), ["unshare", "--pid", "--fork", *FOREGROUND])
    try:
        mount.mount()
        (mount.point / "file").write_bytes(b"x")
        settle(mount)
        (holder,) = children_of(mount.pid)
        before = mount.log.read_text().count("is dead")
        daemon = next(pid for pid in children_of(holder) if "mount" in command_of(pid))
        os.kill(daemon, signal.SIGKILL)
        assert (mount.point / "file").exists()
        assert mount.log.read_text().count("is dead") - before == 1
        assert before == 0
        mount.unmount()
    finally:
        mount.remove()


def command_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


def test_without_parts_in_c_the_mount_ends_with_its_daemon(tmp_path: Path) -> None:
    with other_python(tmp_path, ["import sys", "sys.modules['kvfuse.native._fusewire'] = None"]) as python:
        command = [python, "-m", "kvfuse.cli"]
        with temporary_mount(("outlive=true",), [*command, "mount", "--foreground"]) as mount:
            assert mount.log.read_text().count("the mount ends with this process: parts in C were not built") == 1
            done = subprocess.run([*KVFUSE, "upgrade", mount.point], capture_output=True, text=True, check=False)
            assert "no process that keeps it" in done.stderr
            found = subprocess.run([*command, "doctor", "--json"], capture_output=True, text=True, check=False)
            rows = {row["name"]: row for row in json.loads(found.stdout)}
            assert rows["outliving"]["state"] == "warn"
            assert "end with their daemon: parts in C were not built" in rows["outliving"]["detail"]
            mount.kill()
            mount.mount()


OLD_KERNEL = [
    "import os",
    "_said = tuple(os.uname())",
    "os.uname = lambda: os.uname_result((*_said[:2], '6.1.0-test', *_said[3:]))",
    "import struct",
    "import kvfuse.native.fusewire as w",
    "w.NOTIFY_RESEND = w.NOTIFY_INC_EPOCH = struct.pack('<IiQ', 16, 999, 0)",
]
STORE = "import os, sys; file = os.open(sys.argv[1], os.O_RDWR); os.write(file, b'y'); os.fsync(file)"


def test_a_kernel_that_does_not_send_calls_again(tmp_path: Path) -> None:
    """Whoever waits for a killed daemon waits as long as the mount is there; others go on, and so do upgrades."""
    words = "outlive=true", "records.commit_delay=1"
    with other_python(tmp_path, OLD_KERNEL) as python:
        command = [python, "-m", "kvfuse.cli"]
        with temporary_mount(words, [*command, "mount", "--foreground"]) as mount:
            (mount.point / "file").write_bytes(b"x")
            before = fsyncs(mount)
            storing = subprocess.Popen([sys.executable, "-c", STORE, mount.point / "file"])
            try:
                wait_until(lambda: fsyncs(mount) > before, "a call to be under way")
                os.kill(daemon_of(mount.point), signal.SIGKILL)
                assert (mount.point / "file").exists()
                done = subprocess.run([*command, "upgrade", mount.point], capture_output=True, text=True, check=False)
                assert done.returncode == 0, done.stderr
                assert (mount.point / "file").exists()
                assert storing.poll() is None, "nobody answers it"
            finally:
                storing.kill()
            assert mount.log.read_text().count("does not send calls again") == 1
            found = subprocess.run([*command, "doctor", "--json"], capture_output=True, text=True, check=False)
            rows = {row["name"]: row for row in json.loads(found.stdout)}
            # Even SIGKILL does not end its wait; the end of the holder does.
            holder = mount.pid
            os.kill(holder, signal.SIGKILL)
            mount.wait(-signal.SIGKILL)
            storing.wait(PATIENCE_S)
            subprocess.run(["umount", "-l", mount.point], check=True)
            assert rows["outliving"]["state"] == "warn"
            assert rows["outliving"]["remedy"] == "Linux 6.9 or later; or outlive=true"


def fsyncs(mount: KvfuseMount) -> int:
    stats = json.loads((mount.point / ".kvfuse" / "stats").read_bytes())
    return int(stats["fs"]["requests"].get("fsync", 0))


def test_the_end_of_a_mount_that_was_moved(tmp_path: Path) -> None:
    """It is unmounted where it is now, with all that was written."""
    with temporary_mount(OUTLIVE) as mount:
        subprocess.run(["mount", "--move", mount.point, tmp_path], check=True)
        try:
            (tmp_path / "file").write_bytes(b"x" * 100_000)
            os.kill(mount.pid, signal.SIGTERM)
            mount.wait()
            assert top_mount(tmp_path) is None
        finally:
            subprocess.run(["umount", "-l", tmp_path], check=False, capture_output=True)
        mount.mount()
        assert (mount.point / "file").read_bytes() == b"x" * 100_000


def test_the_end_of_a_mount_that_another_one_covers() -> None:
    """The other one stays, and so does what is on it."""
    with temporary_mount(OUTLIVE) as mount:
        (mount.point / "file").write_bytes(b"x" * 100_000)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", mount.point], check=True)
        try:
            (mount.point / "precious").write_bytes(b"y")
            os.kill(mount.pid, signal.SIGTERM)
            mount.wait()
            assert (mount.point / "precious").read_bytes() == b"y"
            assert "is beneath another mount" in mount.log.read_text()
        finally:
            for _ in range(2):
                subprocess.run(["umount", "-l", mount.point], check=False, capture_output=True)
        mount.mount()
        assert (mount.point / "file").read_bytes() == b"x" * 100_000
