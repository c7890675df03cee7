"""The table of what the HTTP door offers: each row is found by method and path, and is a part of openapi.json."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvfuse.http.web_message import WebAnswer, WebError, WebRequest, refuse_unknown

Handler = Callable[[WebRequest], Awaitable[WebAnswer]]


class Parameter(NamedTuple):
    """A parameter of the query, or a header. ``schema``: as OpenAPI has it."""

    name: str
    schema: dict[str, Any]
    text: str
    is_required: bool = False
    is_header: bool = False


@dataclass(frozen=True)
class Route:
    """One operation. ``path``: ends with "{path}" where any number of names may follow."""

    method: str
    path: str
    summary: str
    handler: Handler
    parameters: tuple[Parameter, ...] = ()
    body: dict[str, Any] | None = None
    """content type -> schema of the request's body; None: it has none"""
    answers: dict[int, tuple[str, dict[str, Any]]] = field(default_factory=dict)
    """status -> (text, content type -> schema)"""
    is_public: bool = False
    """anybody may ask"""

    @property
    def prefix(self) -> tuple[bytes, ...]:
        return tuple(part.encode() for part in self.path.split("/")[1:] if part != "{path}")

    @property
    def is_of_paths(self) -> bool:
        return self.path.endswith("{path}")


class Routes:
    """Finds the row of a request."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self.all = tuple(routes)
        self._by_prefix: dict[tuple[bytes, ...], dict[str, Route]] = {}
        for route in self.all:
            self._by_prefix.setdefault(route.prefix, {})[route.method] = route
        self._longest = max(len(prefix) for prefix in self._by_prefix)

    def find(self, method: str, names: tuple[bytes, ...]) -> tuple[Route, tuple[bytes, ...]]:
        """(row, names behind its prefix). WebError 404, 405."""
        for length in range(min(self._longest, len(names)), -1, -1):
            rows = self._by_prefix.get(names[:length])
            if rows is None:
                continue
            if not (length == len(names) or next(iter(rows.values())).is_of_paths):
                continue
            route = rows.get(method) or (rows.get("GET") if method == "HEAD" else None)
            if route is None:
                allowed = ", ".join(sorted({*rows, *(["HEAD"] if "GET" in rows else [])}))
                raise WebError(405, f"{method} is not offered here", f"offered: {allowed}", {"Allow": allowed})
            return route, names[length:]
        raise WebError(404, "there is no such resource", "GET /openapi.json lists all")


def check_parameters(route: Route, query: dict[str, str]) -> None:
    """WebError 400 for a parameter that the operation does not have, or lacks."""
    known = {one.name: one for one in route.parameters if not one.is_header}
    refuse_unknown(query, known, "parameter")
    for name, one in known.items():
        if one.is_required and name not in query:
            raise WebError(400, f"the parameter {name!r} is missing", one.text)
        choices = one.schema.get("enum")
        if choices and query.get(name, choices[0]) not in choices:
            raise WebError(400, f"{name}={query[name]!r}: it is one of {', '.join(choices)}")
