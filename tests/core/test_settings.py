"""Settings: the defaults hold together, the example is the default, a wrong value is refused by name."""

from __future__ import annotations

import pytest

from quire.core.errors import InvalidConfig
from quire.core.settings import EXAMPLE, ManifestSettings, StoreSettings, load


def test_an_empty_file_and_the_example_are_the_defaults() -> None:
    assert load(b"") == StoreSettings()
    assert load(EXAMPLE.format(object_store="").encode()) == StoreSettings()


def test_the_commented_lines_of_the_example_are_the_defaults() -> None:
    defaults, _, followed = EXAMPLE.format(object_store="").partition("# [[follow]]\n")
    lines = [line.removeprefix("# ") if "= " in line else line for line in defaults.splitlines()]
    assert load("\n".join(lines).encode()) == StoreSettings()
    block = "\n".join(["[[follow]]", *(line.removeprefix("# ") for line in followed.splitlines())])
    assert [follow.database for follow in load(block.encode()).follow] == ["app"]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[manifest]\nmap_bytes = 1000", "map_bytes"),
        ("[objects]\nendpoint = '127.0.0.1:9000'", "objects.endpoint"),
        ("[objects]\nendpoint = 'http://127.0.0.1:9000'", "allow_http = true"),
        ("[objects]\nrequest_timeout_seconds = 0.0", "objects: timeouts"),
        ("[namespaces.cold]\nendpoint = 'http://127.0.0.1:9000'", "namespaces.cold.endpoint"),
        ("[namespaces.cold]\nurl = 's3://x'", "url"),
        ("[manifest]\nmap_bytes = 2097152\nmap_bytes_max = 1048576", "map_bytes_max"),
        ("[manifest]\nmap_watermark = 0.0", "map_watermark"),
        ("[manifest]\nmap_watermark = 1.5", "map_watermark"),
        ("[manifest]\nreaders_max = 0", "readers_max"),
        ("[manifest]\nreaders_max = 70000", "readers_max"),
        ("[manifest]\ngroup_ops_max = 0", "group_ops_max"),
        ("[manifest]\ngroup_ops_max = 100000", "group_ops_max"),
        ("[manifest]\ngroup_seconds_max = 0.0", "group_seconds_max"),
        ("[manifest]\ngroup_ops_max = 'many'", "group_ops_max"),
        ("[manifest]\nunheard_of = 1", "unheard_of"),
        ("unheard_of = 1", "unheard_of"),
        ("object_store = 7", "object_store"),
        ("[manifest", "quire.toml"),
    ],
)
def test_a_wrong_value_is_refused_by_name(text: str, named: str) -> None:
    with pytest.raises(InvalidConfig, match=named):
        load(text.encode())


def test_bytes_that_are_no_text_are_refused() -> None:
    with pytest.raises(InvalidConfig):
        load(b"\xff\xfe")


def test_a_wrong_value_in_code_is_refused_too() -> None:
    with pytest.raises(InvalidConfig, match="map_bytes"):
        ManifestSettings(map_bytes=1)
