"""Every error that obstore can raise has a translation."""

from __future__ import annotations

import pytest
from obstore import exceptions as foreign

from quire.core.errors import AccessDenied, InvalidConfig, InvalidName, ObjectNotFound, StorageFault
from quire.objects.api import NameIsTaken
from quire.objects.obstore_errors import MEANINGS, ErrorMeaning, translate
from quire.objects.options import Transient

FOREIGN_CLASSES = [
    error_class
    for error_class in vars(foreign).values()
    if isinstance(error_class, type) and issubclass(error_class, foreign.BaseError)
]

HEAD = "Generic S3 error: Error performing GET http://h/b/k in 1ms - Server returned non-2xx status code: "


def outcome(error: Exception) -> Exception:
    return translate(error, doing="testing", store="s3://b", key="k")


def test_every_exception_of_obstore_has_a_meaning() -> None:
    assert len(FOREIGN_CLASSES) >= 12
    missing = [error_class.__name__ for error_class in FOREIGN_CLASSES if error_class not in MEANINGS]
    assert not missing, f"obstore has new errors; add their meaning to MEANINGS: {missing}"


@pytest.mark.parametrize("kind", MEANINGS, ids=lambda kind: kind.__name__)
def test_translation_is_total(kind: type[Exception]) -> None:
    assert outcome(kind("text")) is not None


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (FileNotFoundError("gone"), ObjectNotFound),
        (foreign.AlreadyExistsError("there"), NameIsTaken),
        (foreign.PreconditionError("there"), NameIsTaken),
        (foreign.PermissionDeniedError("403"), AccessDenied),
        (foreign.UnauthenticatedError("401"), AccessDenied),
        (foreign.NotSupportedError("no"), StorageFault),
        (foreign.NotModifiedError("304"), StorageFault),
        (foreign.UnknownConfigurationKeyError("x"), InvalidConfig),
        (foreign.JoinError("task died"), Transient),
        (ValueError("Could not parse path"), InvalidName),
        (foreign.GenericError("HTTP error: error sending request"), Transient),
        (foreign.GenericError("HTTP error: builder error"), InvalidConfig),
        (foreign.GenericError(HEAD + "500 Internal Server Error: "), Transient),
        (foreign.GenericError(HEAD + "503 Service Unavailable: "), Transient),
        (foreign.GenericError(HEAD + "429 Too Many Requests: "), Transient),
        (foreign.GenericError(HEAD + "408 Request Timeout: "), Transient),
        (foreign.GenericError(HEAD + "409 Conflict: <Code>OperationAborted</Code>"), Transient),
        (foreign.GenericError(HEAD + "400 Bad Request: <Code>RequestTimeout</Code>"), Transient),
        (foreign.GenericError(HEAD + "400 Bad Request: <Code>InvalidArgument</Code>"), StorageFault),
        (foreign.GenericError(HEAD + "403 Forbidden: "), AccessDenied),
        (foreign.GenericError(HEAD + "301 Moved Permanently: "), InvalidConfig),
        (foreign.GenericError(HEAD + "404 Not Found: <Code>NoSuchBucket</Code>"), InvalidConfig),
        (FileNotFoundError(HEAD + "404 Not Found: <Code>NoSuchBucket</Code>"), InvalidConfig),
        (FileNotFoundError("404 Not Found: ContainerNotFound"), InvalidConfig),
        (FileNotFoundError(HEAD + "404 Not Found: <Code>NoSuchUpload</Code>"), Transient),
        (
            foreign.GenericError("Error performing PUT http://169.254.169.254/latest - timed out"),
            AccessDenied,
        ),
    ],
)
def test_translation_of_each_failure(error: Exception, expected: type[Exception]) -> None:
    assert type(outcome(error)) is expected


def test_an_unknown_error_class_is_translated_like_its_parent() -> None:
    newer = type("NewerError", (foreign.GenericError,), {})
    assert isinstance(outcome(newer(HEAD + "500")), Transient)


def test_signatures_in_urls_do_not_reach_messages() -> None:
    text = "Error performing GET https://a.blob.example/c/k?sv=1&sig=SECRET in 1ms - status code: 403 Forbidden: "
    assert "SECRET" not in str(outcome(foreign.PermissionDeniedError(text)))
    assert "SECRET" not in str(outcome(foreign.GenericError(text.replace("403", "500"))))


def test_missing_credentials_are_not_called_refused() -> None:
    """Regression: the message named only an address of the cloud that the user had never heard of."""
    error = outcome(foreign.GenericError("Error performing PUT http://169.254.169.254/latest/api/token - timed out"))
    assert isinstance(error, AccessDenied)
    assert error.what == "no credentials were found for the object store"
    assert "AWS_ACCESS_KEY_ID" in (error.hint or "")


@pytest.mark.parametrize("end", ["<BucketName>b</BucketName><RequestId>r</RequestId></Error>", "<BucketName>b</Buck"])
def test_the_body_of_an_s3_error_is_shown_without_its_markup(end: str) -> None:
    body = f'<?xml version="1.0"?>\n<Error><Code>NoSuchBucket</Code><Message>There is no such bucket</Message>{end}'
    error = outcome(foreign.GenericError(HEAD + "404 Not Found: " + body))
    assert isinstance(error, InvalidConfig)
    assert error.what.endswith("404 Not Found: NoSuchBucket: There is no such bucket")


def test_every_meaning_is_used() -> None:
    assert set(MEANINGS.values()) == set(ErrorMeaning)


@pytest.mark.parametrize(
    ("text", "message", "setting"),
    [
        ("Error performing GET http://127.0.0.1:9/b/k in 1ms - HTTP error: builder error", "plain HTTP", "allow_http"),
        ("Error performing GET htp://x/b/k in 1ms - HTTP error: builder error", "htp://x", "endpoint"),
        (HEAD + "301 Moved Permanently: ", "region", "region"),
        (HEAD + "404 Not Found: <Code>NoSuchBucket</Code>", "bucket does not exist", "object_store"),
    ],
)
def test_a_wrong_configuration_names_the_setting_to_change(text: str, message: str, setting: str) -> None:
    """The text "builder error" alone did not help the user."""
    error = outcome(foreign.GenericError(text))
    assert isinstance(error, InvalidConfig)
    assert message in error.what
    assert "builder error" not in str(error)
    assert f"`{setting}" in (error.hint or "")
    assert "quire.toml" in (error.hint or "")
