"""The routes of `kvtide serve`: page, metrics, and the JSON API that its description promises."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Route

from kvtide.errors import KvtideError, LedgerError, StaleRevisionError, UsageError
from kvtide.serve import steer
from kvtide.serve.guard import Guard, problem
from kvtide.serve.hub import Hub
from kvtide.serve.metrics import registry_of
from kvtide.serve.openapi import LimitChange, LimitSet, describe
from kvtide.serve.token import Token
from kvtide.units import parse_size

__all__ = ["make_app"]

_HERE = Path(__file__).parent
_PAGES = {"/": "page.html", "/page.css": "page.css", "/page.js": "page.js"}
_MAX_STREAMED = 1_000_000

S = TypeVar("S", bound=msgspec.Struct)


def make_app(directory: Path, hub: Hub, token: Token, hosts: Sequence[str]) -> Starlette:
    """The application over one directory of ledgers; `hosts` are its own names with the port."""
    routes = _Routes(directory, hub)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with hub.running():
            yield

    return Starlette(
        routes=[
            *(Route(path, _file(name)) for path, name in _PAGES.items()),
            Route("/grafana.json", _file("grafana.json")),
            Route("/metrics", routes.metrics),
            Route("/openapi.json", routes.openapi),
            Route("/api/v1/snapshot", routes.snapshot),
            Route("/api/v1/history", routes.history),
            Route("/api/v1/events", routes.events),
            Route("/api/v1/instances/{name}/limit", routes.limit, methods=["PUT"]),
        ],
        middleware=[Middleware(Guard, token=token, hosts=hosts)],
        exception_handlers={HTTPException: _http_error, KvtideError: _kvtide_error},
        lifespan=lifespan,
    )


def _file(name: str) -> Callable[[Request], Any]:
    async def serve_file(_: Request) -> Response:
        return FileResponse(_HERE / name)

    return serve_file


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return problem(error.status_code, error.detail, dict(error.headers or {}))


async def _kvtide_error(_: Request, error: Exception) -> Response:
    status = 500
    for kind, code in ((StaleRevisionError, 409), (UsageError, 422), (LedgerError, 404)):
        if isinstance(error, kind):
            status = code
            break
    return problem(status, str(error))


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


async def _body(request: Request, kind: type[S]) -> S:
    media = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if media != "application/json":
        raise HTTPException(415, "send application/json")
    try:
        return msgspec.json.decode(await request.body(), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise HTTPException(422, f"the body is not what is described: {error}") from error


@dataclass(frozen=True)
class _Routes:
    directory: Path
    hub: Hub

    async def snapshot(self, _: Request) -> Response:
        return _json(self.hub.view())

    async def history(self, _: Request) -> Response:
        return _json(tuple(self.hub.points))

    async def events(self, request: Request) -> Response:
        most = request.query_params.get("most")
        if most is not None and not (most.isdecimal() and 1 <= int(most) <= _MAX_STREAMED):
            raise HTTPException(422, f"most is a number from 1 to {_MAX_STREAMED}")
        stream = self.hub.stream(None if most is None else int(most))
        return StreamingResponse(stream, media_type="text/event-stream")

    async def metrics(self, request: Request) -> Response:
        encoder, content_type = choose_encoder(request.headers.get("accept", ""))
        encoded = await asyncio.to_thread(encoder, registry_of(lambda: self.hub.sample))
        return Response(encoded, headers={"content-type": content_type})

    async def openapi(self, _: Request) -> Response:
        return _json(describe())

    async def limit(self, request: Request) -> Response:
        change = await _body(request, LimitChange)
        done = await asyncio.to_thread(
            steer.set_limit,
            self.directory,
            request.path_params["name"],
            None if change.limit is None else parse_size(change.limit),
            change.revision,
            change.device,
        )
        await self.hub.look()
        return _json(LimitSet(revisions=done))
