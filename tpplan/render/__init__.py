"""What was found, as text, as a page and as plain data."""

from tpplan.render.explain import explain

__all__ = ["explain"]
