"""The command line as its users see it: real processes, real mounts, messages and exit status."""

from __future__ import annotations

import json
import os
import re
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from mounting import KVFUSE, PATIENCE_S, wait_until

from kvfuse import checksum, config
from kvfuse.cli import COMMANDS, EXIT_STATUS, checks, describe, doctor, mounts
from kvfuse.cli.stats import rate_rows
from kvfuse.errors import ConfigError, EngineTimeout, KvfuseError, MountError, VolumeBusy, VolumeError

CAPACITY = "capacity=64MiB"
ROOT = Path(config.__file__).parents[1]


def kvfuse(*arguments: str | Path, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, output and all; it must not hang."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    command = [*KVFUSE, *map(str, arguments)]
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        cwd=cwd,
        env=environment,
        check=False,
    )


def assert_fails(done: subprocess.CompletedProcess[str], exit_status: int, message: str) -> None:
    """It ended with this status and one line on stderr that has ``message``, a regular expression."""
    assert done.returncode == exit_status, done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("kvfuse: ")
    assert re.search(message, lines[0]), done.stderr


class Place:
    """A volume and a mount point, not made or mounted yet."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.volume = base / "volume"
        self.point = base / "mnt"
        self.point.mkdir()

    def mount(self, *arguments: str) -> int:
        """Mount in the background; the daemon's pid."""
        done = kvfuse("mount", self.volume, self.point, "-o", CAPACITY, *arguments)
        assert done.returncode == 0, done.stderr
        return self.pid

    @property
    def pid(self) -> int:
        pid = json.loads(kvfuse("status", self.point, "--json").stdout)[0]["pid"]
        assert isinstance(pid, int)
        return pid

    @property
    def is_mounted(self) -> bool:
        return mounts.top_mount(self.point) is not None

    def tree(self) -> dict[str, bytes]:
        """Everything in the volume's folder but the log and the lock, which say who tried."""
        paths = [path for path in self.volume.rglob("*") if path.is_file() and path.name not in ("log", "lock")]
        return {str(path): path.read_bytes() for path in paths if not path.name.endswith("lock.mdb")}


def is_running(pid: int) -> bool:
    """The process exists and is no zombie that nobody has reaped yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for_end(pid: int) -> None:
    wait_until(lambda: not is_running(pid), "the daemon's end")


def daemons_of(volume: Path) -> list[int]:
    """Processes that have a file below the volume's folder open."""
    return [int(match) for user in mounts.users_of(volume) for match in re.findall(r"\((\d+)\)$", user)]


@pytest.fixture
def place() -> Iterator[Place]:
    with tempfile.TemporaryDirectory(prefix="kvfuse-test-") as folder:
        place = Place(Path(folder))
        yield place
        for pid in daemons_of(place.volume):
            os.kill(pid, signal.SIGKILL)
            wait_for_end(pid)
        while place.is_mounted:
            mounts.detach(place.point, lazy=True)


# -- help and mistakes ------------------------------------------------------------------------------


