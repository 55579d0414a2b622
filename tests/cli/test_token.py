"""`quire token create`: what it prints is a token that the server believes, for what it says."""

from __future__ import annotations

import json
from pathlib import Path

from quire.core.clock import SystemClock
from quire.service.signed_tokens import verifier
from tests.cli.conftest import Run


def test_a_token_is_for_what_was_asked_and_for_no_longer(run: Run, path: Path) -> None:
    ended = run("token", "create", "--db", "shop", "--ro", "--ttl", "1h")
    assert ended.code == 0, ended.err
    token, rest = ended.out.split("\n", 1)
    assert "read shop for 1h" in rest
    assert "http://HOST:PORT/db/shop" in rest
    grant = verifier(str(path), (), SystemClock()).grant(token)
    assert (grant.may("shop"), grant.may("shop", write=True), grant.may("other")) == (True, False, False)
    assert grant.expires_ms is not None
    assert not grant.is_expired


def test_programs_get_json(run: Run, path: Path) -> None:
    told = json.loads(run("token", "create", "--json").out)
    assert (told["databases"], told["read_only"], told["ttl_seconds"]) == ([], False, None)
    assert verifier(str(path), (), SystemClock()).grant(told["token"]).may("anything", write=True)


def test_mistakes_are_found_before_a_token_is_made(run: Run) -> None:
    assert run("token", "create", "--db", "nobody").code == 3
    assert run("token", "create", "--ttl", "soon").code == 2
