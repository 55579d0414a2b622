"""`quire token create`: the server accepts the printed token, with the requested permissions."""

from __future__ import annotations

import json
from pathlib import Path

from quire.core.clock import SystemClock
from quire.service.signed_tokens import verifier
from tests.cli.conftest import Run


def test_a_token_has_the_requested_permissions_and_lifetime(run: Run, path: Path) -> None:
    result = run("token", "create", "--db", "shop", "--ro", "--ttl", "1h")
    assert result.code == 0, result.err
    token, rest = result.out.split("\n", 1)
    assert "read shop for 1h" in rest
    assert "http://HOST:PORT/db/shop" in rest
    grant = verifier(str(path), (), SystemClock()).grant(token)
    assert (grant.may("shop"), grant.may("shop", write=True), grant.may("other")) == (True, False, False)
    assert grant.expires_ms is not None
    assert not grant.is_expired


def test_json_contains_the_token(run: Run, path: Path) -> None:
    created = json.loads(run("token", "create", "--json").out)
    assert (created["databases"], created["read_only"], created["ttl_seconds"]) == ([], False, None)
    assert verifier(str(path), (), SystemClock()).grant(created["token"]).may("anything", write=True)


def test_mistakes_are_found_before_a_token_is_created(run: Run) -> None:
    assert run("token", "create", "--db", "nobody").code == 3
    assert run("token", "create", "--ttl", "soon").code == 2
