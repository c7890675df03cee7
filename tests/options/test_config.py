"""mount.conf: what it may say, where values come from, and what is said of what it may not say."""

from __future__ import annotations

import os
import re
import subprocess
from importlib import resources
from pathlib import Path

import pytest
import trio

from kvfuse.errors import ConfigError
from kvfuse.options import config
from kvfuse.options.config import load
from kvfuse.options.options import EtcdOptions, Options, RadosOptions
from kvfuse.options.secret_files import check_private
from kvfuse.sizes import GIB, MIB
from kvfuse.volume.opening.engines import INDEXES, RECORDS, SEGMENTS, read_password

TEMPLATE = resources.files("kvfuse").joinpath("data/mount.conf")


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    return tmp_path / "mount.conf"


def error_of(file: Path, text: str) -> str:
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(file)
    return str(caught.value)


# -- values and where they come from ----------------------------------------------------------------


def test_without_anything_all_is_default() -> None:
    effective = load()
    assert effective.options == Options()
    assert set(effective.origins.values()) == {"default"}
    assert [key for key, _, _ in effective.rows()] == list(config.KEYS)


def test_a_later_place_wins_and_is_named(conf: Path) -> None:
    conf.write_text('[volume]\npath = "/a"\n\n[publish]\nmode = "strict"\nwindow = 1\n[mount]\nread_only = true\n')
    effective = load(Path("/b"), file=conf, words=["window=2,rw", "window=3"])
    options = effective.options
    assert (options.volume.path, options.publish.mode, options.publish.window) == (Path("/b"), "strict", 3.0)
    assert options.mount.read_only is False
    assert effective.origins["volume.path"] == "command line"
    assert effective.origins["publish.mode"] == f"{conf}:5"
    assert effective.origins["publish.window"] == "-o window=3"
    assert effective.origins["mount.read_only"] == "-o rw"
    assert effective.origins["cache.nodes"] == "default"


def test_source_may_be_the_file_or_the_folder(conf: Path, tmp_path: Path) -> None:
    conf.write_text('volume.path = "v"')
    assert load(conf).options.volume_path == tmp_path / "v", "relative to the file"
    assert load(conf).source == conf
    assert load(tmp_path).options.volume_path == tmp_path
    assert load(tmp_path).source == tmp_path


def test_places_below_the_volume() -> None:
    options = load(Path("/v"), words=["segments.path=/fast"]).options
    assert (options.records_path, options.segments_path) == (Path("/v/records"), Path("/fast"))


def test_a_volume_must_be_named() -> None:
    with pytest.raises(ConfigError, match=r"volume\.path is not set"):
        _ = load().options.volume_path


def test_two_files_are_one_too_many(conf: Path) -> None:
    conf.write_text("")
    with pytest.raises(ConfigError, match="only one"):
        load(conf, file=conf)


def test_a_missing_file_is_no_folder_to_make(conf: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"{conf} does not exist")):
        load(conf)
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load(file=conf)


def test_access_times_were_kept_or_not(conf: Path) -> None:
    for value, policy in (("true", "relatime"), ("false", "noatime"), ('"strictatime"', "strictatime")):
        conf.write_text(f"[mount]\natime = {value}\n")
        assert load(Path("/v"), file=conf).options.mount.atime == policy


# -- the template -----------------------------------------------------------------------------------


def test_the_template_works_as_it_stands() -> None:
    with resources.as_file(TEMPLATE) as file:
        assert load(file).options.volume_path == Path("/var/lib/kvfuse")


def test_the_template_shows_every_key_with_its_default(conf: Path) -> None:
    """Commented out lines "key = value" say the default, or, where that is chosen, an example."""
    text = re.sub(r"^# (\w+ = )", r"\1", TEMPLATE.read_text("utf-8"), flags=re.MULTILINE)
    conf.write_text(text)
    shown, _ = config._read_file(conf, text)  # no volume has all of them
    assert shown.keys() == config.KEYS.keys()
    default = dict.fromkeys(config.UNSET) | {key: value for key, value, _ in load().rows() if key not in config.UNSET}
    assert {key for key, value in shown.items() if value != default[key]} == config.UNSET.keys()


def test_the_repository_shows_the_template() -> None:
    root = Path(config.__file__).parents[2]
    if not (root / "pyproject.toml").exists():
        pytest.skip("not run from a source tree")
    assert (root / "mount.conf").read_bytes() == TEMPLATE.read_bytes()


