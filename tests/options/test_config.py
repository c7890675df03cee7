"""mount.conf and -o words: what they may say, and what is said of what they may not."""

from __future__ import annotations

import math
import os
import re
import subprocess
import tomllib
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from kvfuse.errors import ConfigError
from kvfuse.options import config
from kvfuse.options.config import load
from kvfuse.options.options import EtcdOptions, NamespaceOptions, Options, RadosOptions
from kvfuse.policy import ADMISSIONS, POLICIES
from kvfuse.sizes import GIB, KIB, MIB, format_size, parse_size
from kvfuse.volume.namespaces.settings import Kind, Settings
from kvfuse.volume.opening.engines import RECORDS, SEGMENTS, check_private, read_password

TEMPLATE = resources.files("kvfuse").joinpath("data/mount.conf")


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    return tmp_path / "mount.conf"


def error_of(file: Path, text: str) -> str:
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(file)
    return str(caught.value)


def words_error(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(Path("/nowhere/volume"), words=words)
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


# -- the template -----------------------------------------------------------------------------------


def test_the_template_works_as_it_stands() -> None:
    with resources.as_file(TEMPLATE) as file:
        assert load(file).options.volume_path == Path("/var/lib/kvfuse")


def test_the_template_shows_every_key_with_its_default(conf: Path) -> None:
    """Commented out lines "key = value" say the default, or, where that is chosen, an example."""
    text = re.sub(r"^# (\w+ = )", r"\1", TEMPLATE.read_text("utf-8"), flags=re.MULTILINE)
    conf.write_text(text)
    shown, _ = config._read_file(conf)  # no volume has all of them
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
        ("[bogus]", "mount.conf line 1: unknown key 'bogus' - the tables are volume, records, segments, client,"),
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
        (ETCD + "deadline = 10\n" + RADOS, "client.lease is 10 s: it must be longer than records.deadline, 10 s"),
    ],
)
def test_what_does_not_go_together_is_refused(conf: Path, text: str, message: str) -> None:
    assert message in error_of(conf, text)


def test_every_engine_that_can_be_chosen_can_be_opened() -> None:
    assert set(config.TABLES["records"].values()) == RECORDS.keys()
    assert set(config.TABLES["segments"].values()) == SEGMENTS.keys()


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


# -- words ------------------------------------------------------------------------------------------


def test_words_of_fstab_are_for_others() -> None:
    words = (
        "rw,defaults,_netdev,nofail,noauto,user,x-systemd.automount,x-systemd.idle-timeout=60,X-foo,comment=hi,relatime"
    )
    assert load(Path("/v"), words=[words, ""]).options == load(Path("/v")).options


def test_words() -> None:
    words = "ro,noatime,allow_other,publish=strict,capacity=10GiB,exact_sizes=2MiB:320KiB,nodev,noexec"
    options = load(Path("/v"), words=[words, "mount.entry_timeout=5,direct,default_permissions=false,nosuid"]).options
    mount, volume = options.mount, options.volume
    assert (mount.read_only, mount.atime, mount.allow_other, mount.entry_timeout) == (True, "noatime", True, 5.0)
    assert (mount.default_permissions, mount.flags) == (False, ("nodev", "noexec", "nosuid"))
    assert (volume.capacity, volume.exact_sizes) == (10 * GIB, (2 * MIB, 320 * KIB))
    assert (options.publish.mode, options.segments.direct) == ("strict", True)


@pytest.mark.parametrize(
    ("words", "policy", "directories"),
    [
        ("defaults", "relatime", True),
        ("noatime", "noatime", True),
        ("noatime,relatime", "relatime", True),
        ("strictatime,nodiratime,lazytime", "strictatime", False),
        ("strictatime,nostrictatime", "relatime", True),
        ("noatime,atime,nodiratime,diratime", "relatime", True),
        ("noatime,norelatime", "relatime", True),
        ("atime=strictatime", "strictatime", True),
        ("mount.atime=false", "noatime", True),
        ("atime=true", "relatime", True),
        ("ro,strictatime", "noatime", True),
    ],
)
def test_words_of_access_times(words: str, policy: str, directories: bool) -> None:
    mount = load(Path("/v"), words=[words]).options.mount
    assert (mount.access_times, mount.diratime) == (policy, directories)


def test_access_times_were_kept_or_not(conf: Path) -> None:
    for value, policy in (("true", "relatime"), ("false", "noatime"), ('"strictatime"', "strictatime")):
        conf.write_text(f"[mount]\natime = {value}\n")
        assert load(Path("/v"), file=conf).options.mount.atime == policy


