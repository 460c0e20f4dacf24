"""What the fleet beneath says of its config, said of the ini, which is what its user knows. Pure."""

from __future__ import annotations

import re

from pooler.dropin.known import SETTINGS

_LISTEN = "listen_addr, listen_port"
_NAMES = {known.ours: known.name for known in SETTINGS if known.ours} | {"fleet.listen": _LISTEN}
_PATH = re.compile("|".join(rf"(?<![\w.]){re.escape(path)}(?![\w.]*\w)" for path in _NAMES))
_HEAD = re.compile(r"\S*/pooler\.yaml: (?=\d+ faults?$)", re.MULTILINE)


def of_the_ini(text: str, ini: str = "") -> str:
    """`text` with PgBouncer's names for our settings, and with the ini where it names the pooler.yaml."""
    return _PATH.sub(lambda found: _NAMES[found[0]], _HEAD.sub(lambda _: f"{ini}: ", text))
