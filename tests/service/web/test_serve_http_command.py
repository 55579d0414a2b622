"""`quire serve --http` as a process; and the page about it lists every address."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import quire
from quire.service.web.server import WebServer
from tests.programs import Program
from tests.rules.tree import ROOT, SRC
from tests.service.web.http_client import HttpClient


def test_serve_listens_on_http_and_ends_cleanly(path: Path) -> None:
    quire.open(path).close()
    process = Program(
        ["-m", "quire", "serve", "--store", str(path), "--http", "127.0.0.1:0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(SRC)},
    )
    try:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(2)]
        address = lines[1].split()[2]
        assert address.startswith("http://127.0.0.1:")
        admin = HttpClient(address, (path / "admin.token").read_text().strip())
        assert admin.get("/readyz").json == {"ready": True}
        with quire.connect(str(path)) as client:
            client.create("shop", "pages")
        assert admin.post("/api/databases/shop/snapshots", {"name": "one"}).status == 201
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=30)
        assert (process.returncode, err) == (0, "")
        assert "served" in out
    finally:
        process.kill()
        process.communicate()


def test_the_page_lists_every_address_and_no_other(web: WebServer) -> None:
    text = (ROOT / "docs" / "dashboard.md").read_text("utf-8")
    listed = set(re.findall(r"^\| `(GET|POST) (/[^`?]*)", text, re.MULTILINE))
    table = {(route.method, route.path) for route in web._web.routes.table}
    assert listed == table | {("GET", "/"), ("GET", "/static/{file}"), ("GET", "/api/events")}


def test_commands_that_do_not_serve_import_no_web_server(path: Path) -> None:
    """Importing uvicorn, starlette and PyJWT takes longer than `quire ls`."""
    quire.open(path).close()
    result = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "quire", "ls", "--store", str(path)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(SRC)},
    )
    loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in result.stderr.splitlines()}
    assert "quire" in loaded
    assert not loaded & {"uvicorn", "starlette", "uvloop", "httptools", "websockets", "jwt", "cryptography", "anyio"}
