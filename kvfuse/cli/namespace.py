"""kvfuse namespace"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import click

from kvfuse.cli import Failure
from kvfuse.cli.console import print_json, print_table, say
from kvfuse.cli.mounts import ANSWER_SECONDS, kvfuse_mount_at, mount_of, read_virtual, within
from kvfuse.errors import EngineTimeout, MountError
from kvfuse.sizes import format_size
from kvfuse.volume.namespaces.descriptors import parse_descriptor

NAMESPACE = "user.kvfuse.namespace"
"""extended attribute of a folder: all settings; with a dot and a name, one of them"""
REFUSED = f"{NAMESPACE}.refused"
"""why the last change was refused"""
CLEAR = "user.kvfuse.clear"
"""set, it clears the namespace"""
TOKEN_SIZE = 16
"""random bytes of a token that is made"""

MEANINGS = {
    "kind": "files: no file ever goes by itself. blocks: blocks make room for new ones",
    "capacity": "bytes that its files may take, those of namespaces in it included",
    "blocks": "files that it may hold",
    "eviction": "the order in which blocks of a cache go",
    "admission": "which new blocks a full cache stores",
    "ttl": "seconds after which a file that was not written again is gone",
    "high_water": "share of the capacity from which blocks are evicted ahead of need",
    "low_water": "share of the capacity down to which they are then",
    "bandwidth": "bytes a second that its callers read and write, together",
    "iops": "reads and writes a second, likewise",
    "burst": "bytes that may be ahead of bandwidth",
    "weight": "its share of what is moved where several namespaces wait for the same",
    "soft_pin": "its blocks go only where other caches have no more to give",
    "tiers": "where hosts may keep copies of its blocks: all, dram, disk; or remote: nowhere",
    "compression": "zstd: what is stored from now on is compressed where that takes a smaller slot; none",
    "cold": "blocks that go to the cold tier when they leave: none, used (those that were read), all",
    "recompute_speed": "tokens a second that an engine computes: what it computes sooner than it reads is a miss",
    "token_size": "bytes that one token has in blocks",
    "token": "the secret that clients of other users show: 'generate', '@FILE', or 16 characters or more; '': none",
    "descriptor": "what its blocks are, a JSON object: clients that say something else are refused",
}
ZEROS = {
    "capacity": "as much as the namespace above",
    "blocks": "any number",
    "ttl": "never",
    "recompute_speed": "not compared",
    "bandwidth": "any number",
    "iops": "any number",
    "burst": "a twentieth of a second's",
}
"""what 0 means"""

T = TypeVar("T")
Command = Callable[..., Any]

path_argument = click.argument("path", type=Path)
json_option = click.option("--json", "as_json", is_flag=True, help="For programs: sizes in bytes, times in seconds.")


@click.group()
def namespace() -> None:
    """Folders with a policy of their own: whether blocks are evicted when room is short, which, and how much room.

    A namespace is a folder with all that is below it, but for namespaces in it. Of kind "files" it never loses a file:
    when it is full, writes fail. Of kind "blocks" it evicts blocks to make room for new ones ("cache" is its former
    name). Its capacity is a quota. The root of a volume is a namespace, too. Names do not cross borders: mv copies.

    \b
    One namespace for each model, in a volume of 200GiB:
      kvfuse namespace create /mnt/kv/llama --capacity 128GiB
      kvfuse namespace create /mnt/kv/qwen --capacity 64GiB --ttl 86400
      kvfuse namespace list /mnt/kv

    Changes hold at once. The owner of the folder and root may make them. docs/cache.md says how to choose.
    """


def setting_options(meanings: Mapping[str, str]) -> Callable[[Command], Command]:
    """An option for each setting."""

    def add(command: Command) -> Command:
        for name, meaning in reversed(list(meanings.items())):
            zero = f"; 0: {ZEROS[name]}" if name in ZEROS else ""
            command = click.option(
                f"--{name.replace('_', '-')}",
                name,
                metavar="VALUE",
                help=f"{meaning}{zero}",
            )(command)
        return command

    return add


@namespace.command(short_help="Make a folder a namespace.")
@path_argument
@setting_options({**MEANINGS, "kind": f"{MEANINGS['kind']}  [default: blocks]"})
def create(path: Path, **settings: str | None) -> None:
    """Make PATH a namespace: a new folder, or an empty one.

    \b
    Examples:
      kvfuse namespace create /mnt/kv/llama --capacity 64GiB --eviction lru
      kvfuse namespace create /mnt/kv/weights --kind files
    """
    mount_of(path)
    is_new = not path.exists()
    if is_new:
        path.mkdir()
    elif read_settings(path) is not None:
        raise Failure(f"{path} is a namespace already; 'kvfuse namespace set' changes it")
    settings, made = _with_token({**settings, "kind": settings["kind"] or "cache"})
    try:
        write_settings(path, settings)
    except Failure:
        if is_new:
            path.rmdir()
        raise
    _say_token(made)


@namespace.command("set", short_help="Change settings.")
@path_argument
@click.argument("changes", nargs=-1, metavar="[NAME=VALUE]...")
@click.option("--clear", "clears", is_flag=True, help="Clear the cache in the same step, as for another descriptor.")
@setting_options(MEANINGS)
def set_command(path: Path, changes: tuple[str, ...], clears: bool, **settings: str | None) -> None:
    """Change settings of the namespace PATH, by words or options; those that are not named stay as they are.

    'kvfuse namespace show PATH' lists them. Of the root, kind and capacity are the volume's own.

    A token closes the folder to all but its owner. Clients of other users need it then, and reach blocks through rings.
    It is stored as a hash, and shown once, when it is made: keep it.

    \b
    Examples:
      kvfuse namespace set /mnt/kv/llama capacity=128GiB ttl=3600
      kvfuse namespace set /mnt/kv/llama --capacity 128GiB --ttl 3600
      kvfuse namespace set /mnt/kv/llama token=generate
      kvfuse namespace set /mnt/kv/llama token=@/etc/kvfuse/llama.token
    """
    mount_of(path)
    _settings_of(path)
    said = _parsed(changes) | {name: value for name, value in settings.items() if value is not None}
    if not said:
        raise click.UsageError("nothing to change: say NAME=VALUE or an option")
    settings, made = _with_token(said | ({"clear": "now"} if clears else {}))
    write_settings(path, settings)
    _say_token(made)


@namespace.command(short_help="Make a namespace an ordinary folder.")
@path_argument
def delete(path: Path) -> None:
    """Make PATH, which must be empty, an ordinary folder of the namespace that it is in.

    'rmdir PATH' removes folder and namespace.
    """
    mount_of(path)
    _settings_of(path)
    change_attribute(path, os.removexattr, NAMESPACE)


@namespace.command(short_help="Empty a cache, at once.")
@path_argument
def clear(path: Path) -> None:
    """Remove all files of the cache PATH, but not of namespaces in it. Directories stay.

    Nothing of it is found any more when this returns, through whichever door; the room comes back in the background.
    Files that are open stay readable until they are closed. Other hosts that share the volume find nothing
    as soon as they hear of it, usually within milliseconds.

    \b
    Example, after the model's weights changed:
      kvfuse namespace clear /mnt/kv/llama
    """
    mount_of(path)
    _settings_of(path)
    change_attribute(path, os.setxattr, CLEAR, b"now")


@namespace.command(short_help="Settings, and what they mean.")
@path_argument
@json_option
def show(path: Path, as_json: bool) -> None:
    """The settings of the namespace PATH, and what they mean."""
    mount_of(path)
    settings = _settings_of(path)
    if as_json:
        print_json({"path": path.absolute(), "settings": {name: _plain(value) for name, value in settings.items()}})
        return
    rows = [(name, _shown(name, value), MEANINGS.get(name, "")) for name, value in settings.items()]
    print_table(["setting", "value", "meaning"], rows, str(path))


@namespace.command("list", short_help="All namespaces of a mount, with use and hit ratio.")
@click.argument("mountpoint", type=Path)
@json_option
def list_command(mountpoint: Path, as_json: bool) -> None:
    """All namespaces of the mount at MOUNTPOINT, with use and hit ratio.

    A capacity that is not set is that of what the namespace is in. For root and the user who mounted it.
    """
    rows = _rows(kvfuse_mount_at(mountpoint).point)
    if as_json:
        print_json(rows)
        return
    columns = ["path", "kind", "capacity", "used", "blocks", "files", "hit ratio", "policy"]
    print_table(columns, [_list_row(row) for row in rows])


@namespace.command(short_help="What a namespace holds: hits, misses, evictions.")
@path_argument
@json_option
def usage(path: Path, as_json: bool) -> None:
    """What the namespace PATH holds, and how well it serves: blocks, hits and misses, evictions.

    The estimated hit ratios are those that the same requests would find in a cache of other sizes ("2x": twice as
    many blocks as now). For root and the user who mounted it.
    """
    point = mount_of(path).point
    _settings_of(path)
    number = 0 if path.samefile(point) else path.stat().st_ino
    row = next((row for row in _rows(point) if row["number"] == number), None)
    if row is None:
        raise Failure(f"{path} is no namespace any more")
    if as_json:
        print_json(row)
    else:
        print_table(["", ""], [*_usage_rows(row), *_disk_rows(read_virtual(point, "stats").get("disk"))], str(path))


_USAGE = {
    "hit_ratio": "hit ratio",
    "asked": "blocks asked for",
    "hits": "found in {}",
    "misses": "not there: {}",
    "stored": "blocks stored",
    "refused": "blocks not admitted",
    "room": "gone for room",
    "expired": "gone, expired",
    "cleared": "gone, cleared",
    "estimated_hit_ratio": "hit ratio of {}",
}
"""of a cache's statistics -> what a table calls it"""


