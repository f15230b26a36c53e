"""The API's description, from the very types that it reads and writes."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from kvtide import __version__
from kvtide.serve.hub import Point, View

__all__ = ["LimitChange", "LimitSet", "Problem", "describe"]

SizeText = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^[0-9]{1,6}(\.[0-9]{1,3})?([KMGT]i?B|B)?$",
        description="12GiB, 512MiB, 1.5GB or plain bytes",
    ),
]
Revision = Annotated[int, msgspec.Meta(ge=0, le=(1 << 62) - 1)]
DeviceName = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]


class LimitChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A limit to set: a size in words, or null for none.

    `revision` is the one that was seen: 409 if it is not the current one any more. Without
    `device` it is set wherever the instance runs.
    """

    limit: SizeText | None
    revision: Revision | None = None
    device: DeviceName | None = None


class LimitSet(msgspec.Struct, frozen=True):
    """The new revision of the limit, by device."""

    revisions: dict[str, int]


class Problem(msgspec.Struct, frozen=True):
    """What is wrong, for a person."""

    error: str


_PROBLEMS = {
    "401": "The token is missing or wrong.",
    "403": "The request comes from another origin.",
    "404": "No such instance.",
    "409": "Somebody changed it since that revision.",
    "413": "The request is too large.",
    "415": "It is not JSON.",
    "422": "It cannot be understood, or cannot be done.",
}


def describe() -> dict[str, Any]:
    """OpenAPI 3.1."""
    kinds = (View, tuple[Point, ...], LimitChange, LimitSet, Problem)
    schemas, components = msgspec.json.schema_components(
        kinds, ref_template="#/components/schemas/{name}"
    )
    view, history, change, done, trouble = schemas
    problems = {
        code: {"description": text, "content": _content(trouble)}
        for code, text in _PROBLEMS.items()
    }
    most = {
        "name": "most",
        "in": "query",
        "required": False,
        "description": "End after so many views.",
        "schema": {"type": "integer", "minimum": 1, "maximum": 1_000_000},
    }
    name = {
        "name": "name",
        "in": "path",
        "required": True,
        "schema": {"type": "string", "minLength": 1, "maxLength": 128, "pattern": r"^[^\s/]+$"},
    }
    stream = {"200": {"description": "Views.", "content": {"text/event-stream": {}}}}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "kvtide",
            "version": __version__,
            "description": "Who holds how much of a device, and changes to that.",
        },
        "paths": {
            "/api/v1/snapshot": {
                "get": _read("snapshot", "How things are now, with the last events.", view)
            },
            "/api/v1/history": {
                "get": _read("history", "What was held in the last 15 minutes.", history)
            },
            "/api/v1/events": {
                "get": {
                    "operationId": "events",
                    "summary": "The same after every look, with what happened since.",
                    "parameters": [most],
                    "responses": stream | {"422": problems["422"]},
                }
            },
            "/api/v1/instances/{name}/limit": {
                "put": {
                    "operationId": "set_limit",
                    "summary": "Set or lift the most that an instance may hold.",
                    "security": [{"token": []}],
                    "parameters": [name],
                    "requestBody": {"required": True, "content": _content(change)},
                    "responses": {"200": _answer("It is set.", done)} | problems,
                }
            },
        },
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _content(schema: Any) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _answer(text: str, schema: Any) -> dict[str, Any]:
    return {"description": text, "content": _content(schema)}


def _read(name: str, text: str, schema: Any) -> dict[str, Any]:
    return {
        "operationId": name,
        "summary": text,
        "responses": {"200": _answer("As it says.", schema)},
    }
