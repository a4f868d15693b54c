"""Cells of the matrix whose honest answer is an error, with what it says."""

from __future__ import annotations

# (role, event, with sequence parallelism) -> what the error says; None stands for any
REFUSED: dict[tuple[str | None, str, bool | None], str] = {}


def refusal(role: str, event: str, sp: bool) -> str | None:
    """What a cell of the matrix is refused with; None where it has to be right."""
    for (given_role, given_event, given_sp), message in REFUSED.items():
        if given_event == event and given_role in (None, role) and given_sp in (None, sp):
            return message
    return None
