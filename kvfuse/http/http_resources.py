"""Lists all resources of the HTTP door, with their handlers: the one place that routes and openapi.json are made of."""

from __future__ import annotations

from typing import Any

from kvfuse.access.namespace_handle import EXPIRES_MAX
from kvfuse.http.block_bodies import CONTENT_TYPE, KEYS_MAX
from kvfuse.http.block_resources import BlockResources
from kvfuse.http.file_resources import FileResources
from kvfuse.http.kernel_drops import KernelDrops
from kvfuse.http.routes import Parameter, Route
from kvfuse.http.web_limits import Shared
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
OK_BYTES: dict[int, tuple[str, dict[str, Any]]] = {200: ("the bytes", {BYTES: BINARY})}
NO_CONTENT: dict[int, tuple[str, dict[str, Any]]] = {204: ("it is done", {})}


class Resources:
    """The handlers of one volume."""

    def __init__(self, volume: RingApi, options: HttpOptions) -> None:
        self.volume = volume
        drops = KernelDrops(volume)
        self.memory = Shared(options.body_memory, options.body_memory // 2, "bytes of bodies in memory")
        self.files = FileResources(volume, drops)
        self.blocks = BlockResources(volume, drops, self.memory)

    def statistics(self) -> dict[str, int]:
        return {"body_bytes": self.memory.used}

    def end(self) -> None:
        """The door closes: what would never end by itself ends."""

    def routes(self) -> list[Route]:
        return [*self._files(), *self._blocks(), *self._batches(), *self._public()]

    def _blocks(self) -> list[Route]:
        blocks, path = self.blocks, "/v1/blocks/{path}"
        return [
            Route("GET", path, "The bytes of a block: of a folder and a key.", blocks.get_one, answers=OK_BYTES),
            Route("PUT", path, "Store a block.", blocks.put_one, PUT_TERMS, {BYTES: BINARY}, NO_CONTENT),
            Route("DELETE", path, "Remove a block.", blocks.delete_one, answers=NO_CONTENT),
        ]

    def _batches(self) -> list[Route]:
        blocks, path = self.blocks, "/v1/batch/{}/{{path}}"
        both: dict[str, Any] = {CONTENT_TYPE: BINARY, JSON: KEYS}
        packed: dict[str, Any] = {CONTENT_TYPE: BINARY}
        count: dict[str, Any] = {"type": "object", "properties": {"count": {"type": "integer"}}, "required": ["count"]}
        rows = {200: ("a status for each key", {CONTENT_TYPE: BINARY})}
        found = {200: ("a status for each key", {CONTENT_TYPE: BINARY, JSON: {"type": "object"}})}
        return [
            Route("POST", path.format("exists"), "Which keys have a block.", blocks.exists, (), both, found),
            Route(
                "POST", path.format("longest_prefix"), "How many keys of a chain have a block, from the first on.",
                blocks.prefix, (), both, {200: ("the number", {JSON: count})},
            ),
            Route("POST", path.format("get"), "The blocks of many keys.", blocks.get, (), both, rows),
            Route("POST", path.format("put"), "Store many blocks.", blocks.put, PUT_TERMS, packed, rows),
            Route("POST", path.format("delete"), "Remove many blocks.", blocks.delete, (), both, rows),
            Route("POST", path.format("prefetch"), "Bring blocks into memory.", blocks.prefetch, (), both, rows),
        ]  # fmt: skip

    def _public(self) -> list[Route]:
        async def health(request: WebRequest) -> WebAnswer:
            return json_answer({"status": "ok"})

        return [Route("GET", "/healthz", "Whether this server answers.", health, is_public=True)]

    def _files(self) -> list[Route]:
        files, path = self.files, "/v1/files/{path}"
        return [
            Route("GET", path, "The bytes of a file.", files.get, answers={200: ("the bytes", {BYTES: BINARY})}),
            Route(
                "PUT",
                path,
                "Store a whole file, in the place of the former.",
                files.put,
                (MODE, FSYNC),
                {BYTES: BINARY},
            ),
            Route(
                "PATCH",
                path,
                "Write bytes into a file, in place.",
                files.patch,
                (Parameter("offset", {"type": "string"}, "where to, a number of bytes, or 'end'"), FSYNC),
                {BYTES: BINARY},
            ),
            Route("DELETE", path, "Remove a file.", files.delete),
        ]
