"""Settings: the defaults are consistent, the example contains the defaults, a wrong value is rejected by name."""

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
    ("text", "name"),
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
def test_a_wrong_value_is_rejected_by_name(text: str, name: str) -> None:
    with pytest.raises(InvalidConfig, match=name):
        load(text.encode())


def test_bytes_that_are_not_text_are_rejected() -> None:
    with pytest.raises(InvalidConfig):
        load(b"\xff\xfe")


def test_a_wrong_value_in_code_is_rejected_too() -> None:
    with pytest.raises(InvalidConfig, match="map_bytes"):
        ManifestSettings(map_bytes=1)