def _usage_rows(row: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    yield "kind", row["settings"]["kind"]
    yield "capacity", format_size(row["capacity"])
    yield "used", format_size(row["used"]["bytes"])
    blocks = row["used"].get("blocks", 0)
    if row["settings"]["kind"] == "blocks" or blocks:
        yield "blocks", f"{blocks}, {format_size(row['used']['block_bytes'])}"
    yield "files", row["used"]["files"] - blocks
    here = row.get("used_here", row["used"])
    if here != row["used"]:
        sign = "-" if here["bytes"] < 0 else ""  # it removed more of what others had added than it added
        yield "by this host", f"{sign}{format_size(abs(here['bytes']))}, {here['files']} files"
    if (found := row["compression"])["tried"]:
        yield "compression", _saved(found)
    cache = row["cache"]
    if cache is None:
        return
    for name, title in _USAGE.items():
        found = cache.get(name)
        for part, value in (found if isinstance(found, dict) else {"": found}).items():
            yield title.format("endless room" if part == "infx" else part), value


def _disk_rows(disk: dict[str, Any] | None) -> Iterator[tuple[str, Any]]:
    """Of this host's disk tier, where it compresses."""
    if disk is not None and disk["compression_tried"]:
        yield "copies on disk", f"those that were tried: compressed to {disk['compressed_to']:.0%} of their bytes"


def _saved(found: dict[str, int]) -> str:
    """What compression saved, for people."""
    share = found["smaller"] / found["tried"]
    text = f"{format_size(found['saved_bytes'])} of slots saved; {share:.0%} of {format_size(found['tried_bytes'])}"
    return f"{text} that were tried took smaller slots"


# -- what the daemon says ----------------------------------------------------------------------------


def _rows(point: Path) -> list[dict[str, Any]]:
    """The namespaces of a mount, with absolute paths. Failure where this user may not see them."""
    rows = read_virtual(point, "stats").get("namespaces")
    if rows is None:
        raise Failure(f"only root and the user who mounted {point} may see this; 'kvfuse namespace show' is for all")
    for row in rows:
        row["path"] = str(point / row["path"].lstrip("/"))
    return list(rows)


def _list_row(row: dict[str, Any]) -> list[Any]:
    settings, used, cache = row["settings"], row["used"], row["cache"]
    sizes = format_size(row["capacity"]), format_size(used["bytes"])
    served = (cache["hit_ratio"], f"{settings['eviction']}, {settings['admission']}") if cache else (None, None)
    blocks = used.get("blocks", 0)
    return [row["path"], settings["kind"], *sizes, blocks, used["files"] - blocks, *served]


def _shown(name: str, text: str) -> str:
    """A setting for people."""
    value = _plain(text)
    if not value and name in ZEROS:
        return ZEROS[name]
    return (
        format_size(value)
        if name in ("capacity", "token_size", "bandwidth", "burst") and isinstance(value, int)
        else text
    )


def _plain(text: str) -> int | float | str:
    """A setting as a number or a bool, if it is one."""
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def read_settings(path: Path) -> dict[str, str] | None:
    """The settings of a namespace, by name; None for a folder or a file that is none. MountError, OSError."""
    try:
        text = _ask(os.getxattr, path, NAMESPACE).decode()
    except OSError as error:
        if error.errno == errno.ENODATA:
            return None
        raise
    return dict(word.split("=", 1) for word in text.split())


def write_settings(path: Path, settings: Mapping[str, str | None]) -> None:
    """Set settings of a namespace; an empty folder becomes one. Failure says why the daemon refuses. MountError."""
    change_attribute(path, os.setxattr, NAMESPACE, _words(settings.items()))


def _settings_of(path: Path) -> dict[str, str]:
    settings = read_settings(path)
    if settings is None:
        raise Failure(f"{path} is no namespace; 'kvfuse namespace create' makes one of an empty folder")
    return settings


def _parsed(changes: Iterable[str]) -> dict[str, str | None]:
    pairs = [change.partition("=") for change in changes]
    for name, equals, _ in pairs:
        if not equals:
            raise Failure(f"settings are written NAME=VALUE, not {name!r}")
    return {name: value for name, _, value in pairs}


def _with_token(settings: dict[str, str | None]) -> tuple[dict[str, str | None], str | None]:
    """(the settings with the token itself, the token where it was made here)."""
    token = settings.get("token")
    if token == "generate":
        made = secrets.token_urlsafe(TOKEN_SIZE)
        return {**settings, "token": made}, made
    if token and token.startswith("@"):
        try:
            return {**settings, "token": Path(token[1:]).read_text().strip()}, None
        except (OSError, UnicodeDecodeError) as error:
            raise Failure(f"no token is read from {token[1:]}: {error}") from error
    return settings, None


def _say_token(token: str | None) -> None:
    if token is not None:
        say(token)


def _words(settings: Iterable[tuple[str, str | None]]) -> bytes:
    given = [(name, value) for name, value in settings if value is not None]
    words = (f"{name}={parse_descriptor(value) if name == 'descriptor' else value}" for name, value in given)
    return os.fsencode(" ".join(words))


def change_attribute(path: Path, change: Callable[..., None], *arguments: Any) -> None:
    """Change an attribute. Failure with the daemon's own words where it refuses."""
    try:
        _ask(change, path, *arguments)
    except OSError as error:
        try:
            reason = os.fsdecode(os.getxattr(path, REFUSED))
        except OSError:
            reason = error.strerror or str(error)
        raise Failure(f"{path}: {reason}") from error


def _ask(function: Callable[..., T], path: Path, *arguments: Any) -> T:
    try:
        return within(ANSWER_SECONDS, function, path, *arguments)
    except EngineTimeout as error:
        raise MountError(f"the daemon of {path} does not answer: {error}") from error
