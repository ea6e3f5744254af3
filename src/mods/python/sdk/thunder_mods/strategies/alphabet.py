"""Decoding of characters byte by byte: a character may span several tokens."""

from __future__ import annotations

from enum import Enum, auto
from functools import lru_cache
from typing import Optional, Tuple


class CharsMode(Enum):
    """Kind of characters that `CharsStrat` allows."""

    #: Letters of any script.
    ALPHA = auto()
    #: Letters and digits of any script.
    ALPHANUMERIC = auto()
    #: Content of a double-quoted string: everything except an unescaped double quote.
    STRING = auto()
    #: The digits 0 to 9.
    NUMERIC = auto()
    #: A number in the syntax of JSON and JavaScript: -12.5e3.
    JS_FLOAT = auto()


def push_byte(pending: bytes, byte: int) -> Optional[Tuple[bytes, str]]:
    """Returns (unfinished bytes, finished character or "") after one more byte; None for invalid UTF-8."""
    data = pending + bytes((byte,))
    lead = data[0]
    if lead < 0x80:
        return b"", chr(lead)
    length = 2 if 0xC2 <= lead <= 0xDF else 3 if 0xE0 <= lead <= 0xEF else 4 if 0xF0 <= lead <= 0xF4 else 0
    if length == 0:
        return None
    if len(data) >= 2:
        lowest = {0xE0: 0xA0, 0xF0: 0x90}.get(lead, 0x80)
        highest = {0xED: 0x9F, 0xF4: 0x8F}.get(lead, 0xBF)
        if not lowest <= data[1] <= highest or any(not 0x80 <= later <= 0xBF for later in data[2:]):
            return None
    if len(data) < length:
        return data, ""
    return b"", data.decode("utf-8")


@lru_cache(maxsize=None)
def can_become(mode: CharsMode, pending: bytes) -> bool:
    """Returns True if the unfinished bytes can become a character of this kind."""
    if mode in (CharsMode.NUMERIC, CharsMode.JS_FLOAT):
        return False
    if mode is CharsMode.STRING:
        return True
    if pending[0] > 0xF0:  # the planes after plane 3 have no letters or digits
        return False
    length = 2 if pending[0] < 0xE0 else 3 if pending[0] < 0xF0 else 4
    first = pending[0] & (0xFF >> (length + 1))
    for byte in pending[1:]:
        first = first << 6 | byte & 0x3F
    bits = 6 * (length - len(pending))
    candidates = range(first << bits, min((first + 1) << bits, 0x110000))
    return any(class_step(mode, "", chr(code)) is not None for code in candidates)


#: States in which a float may end.
_FLOAT_ENDS = ("zero", "int", "frac", "exp")


def class_step(mode: CharsMode, state: str, char: str) -> Optional[str]:
    """Returns the state after one more character; None if the mode does not permit the character. The first state is ""."""
    if mode is CharsMode.ALPHA:
        return "" if char.isalpha() else None
    if mode is CharsMode.ALPHANUMERIC:
        return "" if char.isalnum() else None
    if mode is CharsMode.NUMERIC:
        return "" if char in "0123456789" else None
    if mode is CharsMode.STRING:
        if state == "escaped":
            return ""
        return "escaped" if char == "\\" else None if char == '"' else ""
    return _float_step(state, char)


def class_ends(mode: CharsMode, state: str) -> bool:
    """Returns True if a text may end in this state."""
    return state in _FLOAT_ENDS if mode is CharsMode.JS_FLOAT else state != "escaped"


def class_needs(mode: CharsMode, state: str) -> int:
    """Returns the minimum number of further characters until a text may end."""
    return 0 if class_ends(mode, state) else 1


def _float_step(state: str, char: str) -> Optional[str]:
    if char in "0123456789":
        if state in ("", "minus"):
            return "zero" if char == "0" else "int"
        return {"int": "int", "dot": "frac", "frac": "frac", "e": "exp", "sign": "exp", "exp": "exp"}.get(state)
    if char == "-":
        return {"": "minus", "e": "sign"}.get(state)
    if char == "+":
        return {"e": "sign"}.get(state)
    if char == ".":
        return {"zero": "dot", "int": "dot"}.get(state)
    if char in "eE":
        return {"zero": "e", "int": "e", "frac": "e"}.get(state)
    return None
