"""Names for things: opaque, and never guessable."""

from __future__ import annotations

import secrets


def new_id(prefix: str) -> str:
    """`prefix`, an underscore and 128 random bits in hex: resp_…, msg_…, conv_…."""
    return f"{prefix}_{secrets.token_hex(16)}"
