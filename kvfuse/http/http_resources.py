"""Lists all resources of the HTTP door, with their handlers: the one place that routes and openapi.json are made of."""

from __future__ import annotations

from typing import Any

from kvfuse.access.namespace_handle import EXPIRES_MAX
from kvfuse.http.block_bodies import CONTENT_TYPE, KEYS_MAX
from kvfuse.http.block_resources import BlockResources
from kvfuse.http.dav_resources import DavResources
from kvfuse.http.event_streams import EVENTS, LINES, EventStreams
from kvfuse.http.file_resources import FileResources
from kvfuse.http.kernel_drops import KernelDrops
from kvfuse.http.name_resources import CHANGEABLE, LISTED_MAX, TIME_MAX, NameResources
from kvfuse.http.namespace_resources import NamespaceResources
from kvfuse.http.openapi import build_openapi
from kvfuse.http.routes import Parameter, Route
from kvfuse.http.web_limits import SharedUnits
from kvfuse.http.web_message import BYTES, JSON, WebAnswer, WebRequest, json_answer
from kvfuse.keys import KEY_SIZE_MAX
from kvfuse.options.options import HttpOptions
from kvfuse.volume.api import RingApi

BINARY: dict[str, Any] = {"type": "string", "format": "binary"}
MODE = Parameter("mode", {"type": "string", "pattern": "^[0-7]{1,5}$"}, "permission bits, in octal digits")
FSYNC = Parameter("fsync", {"type": "string", "enum": ["", "true"]}, "answer when it survives a loss of power")

PUT_TERMS = (
    MODE,
    Parameter("ttl", {"type": "integer", "minimum": 0, "maximum": EXPIRES_MAX}, "seconds; 0: as the namespace says"),
    Parameter("priority", {"type": "integer", "minimum": -128, "maximum": 127}, "higher: it stays for longer"),
)
KEYS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "keys": {
            "type": "array",
            "items": {"type": "string", "minLength": 1, "maxLength": KEY_SIZE_MAX // 4},
            "minItems": 1,
            "maxItems": KEYS_MAX,
        }
    },
    "required": ["keys"],
}
OBJECT: dict[str, Any] = {"type": "object"}
TEXT: dict[str, Any] = {"type": "string"}
FLAG: dict[str, Any] = {"type": "string", "enum": ["", "true"]}
Answers = dict[int, tuple[str, dict[str, Any]]]
OK_BYTES: Answers = {200: ("the bytes", {BYTES: BINARY})}
OK_JSON: Answers = {200: ("what is asked for", {JSON: OBJECT})}
DONE: Answers = {204: ("it is done", {})}
MADE: Answers = {201: ("it is made", {})}
ATTRIBUTES = "/v1/attributes/{path}"
TO = Parameter("to", {"type": "string", "minLength": 1}, "the new path, from the root of the volume on", True)
XATTR = Parameter("name", {"type": "string"}, "of the attribute; none: all, in base64")
REQUIRED_XATTR = XATTR._replace(text="of the attribute: it begins with 'user.'", is_required=True)
RANGE = Parameter("Range", {"type": "string"}, "bytes=FIRST-LAST", is_header=True)
IF_NONE_MATCH = Parameter("If-None-Match", {"type": "string"}, "an ETag", is_header=True)
IF_MATCH = Parameter(
    "If-Match", {"type": "string"}, "ETags: it is changed in one of these states alone", is_header=True
)
LISTING = (
    Parameter("after", {"type": "integer", "minimum": 0, "maximum": TIME_MAX}, "'next' of the page before"),
    Parameter("limit", {"type": "integer", "minimum": 1, "maximum": LISTED_MAX}, "names of this page"),
)


