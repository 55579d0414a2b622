"""A request that went to Amazon although another service was meant: the error says how to name that service."""

from __future__ import annotations

import pytest

from quire.core.errors import ObjectStoreUnavailable, QuireError
from quire.objects.obstore_errors import translate
from quire.objects.options import Retrier, RetryPolicy, Transient

AT_AMAZON = "Error performing GET https://s3.us-east-1.amazonaws.com/b/k in 1ms - "
ELSEWHERE = "Error performing GET https://minio.lan/b/k in 1ms - "


@pytest.mark.parametrize(
    "answer",
    [
        "Server returned non-2xx status code: 403: <Code>InvalidAccessKeyId</Code>",
        "Server returned non-2xx status code: 404: <Code>NoSuchBucket</Code>",
    ],
)
def test_a_refusal_by_amazon_suggests_the_endpoint(answer: str) -> None:
    from obstore.exceptions import GenericError

    def hint(text: str) -> str:
        error = translate(GenericError(text), doing="reading", store="s3://b", key="k")
        assert isinstance(error, QuireError)
        return error.hint or ""

    assert "`--endpoint URL`" in hint(AT_AMAZON + answer)
    assert "`--endpoint URL`" not in hint(ELSEWHERE + answer)


def test_an_unreachable_amazon_suggests_the_endpoint() -> None:
    retrier = Retrier(policy=RetryPolicy(attempts_max=1))

    def fail() -> None:
        raise Transient(AT_AMAZON + "connection refused")

    with pytest.raises(ObjectStoreUnavailable) as refused:
        retrier.call(fail, doing="reading")
    assert "`--endpoint URL`" in (refused.value.hint or "")
