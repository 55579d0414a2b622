"""Opening by URL, what is refused, and that a path needs no cloud client."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from quire.core.errors import InvalidConfig, InvalidName
from quire.core.settings import ObjectSettings
from quire.objects.api import key_below, list_objects
from quire.objects.local import LocalStore
from quire.objects.open import open_store
from quire.objects.options import StoreOptions, options_of


@pytest.mark.parametrize("form", ["{}", "file://{}", "file://localhost{}"])
def test_paths_are_served_by_our_own_backend(tmp_path: Path, form: str) -> None:
    store = open_store(form.format(tmp_path / "o"))
    assert isinstance(store, LocalStore)
    store.put("a", b"1")
    assert (tmp_path / "o" / "a").read_bytes() == b"1"
    assert store.url == str(tmp_path / "o")


def test_a_file_url_is_unquoted(tmp_path: Path) -> None:
    open_store(f"file://{tmp_path}/with%20space").put("a", b"1")
    assert (tmp_path / "with space" / "a").exists()


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("s3://bucket", StoreOptions(region="eu-central-1", settings={"access_key_id": "a", "secret_access_key": "b"})),
        ("s3://bucket/some/prefix", StoreOptions(endpoint="https://minio.example")),
        ("gs://bucket/prefix", StoreOptions(settings={"skip_signature": "true"})),
        ("az://container/prefix", StoreOptions(settings={"account_name": "me", "account_key": "a2V5"})),
        ("memory://name", StoreOptions()),
    ],
)
def test_every_scheme_opens_without_a_request(url: str, options: StoreOptions) -> None:
    store = open_store(url, options=options)
    assert store.url == url
    assert url in repr(store)


@pytest.mark.parametrize(
    "url",
    [
        "", "ftp://host/x", "http://host/x", "s3a://bucket/x", "s3://", "s3:///prefix", "gs://", "az://",
        "s3://bucket/a?region=x", "s3://bucket/a#b", "file://host/path", "file://relative",
    ],
)  # fmt: skip
def test_invalid_urls_are_refused_with_the_allowed_forms(url: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        open_store(url)
    assert caught.value.hint


@pytest.mark.parametrize("url", ["s3://bucket/a//b", "s3://bucket/../x", "memory://x/.tmp/y"])
def test_prefixes_obey_the_rules_of_keys(url: str) -> None:
    with pytest.raises(InvalidName):
        open_store(url)


def test_credentials_in_a_url_are_refused_and_not_repeated() -> None:
    with pytest.raises(InvalidConfig) as caught:
        open_store("s3://KEYID:SECRET@bucket/x")
    assert "SECRET" not in str(caught.value)


def test_unknown_options_are_refused() -> None:
    with pytest.raises(InvalidConfig, match="nonsense"):
        open_store("s3://bucket", options=StoreOptions(settings={"nonsense": "1"}))
    with pytest.raises(InvalidConfig):
        StoreOptions(settings={"region": "x"})
    with pytest.raises(InvalidConfig):
        StoreOptions(request_timeout_seconds=0)


def test_an_azure_store_without_account_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(InvalidConfig, match="Account"):
        open_store("az://container")


def test_options_can_be_pickled_and_hide_their_secrets() -> None:
    options = StoreOptions(region="x", settings={"secret_access_key": "SECRET"})
    assert pickle.loads(pickle.dumps(options)) == options
    assert "SECRET" not in repr(options)


def test_named_memory_stores_are_shared_and_nameless_ones_are_private() -> None:
    open_store("memory://shared-by-name").put("a", b"1")
    assert open_store("memory://shared-by-name").get("a") == b"1"
    open_store("memory://").put("a", b"1")
    assert list(list_objects(open_store("memory://"))) == []


def test_a_prefix_is_isolated() -> None:
    whole = open_store("memory://prefix-test")
    inner = open_store("memory://prefix-test/in/side")
    inner.put("a/b", b"1")
    whole.put("in/sidecar", b"2")
    assert [info.key for info in list_objects(inner)] == ["a/b"]
    assert [info.key for info in list_objects(whole)] == ["in/side/a/b", "in/sidecar"]
    assert inner.list_prefixes() == ["a"]


def test_a_path_needs_no_obstore(tmp_path: Path) -> None:
    """Executors on a shared directory, and light commands, must work where obstore cannot be imported."""
    program = (
        "import sys; sys.modules['obstore'] = None\n"
        "from quire.objects.open import open_store\n"
        f"store = open_store({str(tmp_path / 'o')!r})\n"
        "store.put('a/b', b'1', create_only=True)\n"
        "assert store.get('a/b') == b'1'\n"
        "assert 'quire.objects.remote' not in sys.modules\n"
        "try:\n    open_store('memory://')\n"
        "except ImportError:\n    print('fenced')\n"
    )
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (process.returncode, process.stdout.strip()) == (0, "fenced"), process.stderr


def test_credentials_of_quire_toml_may_be_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ObjectSettings(region="x", credentials={"access_key_id": "AKIA", "secret_access_key": "env:COLD_SECRET"})
    monkeypatch.delenv("COLD_SECRET", raising=False)
    with pytest.raises(InvalidConfig, match=r"namespaces\.cold\.credentials\.secret_access_key .* COLD_SECRET"):
        options_of(settings, "namespaces.cold")
    monkeypatch.setenv("COLD_SECRET", "s3cret")
    options = options_of(settings, "namespaces.cold")
    assert options.settings == {"access_key_id": "AKIA", "secret_access_key": "s3cret"}
    assert options.region == "x"
    assert "s3cret" not in repr(options)


def test_a_key_below_a_prefix_is_checked() -> None:
    assert key_below("", "a/b") == "a/b"
    assert key_below("tenant", "a/b") == key_below("tenant/", "a/b") == "tenant/a/b"
    for prefix, suffix in (("../x", "a"), ("/x", "a"), ("x", "../a"), ("x//y", "a"), ("", "")):
        with pytest.raises(InvalidName):
            key_below(prefix, suffix)