# -- what is wrong ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "\n\n[publsh]\nmode = 'strict'",
            "mount.conf line 4: unknown key 'publsh.mode' - did you mean 'publish.mode'?",
        ),
        ("publish.mod = 'strict'", "mount.conf line 1: unknown key 'publish.mod' - did you mean 'publish.mode'?"),
        ("[cache]\ncapacity = 3", "mount.conf line 2: unknown key 'cache.capacity' - did you mean 'volume.capacity'?"),
        ("capacity = 3", "mount.conf line 1: unknown key 'capacity' - did you mean 'volume.capacity'?"),
        ("volume = 3", "mount.conf line 1: unknown key 'volume' - did you mean 'volume.path'?"),
        (
            "[bogus]",
            "mount.conf line 1: unknown key 'bogus' - the tables are volume, records, segments, index, client,",
        ),
        ("[volume.path]\nx = 1", "mount.conf line 1: volume.path is wrong - expected a path; found {'x': 1}"),
    ],
)
def test_unknown_keys_name_line_and_nearest(conf: Path, text: str, message: str) -> None:
    assert error_of(conf, text).startswith(message)


@pytest.mark.parametrize(
    ("text", "expected", "found"),
    [
        ("volume.capacity = 'much'", 'a size such as "64GiB", or a number of bytes', "'much'"),
        ("volume.capacity = 0", 'a size such as "64GiB", or a number of bytes', "0"),
        ("volume.capacity = -5", 'a size such as "64GiB", or a number of bytes', "-5"),
        ("volume.capacity = true", 'a size such as "64GiB", or a number of bytes', "true"),
        ("volume.capacity = 1.5", 'a size such as "64GiB", or a number of bytes', "1.5"),
        ("volume.chunk_size = '5000'", "a size from 4KiB to 64MiB, in steps of 4KiB", "'5000'"),
        ("volume.exact_sizes = '2MiB'", 'a list of sizes such as "2MiB", of up to 64MiB', "'2MiB'"),
        ("volume.exact_sizes = ['1GiB']", 'a list of sizes such as "2MiB", of up to 64MiB', "['1GiB']"),
        ("volume.path = 3", "a path", "3"),
        ("volume.path = ''", "a path", "''"),
        ("publish.mode = 'fast'", "one of 'relaxed', 'strict'", "'fast'"),
        ("publish.window = nan", "a number of seconds, 0 or more", "nan"),
        ("publish.window = -1", "a number of seconds, 0 or more", "-1"),
        ("publish.window = '1'", "a number of seconds, 0 or more", "'1'"),
        ("mount.read_only = 1", "true or false", "1"),
        ("mount.flags = ['fast']", "a list of one of 'dev', 'nodev', 'suid', 'nosuid', 'exec', 'noexec',", "['fast']"),
        ("cache.nodes = 1.5", "a whole number, 1 or more", "1.5"),
        ("volume.name = 'a/b'", "up to 100 letters, digits and ._-", "'a/b'"),
        ("records.endpoints = ['a:1']", 'a list of URLs such as "http://10.0.0.1:2379"', "['a:1']"),
        ("records.deadline = 0", "a number of seconds, 0.1 to 3600", "0"),
        ("client.lease = 1", "a number of seconds, 2 to 3600", "1"),
        ("segments.object_size = '1KiB'", "a size from 64KiB to 64MiB, in steps of 4KiB", "'1KiB'"),
    ],
)
def test_ill_typed_values_name_what_was_expected(conf: Path, text: str, expected: str, found: str) -> None:
    message = error_of(conf, "# a comment\n" + text)
    key = text.split(" = ")[0]
    assert message.startswith(f"mount.conf line 2: {key} is wrong - expected {expected}")
    assert message.endswith(f"; found {found}")


def test_what_is_no_toml_names_the_line(conf: Path) -> None:
    assert error_of(conf, "[volume]\npath /a\n").startswith("mount.conf line 2: not TOML: ")
    assert error_of(conf, "[volume").startswith("mount.conf")
    conf.write_bytes(b"\xff\xfe\0")
    with pytest.raises(ConfigError, match="is not a text file"):
        load(conf)


# -- which go together ------------------------------------------------------------------------------

ETCD = "[volume]\nname = 'kv'\n[records]\nengine = 'etcd'\n"
FILE = "[segments]\npath = '/shared/kv'\n"
RADOS = "[segments]\nengine = 'rados'\npool = 'p'\n"
BLOCK = "[segments]\nengine = 'block'\ndevices = ['/dev/d']\n"
REDIS = "[index]\nengine = 'redis'\n"


