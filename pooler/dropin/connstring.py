"""The right side of an entry in [databases], [users] and [peers]: `key=value` pairs between blanks. Pure.

Source: PgBouncer's config page, "Section [databases]". A value in single quotes may hold anything, a quote in
it is written twice.
"""

from __future__ import annotations

import re

_PAIR = re.compile(
    r"""[ \t]*(?P<key>[^\s=]+)[ \t]*=[ \t]*"""
    r"""(?:'(?P<quoted>(?:[^']|'')*)'(?=[ \t]|$)|(?P<plain>[^\s']\S*)?)""")
_BLANKS = re.compile(r"[ \t]*$")


def parse_pairs(text: str) -> dict[str, str]:
    """The pairs of a connection string, the last of each key; none for an empty text.

    Raises ValueError that says what is wrong, without any value (one may be a password).
    """
    found: dict[str, str] = {}
    at = 0
    while not _BLANKS.match(text, at):
        pair = _PAIR.match(text, at)
        if pair is None:
            raise ValueError("not a list of key=value pairs separated by blanks")
        key = pair["key"]
        value = pair["plain"] if pair["quoted"] is None else pair["quoted"].replace("''", "'")
        if value is None and text[pair.end():pair.end() + 1] == "'":
            raise ValueError(f"the quoted value of {key} is not closed, or something follows its last quote: "
                             "write 'it''s' and a blank after it")
        if not value:
            raise ValueError(f"{key} has no value: give it one or leave it out")
        found[key] = value
        at = pair.end()
    return found