def test_help_names_every_command_and_loads_nothing() -> None:
    heavy = "{'trio', 'numpy', 'pyfuse3', 'rich', 'lmdb', 'msgspec'}"
    program = (
        "import sys; from kvfuse.cli import cli\n"
        "try: cli(['--help'])\n"
        f"finally: print('loaded:', {heavy} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert "loaded: set()" in done.stdout
    for name, (_, summary) in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(summary)}$", done.stdout, re.MULTILINE)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name: str) -> None:
    done = kvfuse(name, "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"Usage: kvfuse {name}")
    assert not done.stderr


def test_a_command_that_is_not_installed_breaks_no_other() -> None:
    program = (
        "import sys; from kvfuse import cli\n"
        "cli.COMMANDS['gone'] = ('kvfuse.cli.gone:gone', 'not there')\n"
        "sys.argv[1:] = ['gone']\n"
        "cli.main()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT)
    assert_fails(done, 1, "'gone' is not part of this installation")
    assert kvfuse("version").returncode == 0


@pytest.mark.parametrize(
    ("arguments", "exit_status", "message"),
    [
        ("config -o pubish=strict", 2, "did you mean 'publish'"),
        ("config absent.conf", 2, "absent.conf does not exist"),
        ("mount volume mnt -o capacity=1PiB", 2, r"capacity of 1PiB is more than the \S+ that are free"),
        ("mount volume mnt -o capacity=4KiB", 3, "too small"),
        ("mount volume mnt -o ro", 3, "volume holds no volume, and a read-only mount makes none"),
        ("mount volume mnt -o nodve", 2, "did you mean 'nodev'"),
        ("mount volume absent", 5, "absent does not exist; type: mkdir -p absent"),
        ("mount volume file", 5, "file is not a directory"),
        ("mount volume full", 5, "full is not empty"),
        ("mount full mnt", 3, "full is no kvfuse volume"),
        ("mount volume mnt -c absent.conf", 2, "absent.conf cannot be read: No such file"),
        ("mount text.conf mnt", 2, "text.conf line 1: not TOML"),
        ("format full", 3, "full is not empty"),
        ("format full --force", 3, "full is not empty"),
        ("format volume --capacity much", 2, "volume.capacity is wrong"),
        ("format volume --capacity 1PiB", 2, "more than the"),
        ("format file/volume", 1, "file/volume: Not a directory"),
        ("mount file/volume mnt", 3, "file/volume is not a folder"),
        ("umount mnt", 5, "mnt is not a mount point"),
        ("umount /proc", 5, "/proc is a mount of proc, not of kvfuse"),
        ("status mnt", 1, "mnt is not mounted by kvfuse"),
        ("stats mnt", 5, "mnt is not a mount point"),
        ("info file", 5, "file is not in a kvfuse mount"),
        ("info absent", 1, "absent: No such file"),
    ],
)
def test_mistakes_are_answered_and_change_nothing(place: Place, arguments: str, exit_status: int, message: str) -> None:
    (place.base / "file").write_text("not a folder\n")
    (place.base / "text.conf").write_text("not a mount.conf\n")
    (place.base / "full").mkdir()
    (place.base / "full" / "precious").write_text("keep\n")
    before = sorted(place.base.rglob("*"))
    assert_fails(kvfuse(*arguments.split(), cwd=place.base), exit_status, message)
    assert sorted(place.base.rglob("*")) == before
    assert not place.is_mounted


def test_a_wrong_command_line_shows_the_usage() -> None:
    done = kvfuse("mout")
    assert (done.returncode, "No such command 'mout'" in done.stderr) == (2, True)
    assert kvfuse("mount", "one").returncode == 2


def test_every_error_has_an_exit_status() -> None:
    statuses = {
        kind: describe(kind("x"))[1] for kind in (ConfigError, VolumeError, VolumeBusy, MountError, EngineTimeout)
    }
    assert statuses == {ConfigError: 2, VolumeError: 3, VolumeBusy: 4, MountError: 5, EngineTimeout: 1}
    assert EXIT_STATUS[-1] == (KvfuseError, 1), "everything fits the last row"
    assert describe(ZeroDivisionError("x")) == ("internal error: ZeroDivisionError: x (KVFUSE_DEBUG=1 shows where)", 1)


def test_a_traceback_only_when_asked_for() -> None:
    assert "Traceback" not in kvfuse("config", "-o", "bogus").stderr
    assert "Traceback" in kvfuse("config", "-o", "bogus", KVFUSE_DEBUG="1").stderr


# -- config, doctor, version ------------------------------------------------------------------------


def test_config_shows_values_and_origins(tmp_path: Path) -> None:
    conf = tmp_path / "mount.conf"
    conf.write_text('[volume]\npath = "v"\ncapacity = "2GiB"\n')
    done = kvfuse("config", conf, "-o", "publish=strict", "--json")
    shown = json.loads(done.stdout)
    assert shown["volume.capacity"] == {"value": 2 << 30, "origin": f"{conf}:3"}
    assert shown["publish.mode"] == {"value": "strict", "origin": "-o publish=strict"}
    assert shown["cache.nodes"] == {"value": 10000, "origin": "default"}
    table = kvfuse("config", conf).stdout
    assert re.search(rf"volume.path +{tmp_path}/v +{conf}:2", table)
    assert re.search(r"segments.direct +false +default", table)


def test_the_template_is_a_mount_conf(tmp_path: Path) -> None:
    template = kvfuse("config", "--template").stdout
    conf = tmp_path / "mount.conf"
    conf.write_text(template)
    assert kvfuse("config", conf).returncode == 0


def test_doctor_finds_this_machine_fit_and_says_how_it_looks() -> None:
    done = kvfuse("doctor", "--json")
    findings = {row["name"]: row for row in json.loads(done.stdout)}
    assert done.returncode == 0, done.stdout
    assert {"kernel", "/dev/fuse", "fusermount3", "pyfuse3", "CRC32C", "mount helpers"} <= findings.keys()
    assert all(row["state"] == "ok" or row["remedy"] for row in findings.values()), "what is not well has a remedy"


def test_the_doctor_names_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "fuse_device_problem", lambda: ("/dev/fuse is missing", "modprobe fuse"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(checks, "FUSE_CONF", tmp_path / "fuse.conf")
    monkeypatch.setattr(doctor, "installed_version", lambda name: None if name == "lmdb" else "1")
    found = {row.name: row for check in doctor.CHECKS for row in check()}
    assert found["/dev/fuse"][1:] == (doctor.MISSING, "/dev/fuse is missing", "modprobe fuse")
    assert found["fusermount3"].state == doctor.MISSING
    assert found["fusermount3"].remedy == "apt-get install fuse3"
    assert (found["lmdb"].state, found["trio"].state) == (doctor.MISSING, doctor.OK)
    assert "pip install" in found["lmdb"].remedy


def test_the_doctor_looks_at_a_volume(place: Place) -> None:
    done = kvfuse("doctor", place.volume, "--json")
    found = {row["name"]: row for row in json.loads(done.stdout)}
    assert done.returncode == 0, done.stdout
    assert found["records"]["detail"] == f"lmdb in {place.volume}/records, to be made"
    assert re.search(rf"^file: \S+ free below {place.volume}/segments$", found["segments"]["detail"])
    assert not place.volume.exists()


def test_a_record_store_that_is_not_there(place: Place) -> None:
    """Every command ends in time with one line that names it, and the doctor says what to do."""
    conf = place.base / "mount.conf"
    conf.write_text(
        f"[volume]\nname = 'kv'\n[records]\nengine = 'etcd'\nendpoints = ['http://127.0.0.1:9']\ndeadline = 1\n"
        f"[segments]\npath = '{place.volume}'\n[log]\nfile = '{place.base}/log'\n"
    )
    for command in (["mount", conf, place.point], ["fsck", conf], ["format", conf]):
        assert_fails(kvfuse(*command), 1, r"http://127\.0\.0\.1:9")
    done = kvfuse("doctor", conf, "--json")
    found = {row["name"]: row for row in json.loads(done.stdout)}
    assert done.returncode == 1
    assert found["http://127.0.0.1:9"]["state"] == "warn"
    assert (found["records"]["state"], found["segments"]["state"]) == ("missing", "ok")
    assert not place.is_mounted
    assert not place.volume.exists()


def test_fuse_device(tmp_path: Path) -> None:
    absent = checks.fuse_device_problem(tmp_path / "fuse")
    assert absent
    assert "is missing" in absent[0]
    assert checks.fuse_device_problem(Path("/dev/null")) is None


def test_allow_other_needs_fuse_conf(tmp_path: Path) -> None:
    conf = tmp_path / "fuse.conf"
    assert not checks.users_may_allow_other(conf)
    conf.write_text("#user_allow_other\nmount_max = 5\n")
    assert not checks.users_may_allow_other(conf)
    conf.write_text("mount_max = 5\n user_allow_other \n")
    assert checks.users_may_allow_other(conf)


@pytest.mark.root
def test_a_machine_without_dev_fuse(place: Place) -> None:
    """In a mount namespace whose /dev is empty."""
    command = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs tmpfs /dev && exec "$@"', "sh", *KVFUSE]
    done = subprocess.run(
        [*command, "mount", str(place.volume), str(place.point)],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
        cwd=ROOT,
    )
    assert_fails(done, 5, "/dev/fuse is missing; as root: modprobe fuse")
    assert not place.volume.exists()


# -- what the kernel says ---------------------------------------------------------------------------

MOUNTINFO = r"""
29 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
40 29 0:39 / /mnt/a\040b rw,relatime shared:5 master:1 - fuse.kvfuse /srv/k\134v rw,user_id=0
41 29 0:40 / /mnt/c ro,nodev - fuse.kvfuse /srv/\303\251 rw
42 41 0:41 / /mnt/c rw - tmpfs tmpfs rw
""".strip()


def test_mountinfo() -> None:
    rows = mounts.parse_mountinfo(MOUNTINFO)
    assert [(str(row.point), row.file_system, row.source, row.read_only) for row in rows] == [
        ("/", "ext4", "/dev/vda", False),
        ("/mnt/a b", "fuse.kvfuse", "/srv/k\\v", False),
        ("/mnt/c", "fuse.kvfuse", "/srv/\u00e9", True),
        ("/mnt/c", "tmpfs", "tmpfs", False),
    ]
    assert rows[1].device == "0:39"


def test_the_mount_on_top_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mounts, "all_mounts", lambda: mounts.parse_mountinfo(MOUNTINFO))
    top = mounts.top_mount(Path("/mnt/c/"))
    assert top
    assert top.file_system == "tmpfs"
    assert mounts.top_mount(Path("/mnt/d")) is None
    with pytest.raises(MountError, match="a mount of tmpfs, not of kvfuse"):
        mounts.kvfuse_mount_at(Path("/mnt/c"))


def test_a_question_has_a_deadline(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(EngineTimeout, match=r"no answer within 0\.05 s"):
        mounts.within(0.05, pipe.read_bytes)
    pipe.write_bytes(b"")  # lets the thread go
    assert mounts.within(5, len, "abc") == 3
    with pytest.raises(FileNotFoundError):
        mounts.within(5, (tmp_path / "absent").read_bytes)


def test_rates_are_of_numbers_that_moved() -> None:
    rows = rate_rows({"a": 10, "b": "x", "c": 5}, {"a": 30, "b": "y", "c": 5, "d": 1}, 2.0)
    assert rows == [("a", 30, 10.0), ("b", "y", None), ("c", 5, None), ("d", 1, None)]


# -- volumes ----------------------------------------------------------------------------------------


def test_format_makes_a_volume_once(place: Place) -> None:
    done = kvfuse("format", place.volume, "--capacity", "64MiB", "--exact-size", "2MiB")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"made the volume {place.volume} with a capacity of 64MiB\n"
    before = place.tree()
    assert_fails(kvfuse("format", place.volume), 3, "is a kvfuse volume already; 'kvfuse format --force'")
    assert place.tree() == before
    assert kvfuse("format", place.volume, "--force", "--capacity", "32MiB").stdout.endswith("a capacity of 32MiB\n")


def test_folders_of_engines_must_be_empty(place: Place) -> None:
    precious = place.base / "data"
    precious.mkdir()
    (precious / "file").write_text("keep\n")
    done = kvfuse("mount", place.volume, place.point, "-o", f"{CAPACITY},segments.path={precious}")
    assert_fails(done, 3, f"segments.path: {precious} is not empty")
    assert (precious / "file").read_text() == "keep\n"
    assert not place.volume.exists()


def spoil(superblock: Path, how: str) -> None:
    """Damage a superblock, or make it one of a later version (with a checksum that is right)."""
    image = bytearray(superblock.read_bytes())
    if how == "newer":
        struct.pack_into("<I", image, 8, 99)
        struct.pack_into("<I", image, len(image) - 4, checksum.crc32c(bytes(image[:-4])))
    elif how == "damaged":
        image[40] ^= 1
    elif how == "cut off":
        del image[1000:]
    superblock.write_bytes(image)


@pytest.mark.parametrize(
    ("how", "message"), [("newer", "version 99.*newer kvfuse"), ("damaged", "damaged"), ("cut off", "damaged")]
)
def test_a_volume_that_cannot_be_opened(place: Place, how: str, message: str) -> None:
    kvfuse("format", place.volume, "--capacity", "64MiB")
    spoil(place.volume / "superblock", how)
    before = place.tree()
    assert_fails(kvfuse("mount", place.volume, place.point), 3, message)
    assert_fails(kvfuse("mount", place.volume, place.point, "-o", "ro"), 3, message)
    assert place.tree() == before
    assert not place.is_mounted
    assert not daemons_of(place.volume)


# -- mounts -----------------------------------------------------------------------------------------


def test_from_mount_to_umount(place: Place) -> None:
    pid = place.mount()
    file = place.point / "a file"
    file.write_bytes(b"x" * 100_000)

    rows = json.loads(kvfuse("status", "--json").stdout)
    row = next(row for row in rows if row["mountpoint"] == str(place.point))
    assert (row["source"], row["problem"], row["read_only"]) == (str(place.volume), None, False)
    assert 32 << 20 < row["space"]["size"] <= 64 << 20
    table = kvfuse("status", place.volume).stdout
    assert re.search(rf"{place.point} +{place.volume} +rw .* {pid} +ok, answers in", table)

    assert json.loads(kvfuse("stats", place.point, "--json").stdout)["pid"] == pid
    assert re.search(rf"pid +{pid}\b", kvfuse("stats", place.point).stdout)
    os.sync()
    assert json.loads(kvfuse("info", file, "--json").stdout)["size"] == 100_000
    assert re.search(r"size +100,000", kvfuse("info", file).stdout)

    done = kvfuse("umount", place.point)
    assert (done.returncode, done.stderr) == (0, "")
    assert not is_running(pid), "umount waits for the daemon"
    assert not place.is_mounted
    assert list(place.point.iterdir()) == []

    place.mount("-o", "ro")
    assert file.read_bytes() == b"x" * 100_000
    with pytest.raises(OSError, match="Read-only file system"):
        file.write_bytes(b"y")
    assert kvfuse("umount", place.point).returncode == 0
    log = (place.volume / "log").read_text()
    assert log.count(f"{place.volume} is mounted on {place.point}") == 2
    assert log.count("is unmounted, everything is written") == 2


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
    assert mounts.top_mount(elsewhere) is None
    assert_fails(kvfuse("format", place.volume, "--force", "--capacity", "64MiB"), 4, f"in use by process {pid}")
    assert place.pid == pid, "the first goes on"


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


def test_a_daemon_that_died(place: Place) -> None:
    pid = place.mount()
    os.kill(pid, signal.SIGKILL)
    wait_for_end(pid)
    done = kvfuse("status", place.point)
    assert done.returncode == 1
    assert f"dead: its daemon is gone; type: kvfuse umount {place.point}" in done.stdout

    done = kvfuse("mount", place.volume, place.point)
    assert done.returncode == 0
    assert done.stderr == f"kvfuse: detached what a daemon that died had left mounted on {place.point}\n"
    pid = place.pid
    os.kill(pid, signal.SIGKILL)
    wait_for_end(pid)
    assert kvfuse("umount", place.point).returncode == 0
    assert not place.is_mounted


def test_a_daemon_that_hangs_hangs_nobody_else(place: Place) -> None:
    pid = place.mount()
    os.kill(pid, signal.SIGSTOP)
    try:
        done = kvfuse("status", place.point)
        assert done.returncode == 1
        assert "hangs: no answer within 5 s" in done.stdout
        done = kvfuse("umount", place.point)
        assert (done.returncode, place.is_mounted) == (0, False)
        assert "does not answer" in done.stderr
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_for_end(pid)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_flushes_and_unmounts(place: Place, number: signal.Signals) -> None:
    command = [*KVFUSE, "mount", str(place.volume), str(place.point), "--foreground", "-o", CAPACITY]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT) as daemon:
        try:
            assert daemon.stderr
            said = ""
            while "mounted on" not in said:
                said = daemon.stderr.readline()
                assert said, "it ended"
            (place.point / "file").write_text("kept\n")
            daemon.send_signal(number)
            _, rest = daemon.communicate(timeout=PATIENCE_S)
        finally:
            daemon.kill()
    assert daemon.returncode == 0, rest
    assert not place.is_mounted
    place.mount()
    assert (place.point / "file").read_text() == "kept\n"


def test_the_daemon_lets_go_of_everything_it_was_started_with(place: Place) -> None:
    """Its terminal, its working directory and its output: else the shell, or a pipe's reader, would wait for it."""
    pid = place.mount()
    links = {int(path.name): os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()}
    assert links[0] == "/dev/null"
    assert links[1] == links[2] == str(place.volume / "log")
    assert os.readlink(f"/proc/{pid}/cwd") == "/"
    assert os.getsid(pid) == pid
