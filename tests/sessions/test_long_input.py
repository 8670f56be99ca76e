"""Input of any length is refused or taken without holding up anybody."""

from __future__ import annotations

import pytest

from sessions.admission import check_characters
from sessions.api import SessionError
from sessions.items import stored_items


def test_what_cannot_fit_is_refused_before_it_is_encoded() -> None:
    items = stored_items([{"role": "user", "content": "x" * 90}])
    check_characters(items, "y" * 10, limit=10, longest_token=10)
    with pytest.raises(
        SessionError, match="101 characters cannot fit into the model's context of 10"
    ) as caught:
        check_characters(items, "y" * 11, limit=10, longest_token=10)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")
