"""Jobs that quire starts through a user's session are described, and the user's own description comes back."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest

from quire.spark.active_session import job_description


@pytest.mark.parametrize("before", [None, "nightly"])
def test_a_description_ends_with_the_block(before: str | None) -> None:
    spark: Any = Mock()
    spark.sparkContext.getLocalProperty.return_value = before
    with pytest.raises(ValueError, match="a failed job"), job_description(spark, "quire save: shop, table orders"):
        raise ValueError("a failed job")
    texts = [call.args[0] for call in spark.sparkContext.setJobDescription.call_args_list]
    assert texts == ["quire save: shop, table orders", before]
