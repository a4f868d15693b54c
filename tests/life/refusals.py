"""Cells of the matrix whose honest answer is an error, with what it says."""

from __future__ import annotations

# torch hands every argument of a module with such a hook on as a tensor of its own, and one that
# was given thrice when the plan was compiled is gathered once
_APART = "is another tensor than"

# (role, event, with sequence parallelism) -> what the error says; None stands for any
REFUSED: dict[tuple[str | None, str, bool | None], str] = {
    ("torch's attention", "backward hook", None): _APART,
    ("torch's attention", "backward pre-hook", None): _APART,
    # its own code runs, on the local parameters
    ("whole sequence", "parametrized", None): "a parametrization was put on it after",
}


def refusal(role: str, event: str, sp: bool) -> str | None:
    """What a cell of the matrix is refused with; None where it has to be right."""
    for (given_role, given_event, given_sp), message in REFUSED.items():
        if given_event == event and given_role in (None, role) and given_sp in (None, sp):
            return message
    return None
