"""Who may ask: this machine's own pages and programs, and for a change those with the token."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvtide.serve.token import Token

__all__ = ["Guard", "problem"]

_SAFE = ("GET", "HEAD", "OPTIONS")
_MAX_BODY_BYTES = 64 << 10
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


def problem(status: int, text: str, headers: dict[str, str] | None = None) -> JSONResponse:
    """An error as JSON."""
    return JSONResponse({"error": text}, status_code=status, headers=headers)


class Guard:
    """Middleware. A name that was made to point here (DNS rebinding) is no name of ours.

    Parameters
    ----------
    app
        What is guarded.
    token
        For changes.
    hosts
        Host headers that are ours, with their port.
    """

    def __init__(self, app: ASGIApp, token: Token, hosts: Iterable[str]) -> None:
        self._app = app
        self._token = token
        self._hosts = frozenset(hosts)
        self._origins = frozenset(f"http://{host}" for host in self._hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or refuse."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        refusal = self._refusal(scope["method"], Headers(scope=scope))
        await (refusal or self._app)(scope, receive, send_with_headers)

    def _refusal(self, method: str, headers: Headers) -> JSONResponse | None:
        if headers.get("host") not in self._hosts:
            return problem(421, "this server answers only under its own loopback address")
        origin = headers.get("origin")
        if origin is not None and origin not in self._origins:
            return problem(403, "requests from other origins are refused")
        if headers.get("sec-fetch-site") == "cross-site":
            return problem(403, "requests from other sites are refused")
        if method in _SAFE:
            return None
        if not self._token.matches(headers.get("authorization")):
            text = f"a change needs the token: Authorization: Bearer, from {self._token.path}"
            return problem(401, text, {"www-authenticate": "Bearer"})
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > _MAX_BODY_BYTES:
            return problem(413, "the request is too large")
        return None