def test_urls_in_words() -> None:
    words = ["records.engine=etcd,name=kv,segments.path=/s,endpoints=http://a:2379:http://[::1]:2379"]
    assert load(words=words).options.records.endpoints == ("http://a:2379", "http://[::1]:2379")


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("allow_othr", "-o allow_othr: unknown option 'allow_othr' - did you mean 'allow_other'?"),
        ("pubish=strict", "-o pubish=strict: unknown option 'pubish' - did you mean 'publish'?"),
        ("path=/x", "-o path=/x: unknown option 'path' - did you mean "),
        ("strictatim", "-o strictatim: unknown option 'strictatim' - did you mean 'strictatime'?"),
        (
            "atime=always",
            "-o atime=always: mount.atime is wrong - expected one of 'relatime', 'strictatime', 'noatime'",
        ),
        ("ro=1", "-o ro=1: unknown option 'ro' - did you mean "),
        ("capacity", "-o capacity: volume.capacity is wrong - expected a size"),
        ("entry_timeout=soon", "-o entry_timeout=soon: mount.entry_timeout is wrong - expected a number of seconds"),
        ("remount", "-o remount is not supported"),
    ],
)
def test_wrong_words(word: str, message: str) -> None:
    assert words_error(f"rw,{word}").startswith(message)


# -- properties -------------------------------------------------------------------------------------

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def refusal(function: Callable[..., Any], *arguments: Any, **named: Any) -> str:
    """The message of the ConfigError that a call ends in, or "" when it does not. Any other error is a failure."""
    try:
        function(*arguments, **named)
    except ConfigError as error:
        return str(error)
    return ""


@given(st.sampled_from(sorted(config.KEYS)), anything.filter(lambda value: value is not None))
def test_any_value_is_taken_or_refused_by_name(key: str, value: Any) -> None:
    """Whatever TOML may hold, and more: a value of the key's type, or a ConfigError that names the key."""
    if message := refusal(config._convert, key, value, Path("/"), "here"):
        assert message.startswith(f"here: {key} is wrong - expected ")
        return
    taken = config._convert(key, value, Path("/"), "here")
    if config.is_size(key):
        assert all(isinstance(size, int) and size >= 0 for size in (taken if isinstance(taken, tuple) else (taken,)))
    if isinstance(taken, float):
        assert 0 <= taken < math.inf


@given(st.text(max_size=60))
def test_any_words_are_taken_or_refused(text: str) -> None:
    assert re.match("-o |$", refusal(load, Path("/v"), words=[text]))


@given(st.text(alphabet="[]{}.=\"'#, \n\tab1volume", max_size=80))
def test_any_text_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    file = tmp_path_factory.getbasetemp() / "any.conf"
    file.write_text(text, "utf-8")
    assert re.match(r"any\.conf|$", refusal(load, file))


@given(
    st.sampled_from(sorted(config.KEYS)),
    st.lists(st.sampled_from(["", "# [comment]", "   # a = 1", "[other]", "more = 1"]), unique=True),
    st.sampled_from(
        ["{section}.{name} = 1", '  "{section}" . {name}=1', "[{section}]\n{name} = 1", "[ {section} ] # x\n{name}=1"]
    ),
)
def test_the_line_of_every_key_is_found(key: str, before: list[str], form: str) -> None:
    section, name = key.split(".")
    if "[other]" in before and not form.startswith("["):
        before = [line for line in before if line != "[other]"]
    lines = [*before, *form.format(section=section, name=name).split("\n")]
    assert tomllib.loads("\n".join(lines))[section] == {name: 1}
    assert config._key_lines("\n".join(lines))[key] == len(lines)


@given(st.integers(0, 1 << 62))
def test_sizes_are_read_as_they_are_written(size: int) -> None:
    assert parse_size(str(size)) == size
    shown = parse_size(format_size(size))
    assert abs(shown - size) <= size * 0.05


@pytest.mark.parametrize(
    ("text", "size"),
    [("64GiB", 64 * GIB), ("64g", 64 * GIB), ("64 GB", 64 * 10**9), ("1.5MiB", 3 * MIB // 2), ("0", 0), ("7b", 7)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1e9", "1 2", "64GiBs", "0x10", "\u0661MiB", "."])
def test_no_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)


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


# -- the root's namespace ----------------------------------------------------------------------------


def test_the_root_is_made_a_cache_by_one_word() -> None:
    effective = load(Path("/v"), words=["noatime,cache,capacity=1GiB", "ttl=60,eviction=lru"])
    assert effective.options.namespace.given == {"kind": "cache", "ttl": 60.0, "eviction": "lru"}
    assert (effective.origins["namespace.kind"], effective.options.volume.capacity) == ("-o cache", 1 << 30)
    assert load(Path("/v"), words=["cache", "kind=files"]).options.namespace.kind == "files"
    assert load(Path("/v")).options.namespace.given == {}


def test_a_mount_may_say_what_a_namespace_may_be() -> None:
    hints = get_type_hints(NamespaceOptions)
    choices = {name: set(get_args(get_args(hints[name])[0])) for name in ("kind", "eviction", "admission")}
    assert choices == {"kind": set(get_args(Kind)), "eviction": {*POLICIES}, "admission": {*ADMISSIONS}}
    assert {*NamespaceOptions.__struct_fields__} == {*Settings.__struct_fields__} - {"capacity", "token", "descriptor"}


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("eviction=lur", "expected one of 'chain', 'lru', 'lfu'"),
        ("ttl=-1", "expected a number of seconds, 0 or more"),
        ("blocks=1.5", "expected a number of files"),
        ("high_water=0", "expected a share of the capacity"),
        ("kind=cash", "expected one of 'files', 'cache'"),
    ],
)
def test_bad_settings_of_the_root(word: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load(Path("/v"), words=[word])
