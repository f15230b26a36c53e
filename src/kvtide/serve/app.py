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

from kvtide import control
from kvtide.errors import (
    KvtideError,
    LedgerBusyError,
    LedgerError,
    NoInstanceError,
    StaleRevisionError,
    UsageError,
)
from kvtide.serve.guard import Guard, problem
from kvtide.serve.hub import Hub
from kvtide.serve.metrics import registry_of
from kvtide.serve.openapi import (
    EvictDone,
    TermsChange,
    TermsSet,
    TrimDone,
    TrimOrder,
    describe,
)
from kvtide.serve.token import Token
from kvtide.units import parse_size

__all__ = ["make_app"]

_HERE = Path(__file__).parent
_PAGES = {"/": "page.html"} | {
    f"/{name}": name for name in ("page.css", "page.js", "common.js", "terms.js")
}
_MAX_STREAMED = 1_000_000

R = TypeVar("R")
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
            Route("/api/v1/instances/{name}", routes.instance, methods=["PATCH", "DELETE"]),
            Route("/api/v1/instances/{name}/trim", routes.trim, methods=["POST"]),
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


# Of what is refused; the first that fits.
_STATUS = (
    (NoInstanceError, 404),
    (StaleRevisionError, 409),
    (LedgerBusyError, 503),
    (LedgerError, 422),
    (UsageError, 422),
)


async def _kvtide_error(_: Request, error: Exception) -> Response:
    status = next((code for kind, code in _STATUS if isinstance(error, kind)), 500)
    return problem(status, str(error))


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def _integer(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _size(field: str, value: Any) -> Any:
    try:
        return parse_size(value) if isinstance(value, str) else value
    except UsageError as error:
        raise HTTPException(422, f"{field}: {error}") from error


async def _body(request: Request, kind: type[S]) -> S:
    media = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if media != "application/json":
        raise HTTPException(415, "send application/json")
    try:
        given = msgspec.json.decode(await request.body())
        if isinstance(given, dict):
            # To JSON 1.0 is an integer, in unions to msgspec it is not.
            given = {key: _integer(value) for key, value in given.items()}
        return msgspec.convert(given, kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
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

    async def instance(self, request: Request) -> Response:
        return await (self.set(request) if request.method == "PATCH" else self.evict(request))

    async def set(self, request: Request) -> Response:
        given = await _body(request, TermsChange)
        wanted = {
            field: _size(field, value)
            for field in ("limit", "min", "priority", "headroom")
            if (value := getattr(given, field)) is not msgspec.UNSET
        }
        if not wanted:
            raise HTTPException(422, "nothing to set: give limit, min, priority or headroom")
        changed = await self._do(
            control.set, request, **wanted, revision=given.revision, device=given.device
        )
        return _json([TermsSet(c.device, c.revision, *c.terms) for c in changed])

    async def trim(self, request: Request) -> Response:
        order = await _body(request, TrimOrder)
        done = await self._do(
            control.trim, request, to=_size("to", order.to), now=order.now, device=order.device
        )
        return _json(
            [TrimDone(t.device, t.before_bytes, t.after_bytes, t.to_bytes, t.done) for t in done]
        )

    async def evict(self, request: Request) -> Response:
        done = await self._do(control.evict, request)
        return _json([EvictDone(e.device, e.charged_bytes) for e in done])

    async def _do(self, change: Callable[..., list[R]], request: Request, **what: Any) -> list[R]:
        """Carry it out, and have all who look see it at once."""
        name = request.path_params["name"]
        done = await asyncio.to_thread(change, name, directory=self.directory, **what)
        await self.hub.look()
        return done
