"""Hazard: a list with a mistyped option shows nothing, and succeeds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Run


@pytest.mark.parametrize("command", ["ls", "tree", "stats"])
def test_an_unknown_kind_is_refused_with_the_allowed_ones(run: Run, path: Path, command: str) -> None:
    result = run(command, "--kind", "bogus")
    assert result.code == 2
    assert "key-value" in result.err
    assert run(command, "--kind", "sqlite").out == run(command, "--kind", "pages").out
    assert run(command, "-n", "-1").code == 2
    assert "shop" in run(command, "sh*").out
    assert "no database matches" in run(command, "sh?").out + run(command, "sh?").err


def test_a_database_is_created_with_the_kind_that_users_know(run: Run, path: Path) -> None:
    assert run("create", "cart", "--kind", "kv", "--json").data["kind"] == "lsm"
    for command in (("ls",), ("tree",)):
        line = next(line for line in run(*command).out.splitlines() if line.startswith("cart"))
        assert line.split()[1] == "kv"
    assert "drop the key-value set cart?" in run("drop", "cart", answer="n\n").err
