"""Threads of quire are recognised by their names: they do not wait for the archive (core/barrier.py)."""

from __future__ import annotations

import ast

from quire.core.barrier import THREAD_PREFIX
from tests.rules.tree import sources

CALLERS = {
    "src/quire/service/frame_server.py: frames-call",
    "src/quire/service/sql/threads.py: sql-worker-{len(self._threads)}",
    "src/quire/service/web/calls.py: http-call",
    "src/quire/service/web/server.py: web-call",
}
"""Threads that acknowledge changes to a client."""
NAMED_BY_CALLER = {
    "src/quire/archive/archiver.py",
    "src/quire/core/background.py",
    "src/quire/jobs/leases.py",
    "src/quire/jobs/runner.py",
}
"""Modules that get the name from their callers."""


def test_every_thread_that_quire_starts_has_the_prefix() -> None:
    unnamed = []
    for source in sources("src"):
        for node in source.nodes:
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func).rsplit(".", 1)[-1]
            keyword = {"Thread": "name", "ThreadPoolExecutor": "thread_name_prefix", "thread_pool": "name"}.get(called)
            if keyword is None:
                continue
            named = (argument.value for argument in node.keywords if argument.arg == keyword)
            argument_value = node.args[1] if called == "thread_pool" else next(named, None)
            text = ast.unparse(argument_value).lstrip("f").strip("\"'") if argument_value is not None else ""
            if (
                not text.startswith(THREAD_PREFIX)
                and source.path not in NAMED_BY_CALLER
                and f"{source.path}: {text}" not in CALLERS
            ):
                unnamed.append(f"{source.path}:{node.lineno} {text}")
    assert not unnamed, unnamed
