"""The table of docs/migrating-from-pgbouncer.md, made from the one that the importer uses."""

from __future__ import annotations

from pooler.dropin.carry import HONOURED
from pooler.dropin.fields import field_at
from pooler.dropin.known import SETTINGS, Known
from pooler.settings_inert import INERT

NOTHING = "none"
BEGIN, END = "<!-- settings: begin -->", "<!-- settings: end -->"


def settings_table() -> str:
    """Markdown, a line for each setting of PgBouncer 1.25."""
    lines = ["| PgBouncer | default | here | remark |", "| --- | --- | --- | --- |"]
    lines += [f"| `{known.name}` | {_default(known)} | {_ours(known)} | {_remark(known)} |"
              for known in SETTINGS]
    return "\n".join(lines)


def with_table(page: str) -> str:
    """The page with its table made anew."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{settings_table()}\n{END}{after}"


def _default(known: Known) -> str:
    if known.default is None:
        return "unset"
    if len(known.default) > 40:
        return "a look at pg_authid"
    return f"`{known.default}`" if known.default else "empty"


def _ours(known: Known) -> str:
    return f"`{known.ours}`" if known.ours and field_at(known.ours) is not None else NOTHING


def _remark(known: Known) -> str:
    remarks = []
    if _ours(known) == NOTHING:
        remarks.append(known.why)
    elif INERT.get(known.ours, "works") is None:
        remarks.append("read, and without effect in this version")
    if known.name in HONOURED:
        remarks.append("a drop-in does it itself")
    if not known.reloadable:
        remarks.append("needs a restart")
    return "; ".join(remarks)


if __name__ == "__main__":
    import sys

    sys.stdout.write(with_table(sys.stdin.read()))
