"""What could not be carried over, each with the line it stands on. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from pooler.dropin.ini import Place


@dataclass(frozen=True, slots=True)
class Note:
    """`place` None: of a default or of the whole file. `grave`: whoever goes on without it is not safe."""

    place: Place | None
    about: str
    text: str
    grave: bool = False

    def __str__(self) -> str:
        where = f"{self.place}: " if self.place is not None else ""
        return f"{where}{self.about}: {self.text}"


@dataclass(slots=True)
class Notes:
    """Collects them."""

    found: list[Note] = field(default_factory=list)

    def lost(self, place: Place | None, about: str, why: str, *, grave: bool = False) -> None:
        """It has no counterpart."""
        self.found.append(Note(place, about, f"not carried over: {why}", grave))

    def differs(self, place: Place | None, about: str, how: str) -> None:
        """It means something else, or has another value."""
        self.found.append(Note(place, about, how))
