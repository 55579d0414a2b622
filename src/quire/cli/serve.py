"""The command `serve`: owns a store in the foreground and serves it to other processes, until it is interrupted.

Rules
  1. The first output, on stdout and flushed, is the address it listens on: a program that starts it in the background waits for
     that line.
  2. SIGINT and SIGTERM end it cleanly: pending calls are answered, what is queued is committed, the lock is released.
  3. So does a takeover, with `StoreFenced`: clients must not go on reading a state that its successor has left behind (A11).
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import TYPE_CHECKING, Annotated

from quire.cli.declarations import Option, command
from quire.cli.formatting import count_of
from quire.cli.job_progress import LOOK_SECONDS
from quire.cli.lookup import Log, log_to
from quire.cli.output import Note, until_interrupted
from quire.cli.remote import run_for_client
from quire.core.events import emit
from quire.durable.names import ADMIN_TOKEN
from quire.service.commands import install
from quire.service.tokens import Credentials

if TYPE_CHECKING:
    from quire.cli.command import Cli
    from quire.service.server import Server
    from quire.service.web.server import WebServer


@command("serve", example="quire serve --http 127.0.0.1:7448")
def serve(
    cli: Cli,
    listen: Annotated[
        str,
        Option(
            metavar="ADDRESS",
            help="grpc://HOST:PORT, grpc+tls://HOST:PORT or grpc+unix:///PATH, in addition to the store's socket.",
            show_default="the store's socket only",
        ),
    ] = "",
    admin_token: Annotated[
        str, Option(metavar="FILE", help="Token for full access; created if missing.", show_default="in the store")
    ] = "",
    read_token: Annotated[
        str, Option(metavar="FILE", help="Token for reading; created if missing.", show_default="in the store")
    ] = "",
    tls_cert: Annotated[str, Option(metavar="FILE", help="Certificate (PEM), for grpc+tls and https.")] = "",
    tls_key: Annotated[str, Option(metavar="FILE", help="Its key (PEM).")] = "",
    http: Annotated[
        str,
        Option(
            metavar="ADDRESS",
            help="PORT, HOST:PORT, https://HOST:PORT or http+unix:///PATH for SQL clients, the dashboard and /metrics.",
            show_default="none",
        ),
    ] = "",
    log: Log = "",
) -> Note:
    """Own a store and serve it to other processes.

    It runs until Ctrl-C or SIGTERM, or until another directory takes the store over. On the network every call needs a token:
    `quire.connect(ADDRESS, token_file=…)`. With --http 127.0.0.1:7448 the dashboard is at http://127.0.0.1:7448.
    """
    log_to(log)
    install(run_for_client)
    with until_interrupted() as ending, cli.owner(upkeep=True) as store:
        for file in store.followers.resume():
            emit("info", "sqlite.follow.resumed", path=file.path, database=file.database)
        servers: list[Server | WebServer] = [store.serve()]
        if listen:
            tls = {"tls_cert_file": tls_cert, "tls_key_file": tls_key}
            servers.append(store.serve(listen, admin_token_file=admin_token, read_token_file=read_token, **tls))
        if http:
            pair = (tls_cert, tls_key) if http.startswith("https://") else ("", "")
            credentials = Credentials(
                admin_token_file=admin_token,
                read_token_file=read_token,
                tls_cert_file=pair[0],
                tls_key_file=pair[1],
            )
            servers.append(store.serve_http(http, credentials))
        addresses = [server.address for server in servers]
        token_file = admin_token or os.path.join(os.path.abspath(store.path), ADMIN_TOKEN)
        is_url = http and not http.startswith("http+unix:")  # libSQL's clients do not support it
        _announce(cli, addresses, _connection_string(servers[-1].address, token_file) if is_url else "")
        try:
            while not ending.is_set():  # not `wait`: the signal handler that sets it runs in this thread
                time.sleep(LOOK_SECONDS)
                store.manifest.writer.check_owner()
        finally:
            figures = [server.figures() for server in servers]
            for server in servers:
                server.close()
    calls, refused = sum(figure.calls for figure in figures), sum(figure.refused for figure in figures)
    text = f"served {count_of(calls, 'call')}, refused {refused:,}"
    return Note(text=text, data={"addresses": addresses, "calls": calls, "refused": refused})


def _connection_string(address: str, token_file: str) -> str:
    """Return Python code that connects a libSQL client, to be pasted. The token is never printed: it would end up in logs.

    >>> _connection_string("http://127.0.0.1:7448", "/data/admin.token")
    'import libsql; connection = libsql.connect("http://127.0.0.1:7448", auth_token=open("/data/admin.token").read().strip())'
    """
    url, file = json.dumps(address), json.dumps(token_file, ensure_ascii=False)  # JSON strings are valid Python here
    return f"import libsql; connection = libsql.connect({url}, auth_token=open({file}).read().strip())"


def _announce(cli: Cli, addresses: list[str], connection_string: str) -> None:
    """Print where the server listens, and flush. With --json to stderr: stdout is for one document, written at the end."""
    stream = sys.stderr if cli.as_json else sys.stdout
    for address in addresses:
        stream.write(f"listening on {address} (pid {os.getpid()})\n")
    if connection_string:
        stream.write(f"SQL from Python: {connection_string}\n")
    stream.flush()
