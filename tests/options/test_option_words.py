"""Words of -o, a root that they make a cache, and any input at all: what is taken, and how the rest is refused."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvfuse.errors import ConfigError
from kvfuse.options import config
from kvfuse.options.config import load
from kvfuse.options.options import NamespaceOptions
from kvfuse.policy import ADMISSIONS, POLICIES
from kvfuse.sizes import GIB, KIB, MIB, format_size, parse_size
from kvfuse.volume.namespaces.settings import Kind, Settings


def words_error(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(Path("/nowhere/volume"), words=words)
    return str(caught.value)


# -- words ------------------------------------------------------------------------------------------


def test_words_of_fstab_are_for_others() -> None:
    words = (
        "rw,defaults,_netdev,nofail,noauto,user,x-systemd.automount,x-systemd.idle-timeout=60,X-foo,comment=hi,relatime"
    )
    assert load(Path("/v"), words=[words, ""]).options == load(Path("/v")).options


@pytest.mark.parametrize(
    ("words", "outlive"), [("ro", None), ("outlive", True), ("outlive=false", False), ("outlive=false,outlive", True)]
)
def test_a_switch_that_may_be_left_open_is_a_word_too(words: str, outlive: bool | None) -> None:
    assert load(Path("/v"), words=[words]).options.mount.outlive is outlive


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


def test_words_that_were_unique_before_another_table_had_them() -> None:
    words = [
        "records.engine=etcd,name=kv,segments.path=/s,records.user=u,password_file=/p,endpoints=https://a,ca_file=/c"
    ]
    records = load(words=words).options.records
    assert (records.password_file, records.ca_file) == (Path("/p"), Path("/c"))


def test_urls_in_words() -> None:
    words = ["records.engine=etcd,name=kv,segments.path=/s,endpoints=http://a:2379:http://[::1]:2379"]
    assert load(words=words).options.records.endpoints == ("http://a:2379", "http://[::1]:2379")


@pytest.mark.parametrize(
    ("text", "addresses"),
    [
        ("10.0.0.7", ("10.0.0.7",)),
        ("10.0.0.7:7650", ("10.0.0.7:7650",)),
        ("10.0.0.7:7650/node-7.ib:7651", ("10.0.0.7:7650", "node-7.ib:7651")),
        ("[fd00::7]:7650/[fd00:1::7]/10.0.0.7", ("[fd00::7]:7650", "[fd00:1::7]", "10.0.0.7")),
    ],
)
def test_addresses_in_words(text: str, addresses: tuple[str, ...]) -> None:
    """A colon is before a port, so slashes separate them."""
    assert load(Path("/v"), words=[f"peer.advertise={text},ro"]).options.peer.advertise == addresses
    assert load(Path("/v"), words=[f"advertise={text}"]).options.peer.advertise == addresses


def test_devices_with_ports_in_words() -> None:
    found = load(Path("/v"), words=["rdma_devices=0=mlx5_0:1/1=mlx5_1"]).options.peer.rdma_devices
    assert found == ("0=mlx5_0:1", "1=mlx5_1")


@pytest.mark.parametrize("text", ["", "a/", "a:b", "a:0", "a:65536", "10.0.0.7:7650:10.1.0.7:7650", "fd00::7", "[x]:1"])
def test_wrong_addresses_in_words(text: str) -> None:
    assert "peer.advertise is wrong - expected a list of HOST or HOST:PORT" in words_error(f"peer.advertise={text}")


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


# -- the root's namespace ----------------------------------------------------------------------------


def test_the_root_is_made_a_cache_by_one_word() -> None:
    effective = load(Path("/v"), words=["noatime,cache,capacity=1GiB", "ttl=60,eviction=lru"])
    assert effective.options.namespace.given == {"kind": "blocks", "ttl": 60.0, "eviction": "lru"}
    assert (effective.origins["namespace.kind"], effective.options.volume.capacity) == ("-o cache", 1 << 30)
    assert load(Path("/v"), words=["cache", "kind=files"]).options.namespace.kind == "files"
    assert load(Path("/v")).options.namespace.given == {}


def test_a_mount_may_say_what_a_namespace_may_be() -> None:
    hints = get_type_hints(NamespaceOptions)
    choices = {name: set(get_args(get_args(hints[name])[0])) for name in ("kind", "eviction", "admission")}
    assert choices == {"kind": set(get_args(Kind)), "eviction": {*POLICIES}, "admission": {*ADMISSIONS}}
    not_of_mounts = {"capacity", "token", "descriptor", "epoch"}
    assert {*NamespaceOptions.__struct_fields__} == {*Settings.__struct_fields__} - not_of_mounts


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("eviction=lur", "expected one of 'chain', 'lru', 'lfu'"),
        ("ttl=-1", "expected a number of seconds, 0 or more"),
        ("blocks=1.5", "expected a number of files"),
        ("high_water=0", "expected a share of the capacity"),
        ("kind=cash", "expected 'files', or 'blocks'"),
    ],
)
def test_bad_settings_of_the_root(word: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load(Path("/v"), words=[word])


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


@example("records.endpoints", {"@": None})
@given(st.sampled_from(sorted(config.KEYS)), anything.filter(lambda value: value is not None))
def test_any_value_is_taken_or_refused_by_name(key: str, value: Any) -> None:
    """Whatever TOML may hold, and more: a value of the key's type, or a ConfigError that names the key."""
    if message := refusal(config._convert, key, value, Path("/"), "here"):
        is_secret = ".endpoint" in key and "@" in str(value)
        assert message.startswith(f"here: {key}: a user and" if is_secret else f"here: {key} is wrong - expected ")
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
