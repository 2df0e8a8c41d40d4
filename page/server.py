"""`lastwords serve`: HTTP for browsers and Prometheus. GET only, one process, nothing is changed.

A page of another site cannot read what is served here: a request has to name this host or an IP address (a name that
is made to lead here by its owner is refused), and nothing allows another origin. Off loopback a token is needed, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hmac
import ipaddress
import logging
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import uvicorn
from sse_starlette.sse import EventSourceResponse, SendTimeoutError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lastwords import clock
from lastwords.errors import ConfigError
from lastwords.page import metrics
from lastwords.page.watch import STREAMS_MAX, BrowserStream, JobWatch
from lastwords.transport import host_port

_log = logging.getLogger(__name__)

STATIC = Path(__file__).with_name("static")
PAGES = {"/": "index.html", "/page.css": "page.css", "/page.js": "page.js", "/icon.svg": "icon.svg"}
OPEN_TO_ALL = (*PAGES, "/healthz")
"""These say nothing of the job; the page has to be there to ask for the token."""

PING_S = 5
SEND_S = 10.0
"""A browser that takes nothing for so long is disconnected."""

CONNECTIONS_MAX = 4 * STREAMS_MAX
HEADERS = (
    (b"content-security-policy", b"default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
)


class Guard:
    """Lets through what may be answered, and adds the headers that keep other sites out. names: of this host."""

    def __init__(self, app: ASGIApp, names: frozenset[str], token: str | None) -> None:
        self._app, self._names, self._token = app, names, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI calls it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                names = {name for name, _ in HEADERS}
                message["headers"] = [one for one in message["headers"] if one[0] not in names] + [*HEADERS]
            await send(message)

        await (self._refusal(Request(scope)) or self._app)(scope, receive, with_headers)

    def _refusal(self, request: Request) -> Response | None:
        if not is_here(request.headers.get("host", ""), self._names):
            return PlainTextResponse("this host has another name; use its IP address\n", 403)
        if request.method != "GET":
            return PlainTextResponse("only GET is served\n", 405, {"allow": "GET"})
        if self._token is None or request.url.path in OPEN_TO_ALL:
            return None
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), self._token.encode()):
            return None
        return PlainTextResponse(
            "a token is needed: Authorization: Bearer TOKEN\n", 401, {"www-authenticate": "Bearer"}
        )


def is_here(host: str, names: frozenset[str]) -> bool:
    """Whether a Host header names this host, or any IP address, which nobody can make lead elsewhere.

    >>> here = frozenset({"localhost", "node-3"})
    >>> [is_here(host, here) for host in ("localhost:8090", "[::1]:80", "10.0.0.7", "node-3", "evil.example:8090", "")]
    [True, True, True, True, False, False]
    """
    name = host[1 : host.find("]")] if host.startswith("[") else host.partition(":")[0]
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name.lower().rstrip(".") in names
    return True


class _Events(EventSourceResponse):
    """A stream that counts as long as it is connected."""

    def __init__(self, watch: JobWatch) -> None:
        self._watch, self._stream = watch, BrowserStream()
        super().__init__(self._named(), ping=PING_S, send_timeout=SEND_S, sep="\n")

    async def _named(self) -> AsyncIterator[dict[str, str]]:
        async for event, message in self._stream:
            yield {"event": event, "data": message}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._watch.opened(self._stream), contextlib.suppress(SendTimeoutError):
            await super().__call__(scope, receive, send)


def application(watch: JobWatch, names: frozenset[str], token: str | None) -> ASGIApp:
    """What is served. `watch.run` is for the caller to run."""

    async def page(request: Request) -> Response:
        return FileResponse(STATIC / PAGES[request.url.path])

    async def healthz(_: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def events(_: Request) -> Response:
        if len(watch.streams) >= STREAMS_MAX:
            return PlainTextResponse("too many browsers\n", 503, {"retry-after": "30"})
        return _Events(watch)

    async def state(request: Request) -> Response:
        look = await watch.fresh()
        rank = _number(request, "rank")
        told: dict[str, Any] = {"controller": look.address, "note": look.note, "checkpoints": [*look.checkpoints]}
        if look.state is not None:
            told |= dataclasses.asdict(look.state)
            for view, seen in zip(told["ranks"], look.state.ranks, strict=True):
                view["stand"] = None if seen.stand is None else str(seen.stand)
            if rank is not None:
                told["ranks"] = told["ranks"][rank : rank + 1]
        return JSONResponse(told)

    async def incidents(request: Request) -> Response:
        look = await watch.fresh()
        return JSONResponse(look.incidents.after(_number(request, "after") or 0))

    async def told_prometheus(_: Request) -> Response:
        look = await watch.fresh()
        now_unix_s = clock.wall_ns() / 1e9
        text = metrics.text(look, now_unix_s=now_unix_s, streams=len(watch.streams), requests=watch.requests)
        return Response(text, media_type=metrics.CONTENT_TYPE)

    async def wrong(_: Request, error: Exception) -> Response:
        return PlainTextResponse(f"{error}\n", 400)

    served = {"/events": events, "/state.json": state, "/incidents.json": incidents, "/metrics": told_prometheus}
    routes = [Route(path, page) for path in PAGES] + [Route("/healthz", healthz)]
    routes += [Route(path, endpoint) for path, endpoint in served.items()]
    return Guard(Starlette(routes=routes, exception_handlers={ConfigError: wrong}), names, token)


def _number(request: Request, name: str) -> int | None:
    """A parameter; ConfigError if it is no number from 0."""
    text = request.query_params.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise ConfigError(f"{name} must be a number from 0")
    return int(text)


# ------------------------------------------------------------------------------------------------ the process


def serve(watch: JobWatch, host: str, port: int, token: str | None) -> str:
    """Serves until SIGINT or SIGTERM, and returns when it has ended. ConfigError if the address cannot be had.

    Off loopback ConfigError without a token.
    """
    listening = listen(host, port)
    address = listening.getsockname()
    if not ipaddress.ip_address(address[0]).is_loopback and token is None:
        listening.close()
        raise ConfigError(f"{host} can be reached from other hosts: give a file with a token, --token-file")
    where = f"http://{host_port(host, address[1])}/"
    _log.warning("serving on %s; Ctrl-C ends it", where)
    here = socket.gethostname().lower()
    names = frozenset((host.lower(), "localhost", here, here.partition(".")[0]))
    config = uvicorn.Config(
        application(watch, names, token),
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=CONNECTIONS_MAX,
        timeout_graceful_shutdown=1,
    )
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(uvicorn.Server(config), watch, listening))
    return where


async def _serve(server: uvicorn.Server, watch: JobWatch, listening: socket.socket) -> None:
    looking = asyncio.create_task(watch.run())
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    await asyncio.wait([looking, serving], return_when=asyncio.FIRST_COMPLETED)
    server.should_exit = True
    await serving
    if not looking.done():
        looking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await looking


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there; ConfigError, in words, if that cannot be had."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        where = host_port(host, port)
        raise ConfigError(f"cannot serve on {where}: {error.strerror or error}; choose another: --http") from error


def token_in(path: Path) -> str:
    """What a browser has to know. ConfigError if the file cannot be read, or has no good token."""
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the token in {path}: {error}") from error
    if not (16 <= len(token) <= 256 and token.isascii() and token.isprintable() and " " not in token):
        raise ConfigError(f"the token in {path} must be 16 to 256 visible ASCII characters")
    return token
