"""Runs the server until it is interrupted."""

from __future__ import annotations

import socket
from pathlib import Path
from types import FrameType

import uvicorn

from kvtide.errors import KvtideError
from kvtide.serve.app import make_app
from kvtide.serve.hub import Hub
from kvtide.serve.token import Token

__all__ = ["run"]


class _Server(uvicorn.Server):
    """Ends the streams of events first, which would keep it waiting."""

    def __init__(self, config: uvicorn.Config, hub: Hub) -> None:
        super().__init__(config)
        self._hub = hub

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        self._hub.stop()


def run(directory: Path, host: str, port: int, interval: float) -> None:
    """Serve on a loopback address; says where, with the token in the part that is never sent.

    Raises
    ------
    KvtideError
        The port is taken, or the token cannot be used.
    """
    token = Token(directory)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(128)  # so that who reads the line below may connect at once
    except OSError as error:
        listening.close()
        raise KvtideError(f"cannot serve on {host} port {port}: {error.strerror}") from error
    port = listening.getsockname()[1]
    literal = f"[{host}]" if ":" in host else host
    hosts = [f"{name}:{port}" for name in (literal, "localhost", "127.0.0.1", "[::1]")]
    hub = Hub(directory, interval)
    app = make_app(directory, hub, token, hosts)
    print(f"http://{literal}:{port}/#token={token.text}", flush=True)
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=1,
        lifespan="on",
    )
    _Server(config, hub).run(sockets=[listening])
