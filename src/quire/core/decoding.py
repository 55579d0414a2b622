"""The errors of decoding: what msgspec raises for bytes that it did not encode, whatever they are."""

from __future__ import annotations

import msgspec

UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Another structure, a text that is not UTF-8, or values nested too deeply. One damaged byte can cause any of them."""