def test_a_shared_volume_has_a_name_instead_of_a_folder(conf: Path, tmp_path: Path) -> None:
    conf.write_text(ETCD + "password_file = 'secret'\nuser = 'u'\n" + RADOS)
    effective = load(conf)
    options = effective.options
    assert (options.is_shared, options.has_segment_files, options.volume.path) == (True, False, None)
    assert (options.title, options.key_prefix) == ("etcd:/kvfuse/kv/", "/kvfuse/kv/")
    assert options.records.password_file == tmp_path / "secret", "relative to the file"
    conf.write_text(ETCD + FILE)
    assert load(conf).options.segments_path == Path("/shared/kv")


def test_a_folder_may_hold_the_segments_alone(conf: Path) -> None:
    conf.write_text(ETCD)
    assert load(Path("/shared"), file=conf).options.segments_path == Path("/shared/segments")


def test_where_a_daemon_logs(conf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load(Path("/v")).options.log_file == Path("/v/log")
    assert load(Path("/v"), words=["log.file=/l"]).options.log_file == Path("/l")
    conf.write_text(ETCD + RADOS)
    shared = load(conf).options
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert shared.log_file == Path("/var/log/kvfuse-kv.log")
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert shared.log_file == Path.home() / ".local/state/kvfuse/kv.log"


def test_who_shares_publishes_strictly_unless_told_otherwise(conf: Path) -> None:
    conf.write_text(ETCD + RADOS)

    def shown(*words: str) -> tuple[str, str]:
        return next((value, origin) for key, value, origin in load(conf, words=words).rows() if key == "publish.mode")

    assert shown() == ("strict", "default with records.engine etcd")
    assert shown("publish=relaxed") == ("relaxed", "-o publish=relaxed")
    alone = {key: (value, origin) for key, value, origin in load().rows()}
    assert alone["publish.mode"] == ("relaxed", "default with records.engine lmdb")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[records]\nengine = 'etcd'", "volume.name is not set: records.engine 'etcd' keeps many volumes, name one"),
        ("volume.name = 'kv'", ":1: volume.name is for records.engine 'etcd', which here is 'lmdb'"),
        ("records.endpoints = ['http://a']", ":1: records.endpoints is for records.engine 'etcd'"),
        ("segments.pool = 'p'", ":1: segments.pool is for segments.engine 'rados', which here is 'file'"),
        ("client.lease = 5", ":1: client.lease is for records.engine 'etcd'"),
        (RADOS, "segments.engine 'rados' needs records.engine 'etcd'"),
        (ETCD, "segments.path is not set: name the segments' folder, on a file system that all hosts share"),
        (ETCD + "[segments]\nengine = 'rados'", "segments.pool is not set"),
        (ETCD + "path = 'x'\n" + RADOS, ":5: records.path is for records.engine 'lmdb', which here is 'etcd'"),
        (ETCD + RADOS + "direct = true", ":8: segments.direct is for segments.engine 'file'"),
        ("volume.path = 'v'\n" + ETCD.replace("[volume]\nname", "volume.name") + RADOS, "this volume has no folder"),
        ("[cache]\ndisk_size = '1GiB'", "cache.disk_size is for cache.disk_path, which is not set"),
        (
            "[cache]\ndisk_size = '1GiB'\ndisk_path = 'd'",
            ":3: cache.disk_path is for volumes whose segments are elsewhere",
        ),
        (ETCD + "user = 'u'\n" + RADOS, "records.user and records.password_file go together"),
        (ETCD + "key_file = 'k'\n" + RADOS, "records.cert_file and records.key_file go together"),
        (ETCD + "ca_file = 'c'\n" + RADOS, "records.ca_file is for https://, but records.endpoints are of http://"),
        (ETCD + "endpoints = []\n" + RADOS, "records.endpoints must be one or more URLs"),
        (
            ETCD + "endpoints = ['http://a', 'https://b']\n" + RADOS,
            "records.endpoints must be one or more URLs, all of",
        ),
        (
            ETCD + RADOS + "[namespace]\nblocks = 5",
            ":9: namespace.blocks is not offered for a volume that several hosts",
        ),
        ("index.engine = 'redis'", "index.engine 'redis' needs records.engine 'etcd'"),
        ("index.engine = 'etcd'", "index.engine 'etcd' needs records.engine 'etcd'"),
        (ETCD + BLOCK + "[index]\nengine = 'omap'", "index.engine 'omap' needs segments.engine 'rados', which here is"),
        (ETCD + RADOS + REDIS, "index.url is not set: name the Redis server"),
        (ETCD + RADOS + REDIS + "url = 'redis://a'\nuser = 'u'", "index.user needs index.password_file"),
        (ETCD + RADOS + REDIS + "url = 'redis://a'\nca_file = 'c'", "index.ca_file is for rediss://"),
        (
            ETCD + RADOS + REDIS + "url = 'redis://a'\n[cold]\nengine = 's3'\nbucket = 'kv-cold'\ncapacity = '1TiB'",
            "cold.engine 's3' of a shared volume needs index.engine 'etcd' or 'omap', and not 'redis'",
        ),
        (ETCD + RADOS + REDIS + "shards = 3", "index.shards is for index.engine 'omap', which here is 'redis'"),
        (ETCD + RADOS + REDIS + "urls = 3", "unknown key 'index.urls' - did you mean 'index.url'?"),
        (ETCD + "deadline = 10\n" + RADOS, "client.lease is 10 s: it must be longer than records.deadline, 10 s"),
    ],
)
def test_what_does_not_go_together_is_refused(conf: Path, text: str, message: str) -> None:
    assert message in error_of(conf, text)


