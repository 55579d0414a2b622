"""A small HTTP proxy for tests: it is between a client and a real S3 endpoint and injects faults on request.

Terms
  fault   what happens to one matching request; taken from a list in order; without one, the request passes

Threads: one per connection; the list of faults and the log are guarded by one lock.
"""

from __future__ import annotations

import http.client
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal

Harm = Literal["status", "drop_before", "drop_after", "truncate", "garble", "short", "slow"]

HOP_HEADERS = {"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "proxy-connection"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault for one request of `method` (any, if empty) whose path contains `part`."""

    harm: Harm
    method: str = ""
    part: str = ""
    status: int = 500
    body: bytes = b""
    keep_bytes: int = 1
    """`truncate`: how much is sent before the connection breaks. `short`: how much is sent as if it were complete."""
    seconds: float = 0.0
    """`slow`: the pause in the middle of the body."""


@dataclass(frozen=True, slots=True)
class ProxiedRequest:
    """A request as the client sent it."""

    method: str
    path: str
    headers: dict[str, str] = field(repr=False)


class FaultyProxy:
    """Forwards to `target` (host, port), applying the faults that tests plan."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._lock = threading.Lock()
        self._faults: list[Fault] = []
        self._requests: list[ProxiedRequest] = []
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                proxy._handle(self)

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_any  # noqa: N815

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                """Tests read `requests`, not the terminal."""

        self._server = _QuietServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def plan(self, *faults: Fault) -> None:
        """Apply these faults, in order, each to the next request that it matches."""
        with self._lock:
            self._faults.extend(faults)

    def reset(self) -> None:
        with self._lock:
            self._faults.clear()
            self._requests.clear()

    def requests(self, matches: Callable[[ProxiedRequest], bool] = lambda _: True) -> list[ProxiedRequest]:
        with self._lock:
            return [request for request in self._requests if matches(request)]

    def unused(self) -> int:
        """The number of planned faults that have not happened."""
        with self._lock:
            return len(self._faults)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    # ── internals ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def _take(self, method: str, path: str) -> Fault | None:
        with self._lock:
            for index, fault in enumerate(self._faults):
                if fault.method in ("", method) and fault.part in path:
                    return self._faults.pop(index)
        return None

    def _handle(self, handler: BaseHTTPRequestHandler) -> None:
        method, path = handler.command, handler.path
        body = handler.rfile.read(int(handler.headers.get("content-length") or 0))
        with self._lock:
            self._requests.append(ProxiedRequest(method, path, {k.lower(): v for k, v in handler.headers.items()}))
        fault = self._take(method, path)
        if fault is not None and fault.harm == "drop_before":
            return _break(handler)
        if fault is not None and fault.harm == "status":
            return _respond(handler, fault.status, [], fault.body)
        status, headers, response = self._forward(handler, method, path, body)
        if fault is not None and fault.harm == "drop_after":
            return _break(handler)
        if fault is not None and fault.harm == "garble":
            response = bytes(byte ^ 0xFF for byte in response)
        if fault is not None and fault.harm == "short":
            response = response[: fault.keep_bytes]
            headers = [header for header in headers if header[0].lower() != "content-length"]
        keep = fault.keep_bytes if fault is not None and fault.harm == "truncate" else None
        pause = fault.seconds if fault is not None and fault.harm == "slow" else 0.0
        return _respond(handler, status, headers, response, keep=keep, pause=pause)

    def _forward(
        self, handler: BaseHTTPRequestHandler, method: str, path: str, body: bytes
    ) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection(*self._target, timeout=30)
        try:
            headers = {k: v for k, v in handler.headers.items() if k.lower() not in HOP_HEADERS}
            connection.request(method, path, body=body, headers=headers)
            response = connection.getresponse()
            content = response.read()
            forwarded = [(k, v) for k, v in response.getheaders() if k.lower() not in HOP_HEADERS]
            return response.status, forwarded, content
        finally:
            connection.close()


class _QuietServer(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: object, client_address: object) -> None:
        """Broken connections are intended here."""


def _break(handler: BaseHTTPRequestHandler) -> None:
    handler.close_connection = True
    try:
        handler.connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass


def _respond(
    handler: BaseHTTPRequestHandler,
    status: int,
    headers: list[tuple[str, str]],
    body: bytes,
    *,
    keep: int | None = None,
    pause: float = 0.0,
) -> None:
    handler.send_response_only(status)
    names = {name.lower() for name, _ in headers}
    for name, value in headers:
        handler.send_header(name, value)
    if "content-length" not in names:
        handler.send_header("content-length", str(len(body)))
    handler.end_headers()
    if handler.command == "HEAD":
        return
    if keep is not None:
        handler.wfile.write(body[:keep])
        handler.wfile.flush()
        _break(handler)
        return
    half = len(body) // 2 if pause else 0
    handler.wfile.write(body[:half])
    if pause:
        handler.wfile.flush()
        time.sleep(pause)
    handler.wfile.write(body[half:])
