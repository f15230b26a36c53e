"""The API's description, from the very types that it reads and writes."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from kvtide import __version__
from kvtide.serve.hub import Point, View

__all__ = ["EvictDone", "Problem", "TermsChange", "TermsSet", "TrimDone", "TrimOrder", "describe"]

# As the commands read it; what is none is refused by `parse_size`, in its words.
SizeText = Annotated[
    str,
    msgspec.Meta(max_length=64, description="12GiB, 512 MiB, 1.5GB or plain bytes"),
]
Revision = Annotated[int, msgspec.Meta(ge=0, le=(1 << 62) - 1)]
DeviceName = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
Priority = Annotated[int, msgspec.Meta(ge=-1000, le=1000)]


class TermsChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Terms to set; what is left out stays. A limit of null is none.

    `revision` is the one that was seen: 409 if it is not the current one any more. Without
    `device` they are set wherever the instance runs.
    """

    limit: SizeText | msgspec.UnsetType | None = msgspec.UNSET
    min: SizeText | msgspec.UnsetType = msgspec.UNSET
    priority: Priority | msgspec.UnsetType = msgspec.UNSET
    headroom: SizeText | msgspec.UnsetType = msgspec.UNSET
    revision: Revision | None = None
    device: DeviceName | None = None


class TrimOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the instance may keep. `now` preempts running requests if need be."""

    to: SizeText = "0"
    now: bool = False
    device: DeviceName | None = None


class TermsSet(msgspec.Struct, frozen=True):
    """An instance's terms on one device as they are now. Sizes in bytes."""

    device: str
    revision: int
    limit_bytes: int | None
    min_bytes: int
    priority: int
    headroom_bytes: int


class TrimDone(msgspec.Struct, frozen=True):
    """What an instance was charged with on one device, before and a moment after.

    `done` where it has given all that it can: else more is to come.
    """

    device: str
    before_bytes: int
    after_bytes: int
    to_bytes: int
    done: bool


class EvictDone(msgspec.Struct, frozen=True):
    """What a dead instance's records on one device answered for."""

    device: str
    charged_bytes: int


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
    "421": "It is for another host.",
    "422": "It cannot be understood, or cannot be had.",
    "503": "The ledger is busy; try again.",
}


def describe() -> dict[str, Any]:
    """OpenAPI 3.1."""
    kinds = (
        *(View, tuple[Point, ...], TermsChange, tuple[TermsSet, ...]),
        *(TrimOrder, tuple[TrimDone, ...], tuple[EvictDone, ...], Problem),
    )
    schemas, components = msgspec.json.schema_components(
        kinds, ref_template="#/components/schemas/{name}"
    )
    view, history, change, done, trim, trimmed, evicted, trouble = schemas
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
            "/api/v1/instances/{name}": {
                "patch": _write(
                    "set", "Set an instance's terms, at once.", name, change, done, problems
                ),
                "delete": _write(
                    "evict", "End what a dead instance has left.", name, None, evicted, problems
                ),
            },
            "/api/v1/instances/{name}/trim": {
                "post": _write(
                    "trim", "Have it give back once what is idle.", name, trim, trimmed, problems
                )
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


def _write(
    operation: str,
    text: str,
    name: dict[str, Any],
    body: Any,
    done: Any,
    problems: dict[str, Any],
) -> dict[str, Any]:
    described: dict[str, Any] = {
        "operationId": operation,
        "summary": text,
        "security": [{"token": []}],
        "parameters": [name],
        "responses": {"200": _answer("It is done.", done)} | problems,
    }
    if body is not None:
        described["requestBody"] = {"required": True, "content": _content(body)}
    return described