def test_every_engine_that_can_be_chosen_can_be_opened() -> None:
    assert set(config.TABLES["records"].values()) == RECORDS.keys()
    assert set(config.TABLES["segments"].values()) == SEGMENTS.keys()
    assert set(config.TABLES["index"].values()) == INDEXES.keys()


def test_a_password_is_in_a_file_of_its_own(conf: Path) -> None:
    message = error_of(conf, ETCD + "password = 'hunter2'\n" + RADOS)
    assert message.startswith("mount.conf line 5: unknown key 'records.password'")
    assert "hunter2" not in message


@pytest.mark.parametrize(
    "url", ["http://joe:hunter2@etcd:2379", "joe:hunter2@etcd", "https://joe:hun ter2/,@@etcd:2379"]
)
def test_a_password_in_a_url_is_refused_and_not_repeated(conf: Path, url: str) -> None:
    messages = [error_of(conf, ETCD + f"endpoints = ['http://a', '{url}']\n" + RADOS)]
    messages += [error_of(conf, ETCD + f"endpoints = '{url}'\n" + RADOS)]
    with pytest.raises(ConfigError) as caught:
        load(words=[f"records.endpoints={url.replace(',', '')}"])
    message = error_of(conf, ETCD + RADOS + REDIS + f"url = '{url}'")
    assert "index.url: a user and a password have no place in a URL: set index.user" in message
    assert not re.search("joe|hun|ter2", message)
    for message in [*messages, str(caught.value)]:
        assert "records.endpoints: a user and a password have no place in a URL: set records.user" in message
        assert not re.search("joe|hun|ter2", message)
    with pytest.raises(ConfigError) as caught:
        load(words=["endpoint=http://joe:hunter2@etcd"])
    assert "hunter2" not in str(caught.value)
    assert "hunter2" not in error_of(conf, "volume.name = 'http://joe:hunter2@etcd'")


@pytest.mark.root
@pytest.mark.parametrize(
    ("mode", "uid", "is_private"),
    [
        (0o600, 0, True), (0o400, 0, True), (0o640, 0, True), (0o660, 0, False), (0o644, 0, False), (0o604, 0, False),
        (0o602, 0, False), (0o600, 1000, True), (0o640, 1000, False),
    ],
)  # fmt: skip
def test_a_secret_that_others_may_read_is_refused(tmp_path: Path, mode: int, uid: int, is_private: bool) -> None:
    file = tmp_path / "secret"
    file.write_text("hunter2\n")
    file.chmod(mode)
    os.chown(file, uid, uid)
    if is_private:
        assert read_password(file) == "hunter2"
        return
    etcd, rados = EtcdOptions(key_file=file), RadosOptions(keyring=file, pool="p")
    options = Options(records=etcd, segments=rados)
    for read in (
        lambda: read_password(file),
        lambda: trio.run(RECORDS[EtcdOptions], options, etcd),
        lambda: trio.run(SEGMENTS[RadosOptions], options, rados),
    ):
        with pytest.raises(ConfigError, match=rf"others may read {file} \(mode {mode:03o}\).*: chmod (\S+) ") as caught:
            read()
        subprocess.run(["chmod", str(caught.value).split("chmod ")[1].split()[0], file], check=True)
        check_private(file, "it")
        file.chmod(mode)


# -- the disk ---------------------------------------------------------------------------------------


def test_capacity_and_the_disk(tmp_path: Path) -> None:
    absent = tmp_path / "not" / "yet"
    free = config.disk_free(absent)
    assert free > 0
    assert config.default_capacity(10 * MIB + 5) == 5 * MIB
    assert config.default_capacity(1 << 50) == 64 * GIB
    config.check_capacity(MIB, MIB, "there")
    with pytest.raises(ConfigError, match=r"^a capacity of 1PiB is more than the 64GiB that are free below /x$"):
        config.check_capacity(1 << 50, 64 * GIB, "below /x")
    assert not absent.parent.exists()
