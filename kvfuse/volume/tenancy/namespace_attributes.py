"""Namespaces as extended attributes of their folders.

``user.kvfuse.namespace`` has all settings of a namespace ("kind=blocks capacity=68719476736 ..."). An empty folder that
is given it becomes a namespace, and ceases to be one with it; of a namespace only the settings that are named change.
``user.kvfuse.namespace.capacity`` and so on are the single settings. ``user.kvfuse.namespace.refused``, which nobody
sets, says why the last change of a folder was refused: an errno cannot. ``user.kvfuse.namespace.advance`` moves the
clock of a cache by so many seconds. A token can be set, and not be read: it is "set" or "none".
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from kvfuse import errors
from kvfuse.options.options import meant_kind
from kvfuse.volume.api import Caller
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.measures.gates import TOKEN_SIZE_MAX, TOKEN_SIZE_MIN, is_token, make_lock
from kvfuse.volume.names.folders import number_of
from kvfuse.volume.namespaces.settings import ROOT, SHOWN_TOKENS, Settings
from kvfuse.volume.tenancy.namespaces import NamespaceEditor

NAMESPACE = b"user.kvfuse.namespace"
REFUSED = NAMESPACE + b".refused"
ADVANCE = NAMESPACE + b".advance"
CLEAR = b"user.kvfuse.clear"
SINGLE = {NAMESPACE + b"." + name.encode(): name for name in Settings().shown}
"""attribute of one setting -> its name"""
REFUSALS_MAX = 100


def is_about_namespaces(name: bytes) -> bool:
    """The attribute is one of these."""
    return (name.startswith(NAMESPACE) and name[len(NAMESPACE) :][:1] in (b"", b".")) or name == CLEAR


@dataclass
class NamespaceAttributes:
    """Reads and changes these attributes. `Xattrs` has one."""

    keeper: NamespaceEditor
    _refusals: OrderedDict[int, str] = field(default_factory=OrderedDict)
    """inode of a folder -> why its last change was refused"""

    def get(self, node: Node, name: bytes) -> bytes | None:
        """The value; None: the inode has no such attribute."""
        if name == REFUSED:
            refusal = self._refusals.get(node.ino)
            return refusal.encode() if refusal is not None else None
        settings = self._settings(node)
        if settings is None or name == CLEAR:
            return None
        if name == NAMESPACE:
            return settings_text(settings).encode()
        return _text(settings.shown[SINGLE[name]]).encode() if name in SINGLE else None

    def names(self, node: Node) -> list[bytes]:
        """What a list shows: of the root only if it was set."""
        settings = self._settings(node)
        is_shown = settings is not None and (number_of(node) != ROOT or settings != Settings())
        return [NAMESPACE] if is_shown else []

    def _settings(self, node: Node) -> Settings | None:
        number = number_of(node)
        namespace = self.keeper.names.core.namespaces.all.get(number) if number is not None else None
        return namespace.settings if namespace is not None else None

    async def set(self, node: Node, name: bytes, value: bytes, caller: Caller | None) -> None:
        """InvalidArgument, NotEmpty, NotPermitted, NoAttribute, Unsupported: `REFUSED` has the text."""
        with self._noting(node):
            if name == CLEAR:
                await self.keeper.clear(node, caller)
            elif name == ADVANCE:
                self.keeper.advance(node, _decoded(value), caller)
            elif name == NAMESPACE:
                change = self.keeper.create if number_of(node) is None else self.keeper.change
                await change(node, _meant(parse_settings(value)), caller)
            elif name in SINGLE:
                await self.keeper.change(node, _meant({SINGLE[name]: _decoded(value)}), caller)
            else:
                known = ", ".join(SINGLE.values())
                raise errors.InvalidArgument(f"no setting of a namespace is called {name!r}; it has {known}")

    async def remove(self, node: Node, name: bytes, caller: Caller | None) -> None:
        with self._noting(node):
            if self.get(node, name) is None:
                raise errors.NoAttribute(f"inode {node.ino} has no attribute {name!r}")
            if name != NAMESPACE:
                raise errors.NotPermitted(f"{name!r} cannot be removed: set it, or remove {NAMESPACE.decode()!r}")
            await self.keeper.delete(node, caller)

    @contextmanager
    def _noting(self, node: Node) -> Iterator[None]:
        self._refusals.pop(node.ino, None)
        try:
            yield
        except errors.OperationError as error:
            self._refusals[node.ino] = str(error)
            if len(self._refusals) > REFUSALS_MAX:
                self._refusals.popitem(last=False)
            raise


def settings_text(settings: Settings) -> str:
    """All settings, as `parse_settings` reads them."""
    return " ".join(f"{name}={_text(value)}" for name, value in settings.shown.items())


def parse_settings(value: bytes) -> dict[str, str]:
    """The settings in "NAME=VALUE NAME=VALUE ...". InvalidArgument."""
    changes = {}
    for word in _decoded(value).split():
        name, equals, text = word.partition("=")
        if not equals:
            shown = repr(word) if b"token=" not in value else "a token with spaces"
            raise errors.InvalidArgument(f"settings are written NAME=VALUE, with spaces between them; not {shown}")
        changes[name] = text
    return changes


def _meant(changes: dict[str, str]) -> dict[str, str]:
    """The changes as they are stored."""
    kind = {"kind": meant_kind(changes["kind"])} if "kind" in changes else {}
    return _with_lock({**changes, **kind})


def _with_lock(changes: dict[str, str]) -> dict[str, str]:
    """The changes with the lock of the token, which nobody keeps, in its place. InvalidArgument, without the token."""
    token = changes.get("token", "")
    if token in SHOWN_TOKENS:
        others = {name: value for name, value in changes.items() if name != "token"}
        return others if token == SHOWN_TOKENS[True] else {**others, "token": ""}
    if not token:
        return changes
    if not is_token(token):
        raise errors.InvalidArgument(
            f"a token is {TOKEN_SIZE_MIN} to {TOKEN_SIZE_MAX} printable characters of ASCII without spaces; '': none"
        )
    return {**changes, "token": make_lock(token)}


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _decoded(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise errors.InvalidArgument("settings are text in UTF-8") from None