class Resources:
    """The handlers of one volume."""

    def __init__(self, volume: RingApi, options: HttpOptions) -> None:
        drops = KernelDrops(volume)
        self.memory = SharedUnits(options.body_memory, options.body_memory // 2, "bytes of bodies in memory")
        self._followers = SharedUnits(16 * options.followers, options.followers, "streams of events")
        self._files = FileResources(volume, drops)
        self._names = NameResources(volume, drops)
        self._blocks = BlockResources(volume, drops, self.memory)
        self._namespaces = NamespaceResources(volume, drops)
        self._dav = DavResources(volume, self._files, self._names)
        self._events = EventStreams(volume, self._followers)

    def statistics(self) -> dict[str, int]:
        return {"body_bytes": self.memory.used, "followers": self._followers.used}

    def end(self) -> None:
        """The door closes: what would never end by itself ends."""
        self._events.is_ending = True

    def routes(self) -> list[Route]:
        """All of them."""
        rows = [
            *self._file_routes(),
            *self._name_routes(),
            *self._block_routes(),
            *self._batch_routes(),
            *self._namespace_routes(),
        ]
        description = build_openapi([*rows, *self._public_routes({})])
        return [*rows, *self._dav.routes(), *self._public_routes(description)]

    def _public_routes(self, description: dict[str, Any]) -> list[Route]:
        async def health(request: WebRequest) -> WebAnswer:
            return json_answer({"status": "ok"})

        async def describe(request: WebRequest) -> WebAnswer:
            return json_answer(description)

        return [
            Route("GET", "/healthz", "Whether this server answers.", health, answers=OK_JSON, is_public=True),
            Route("GET", "/openapi.json", "What this server offers.", describe, answers=OK_JSON, is_public=True),
        ]

    def _file_routes(self) -> list[Route]:
        files, path = self._files, "/v1/files/{path}"
        offset = Parameter("offset", {"type": "string", "pattern": "^([0-9]{1,18}|end)$"}, "where to: bytes, or 'end'")
        patched = (offset, FSYNC, IF_MATCH)
        stored: Answers = {201: ("it is new", {}), 204: ("it took the place of a former one", {})}
        ranged: Answers = {
            200: ("the bytes", {BYTES: BINARY}),
            206: ("a range of them", {BYTES: BINARY}),
            304: ("the same", {}),
        }
        return [
            Route("GET", path, "The bytes of a file.", files.get, (RANGE, IF_NONE_MATCH), answers=ranged),
            Route("PUT", path, "Store a whole file.", files.put, (MODE, FSYNC, IF_MATCH), {BYTES: BINARY}, stored),
            Route("PATCH", path, "Write into a file, in place.", files.patch, patched, {BYTES: BINARY}, DONE),
            Route("DELETE", path, "Remove a file.", files.delete, (IF_MATCH,), answers=DONE),
        ]

    def _name_routes(self) -> list[Route]:
        names, folders, xattrs = self._names, "/v1/folders/{path}", "/v1/xattrs/{path}"
        xattr = {200: ("the value", {BYTES: BINARY, JSON: OBJECT})}
        nofollow = Parameter("nofollow", FLAG, "of a symbolic link itself")
        how = Parameter("how", {"type": "string", "enum": ["replace", "new", "exchange"]}, "where the name is taken")
        changes = {name: {"type": "integer", "minimum": a, "maximum": b} for name, (a, b) in CHANGEABLE.items()}
        body = {JSON: {"type": "object", "properties": changes, "additionalProperties": False}}
        link = "/v1/symlinks/{path}"
        return [
            Route("GET", folders, "A page of the names of a folder.", names.list_folder, LISTING, answers=OK_JSON),
            Route("PUT", folders, "Make a folder.", names.make_folder, (MODE,), answers=MADE),
            Route("DELETE", folders, "Remove an empty folder.", names.remove_folder, answers=DONE),
            Route("GET", ATTRIBUTES, "The fields of a stat.", names.get_attributes, (nofollow,), answers=OK_JSON),
            Route("PATCH", ATTRIBUTES, "Set some of them.", names.set_attributes, (), body, OK_JSON),
            Route("GET", xattrs, "Extended attributes.", names.get_xattrs, (XATTR,), answers=xattr),
            Route("PUT", xattrs, "Set one.", names.set_xattr, (REQUIRED_XATTR,), {BYTES: BINARY}, DONE),
            Route("DELETE", xattrs, "Remove one.", names.remove_xattr, (REQUIRED_XATTR,), answers=DONE),
            Route("POST", "/v1/rename/{path}", "Give it another path.", names.rename, (TO, how), answers=DONE),
            Route("POST", "/v1/link/{path}", "Give it one more path.", names.link, (TO,), answers=MADE),
            Route("PUT", link, "Make a symbolic link to the body.", names.make_symlink, (), {"text/plain": TEXT}, MADE),
            Route("POST", "/v1/sync/{path}", "Answer when it survives a loss of power.", names.sync, answers=DONE),
        ]

    def _block_routes(self) -> list[Route]:
        blocks, path = self._blocks, "/v1/blocks/{path}"
        return [
            Route("GET", path, "The bytes of a block: of a folder and a key.", blocks.get_one, answers=OK_BYTES),
            Route("PUT", path, "Store a block.", blocks.put_one, PUT_TERMS, {BYTES: BINARY}, DONE),
            Route("DELETE", path, "Remove a block.", blocks.delete_one, answers=DONE),
        ]

    def _batch_routes(self) -> list[Route]:
        blocks, path = self._blocks, "/v1/batch/{}/{{path}}"
        keys: dict[str, Any] = {CONTENT_TYPE: BINARY, JSON: KEYS}
        packed: dict[str, Any] = {CONTENT_TYPE: BINARY}
        rows = {200: ("a status for each key", packed)}
        found = {200: ("a status for each key", {CONTENT_TYPE: BINARY, JSON: OBJECT})}
        return [
            Route("POST", path.format("exists"), "Which keys have a block.", blocks.exists, (), keys, found),
            Route("POST", path.format("longest_prefix"), "How long a chain is.", blocks.prefix, (), keys, OK_JSON),
            Route("POST", path.format("get"), "The blocks of many keys.", blocks.get, (), keys, rows),
            Route("POST", path.format("put"), "Store many blocks.", blocks.put, PUT_TERMS, packed, rows),
            Route("POST", path.format("delete"), "Remove many blocks.", blocks.delete, (), keys, rows),
            Route("POST", path.format("prefetch"), "Bring blocks into memory.", blocks.prefetch, (), keys, rows),
        ]

    def _namespace_routes(self) -> list[Route]:
        spaces, path = self._namespaces, "/v1/namespaces/{path}"
        body: dict[str, Any] = {JSON: OBJECT}
        streams = {200: ("what happens, until the client leaves", {LINES: TEXT, EVENTS: TEXT})}
        return [
            Route("GET", path, "The settings of a namespace.", spaces.get, answers=OK_JSON),
            Route("PUT", path, "Make a namespace.", spaces.create, (MODE,), body, {201: ("its settings", body)}),
            Route("PATCH", path, "Change some settings.", spaces.change, (), body, OK_JSON),
            Route("DELETE", path, "Remove an empty namespace.", spaces.remove, answers=DONE),
            Route("POST", "/v1/clear/{path}", "Remove all blocks of a namespace.", spaces.clear, answers=DONE),
            Route("GET", "/v1/events/{path}", "What happens to blocks.", self._events.follow, answers=streams),
        ]
