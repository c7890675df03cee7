"""Describes the routes for programs: the document of OpenAPI 3.1 that /openapi.json answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import kvfuse
from kvfuse.http.routes import Route
from kvfuse.http.web_message import PROBLEM

PROBLEM_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "type": {"type": "string"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "errno": {"type": "string", "description": "the name of an errno of Linux"},
        "remedy": {"type": "string", "description": "what to do"},
    },
    "required": ["title", "status"],
}
PROBLEMS: dict[str, Any] = {
    "default": {
        "description": "the request failed, or was refused",
        "content": {PROBLEM: {"schema": {"$ref": "#/components/schemas/Problem"}}},
    }
}
TOKEN = {
    "name": "Kvfuse-Token",
    "in": "header",
    "description": "tokens of namespaces, with commas between them",
    "schema": {"type": "string"},
}


def build_openapi(routes: Sequence[Route]) -> dict[str, Any]:
    """The document."""
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _describe(route)
    return {
        "openapi": "3.1.0",
        "info": {"title": "kvfuse", "version": kvfuse.__version__},
        "paths": paths,
        "components": {
            "schemas": {"Problem": PROBLEM_SCHEMA},
            "securitySchemes": {"user": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"user": []}, {}],
    }


def _describe(route: Route) -> dict[str, Any]:
    parameters: list[dict[str, Any]] = []
    if route.is_of_paths:
        text = "names from the root of the volume on, with slashes between them"
        schema = {"type": "string", "minLength": 1}
        parameters.append({"name": "path", "in": "path", "required": True, "schema": schema, "description": text})
    for one in route.parameters:
        place = "header" if one.is_header else "query"
        parameters.append(
            {"name": one.name, "in": place, "required": one.is_required, "schema": one.schema, "description": one.text}
        )
    found: dict[str, Any] = {"summary": route.summary, "operationId": _name_of(route)}
    if not route.is_public:
        parameters.append(TOKEN)
    if parameters:
        found["parameters"] = parameters
    if route.body is not None:
        found["requestBody"] = {"required": True, "content": _contents(route.body)}
    found["responses"] = {
        **{str(status): {"description": text, **_content(types)} for status, (text, types) in route.answers.items()},
        **PROBLEMS,
    }
    if route.is_public:
        found["security"] = []
    return found


def _content(types: dict[str, Any]) -> dict[str, Any]:
    return {"content": _contents(types)} if types else {}


def _contents(types: dict[str, Any]) -> dict[str, Any]:
    return {kind: {"schema": schema} for kind, schema in types.items()}


def _name_of(route: Route) -> str:
    words = [part for part in route.path.strip("/").split("/") if part not in ("v1", "{path}")]
    return "_".join([route.method.lower(), *words]).replace(".", "_")
