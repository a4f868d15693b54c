"""Plans written for models that nobody planned: found in a trace, proved by the compiler."""

from __future__ import annotations
