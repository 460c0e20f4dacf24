"""The page of the permit's states, made from the table: `python -m coordinator.ledger.document`."""

from __future__ import annotations

import sys

from coordinator.ledger.states import MOVES, Move, Proof, SessionState

HEAD = """\
# States of a session permit

Generated from `coordinator/ledger/states.py` by `python -m coordinator.ledger.document`; a test keeps it
current. Any move that is not in this table raises.
"""


def page() -> str:
    """The whole page in Markdown."""
    states = "\n".join(f"* `{state}`" for state in SessionState)
    rows = "\n".join(_row(move) for move in MOVES)
    proofs = ", ".join(f"`{proof}`" for proof in Proof)
    return (f"{HEAD}\n{_diagram()}\n\n## States\n\n{states}\n\n## Moves\n\n"
            f"| from | to | who | proof, any of | when |\n| --- | --- | --- | --- | --- |\n{rows}\n\n"
            f"Nothing but a proof frees a permit: {proofs}.\n")


def _row(move: Move) -> str:
    proofs = ", ".join(f"`{proof}`" for proof in Proof if proof in move.proofs) or "-"
    return f"| `{move.source}` | `{move.target}` | {move.actor} | {proofs} | {move.reason} |"


def _diagram() -> str:
    edges = dict.fromkeys((move.source, move.target) for move in MOVES)
    lines = [f"    {source} --> {target}" for source, target in edges]
    return "```mermaid\nstateDiagram-v2\n" + "\n".join(lines) + "\n```"


if __name__ == "__main__":
    sys.stdout.write(page())
