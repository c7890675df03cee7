"""The command line as its users see it: real processes, messages and exit status. Mounts: `test_cli_mounts`."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import click
import pytest
from cli_lab import CAPACITY, ROOT, Place, assert_fails, daemons_of, kvfuse
from mounting import KVFUSE, PATIENCE_S

from kvfuse import checksum, mounttable
from kvfuse.cli import BESIDE, COMMANDS, EXIT_STATUS, PACKAGES, Failure, checks, cli, describe, doctor, mounts
from kvfuse.cli.stats import rate_rows
from kvfuse.errors import ConfigError, EngineTimeout, KvfuseError, MountError, VolumeBusy, VolumeError

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


@pytest.mark.parametrize("name", [name for name, (target, _) in COMMANDS.items() if target == BESIDE])
def test_a_command_of_a_package_that_is_not_installed_says_what_to_type(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: ())
    with pytest.raises(Failure, match=rf"^'{name}' is a package of its own; .* -m pip install {PACKAGES}$") as raised:
        cli.get_command(click.Context(cli), name)
    assert all((ROOT / folder / "pyproject.toml").exists() for folder in PACKAGES.split())
    assert "\n" not in raised.value.message


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


def test_the_version_is_told_as_an_option_too() -> None:
    for option in ("--version", "-V"):
        done = kvfuse(option)
        assert (done.returncode, done.stdout) == (0, kvfuse("version").stdout.splitlines(keepends=True)[0])


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


def is_well(done: subprocess.CompletedProcess[str]) -> bool:
    """By what the doctor says of all but mounts, which other tests have beside this one, on sick disks, too."""
    found = [row for row in json.loads(done.stdout) if not row["name"].startswith("mount /")]
    return done.returncode in (0, 1) and all(row["state"] in ("ok", "warn") for row in found)


def test_doctor_finds_this_machine_fit_and_says_how_it_looks() -> None:
    done = kvfuse("doctor", "--json")
    findings = {row["name"]: row for row in json.loads(done.stdout)}
    assert is_well(done), done.stdout
    assert {"kernel", "/dev/fuse", "fusermount3", "pyfuse3", "CRC32C", "mount helpers"} <= findings.keys()
    assert all(row["state"] == "ok" or row["remedy"] for row in findings.values()), "what is not well has a remedy"


def test_the_doctor_names_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "fuse_device_problem", lambda: ("/dev/fuse is missing", "modprobe fuse"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(checks, "FUSE_CONF", tmp_path / "fuse.conf")
    versions = {"lmdb": None, "msgspec": "0.9.1", "numpy": "1.26"}
    monkeypatch.setattr(doctor, "installed_version", lambda name: versions.get(name, "99.0.1rc1"))
    found = {row.name: row for check in doctor.CHECKS for row in check()}
    assert found["/dev/fuse"][1:] == (doctor.MISSING, "/dev/fuse is missing", "modprobe fuse")
    assert found["fusermount3"].state == doctor.MISSING
    assert found["fusermount3"].remedy == "apt-get install fuse3"
    assert [found[name].state for name in ("lmdb", "numpy", "trio")] == [doctor.MISSING, doctor.OK, doctor.OK]
    assert found["msgspec"][1:3] == (doctor.MISSING, "0.9.1 is too old")
    assert "msgspec>=" in found["msgspec"].remedy
    assert "pip install" in found["lmdb"].remedy


def test_the_doctor_looks_at_a_volume(place: Place) -> None:
    done = kvfuse("doctor", place.volume, "--json")
    found = {row["name"]: row for row in json.loads(done.stdout)}
    assert is_well(done), done.stdout
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
    command = [
        "unshare",
        "-m",
        "--propagation",
        "slave",
        "sh",
        "-c",
        'mount -t tmpfs tmpfs /dev && exec "$@"',
        "sh",
        *KVFUSE,
    ]
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
    rows = mounttable.parse_mountinfo(MOUNTINFO)
    assert [(str(row.point), row.file_system, row.source, row.read_only) for row in rows] == [
        ("/", "ext4", "/dev/vda", False),
        ("/mnt/a b", "fuse.kvfuse", "/srv/k\\v", False),
        ("/mnt/c", "fuse.kvfuse", "/srv/\u00e9", True),
        ("/mnt/c", "tmpfs", "tmpfs", False),
    ]
    assert rows[1].device == "0:39"
    assert rows[1].st_dev == os.makedev(0, 39)


def test_a_name_with_any_bytes_is_one_row() -> None:
    """Users may mount at such names; where a row was torn, no volume could be mounted beside them."""
    name = bytes(number for number in range(1, 256) if chr(number) not in " \t\n\\#")
    row = b"43 29 0:42 / /mnt/" + name + b" rw - tmpfs tmpfs rw\n"
    (found,) = mounttable.parse_mountinfo(row.decode("latin-1"))
    assert os.fsencode(found.point) == b"/mnt/" + name.replace(b"//", b"/")


def test_the_mount_on_top_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mounttable, "all_mounts", lambda: mounttable.parse_mountinfo(MOUNTINFO))
    top = mounttable.top_mount(Path("/mnt/c/"))
    assert top
    assert top.file_system == "tmpfs"
    assert mounttable.top_mount(Path("/mnt/d")) is None
    with pytest.raises(MountError, match="a mount of tmpfs, not of kvfuse"):
        mounts.kvfuse_mount_at(Path("/mnt/c"))


def test_links_lead_to_a_mount(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    point = tmp_path / "real" / "point"
    row = f"40 29 0:39 / {point} rw - fuse.kvfuse /srv/v rw"
    monkeypatch.setattr(mounttable, "all_mounts", lambda: mounttable.parse_mountinfo(row))
    (tmp_path / "folder").symlink_to("real")
    (tmp_path / "first").symlink_to("./second")
    (tmp_path / "second").symlink_to(tmp_path / "folder" / "point")
    (tmp_path / "round").symlink_to("round")
    (tmp_path / "real").mkdir()
    for name in ("real/point", "folder/point", "folder/../real/point", "first", "second"):
        top = mounttable.top_mount(tmp_path / name)
        assert top is not None, name
        assert top.point == point
    for name in ("real", "folder", "round", "absent", "first/x"):
        assert mounttable.top_mount(tmp_path / name) is None, name


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
