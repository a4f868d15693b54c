"""What of torch is replaced: only what is there."""

from __future__ import annotations

from typing import Any

import torch


def there(owner: Any, name: str) -> Any:
    """The attribute of a module or class of torch's that is about to be replaced.

    Torch would not mind one more that it does not read, and nothing would say so.
    """
    if name not in vars(owner):
        raise RuntimeError(
            f"torch {torch.__version__} has no {owner.__name__}.{name}, which tpplan replaces: "
            "this version of tpplan is for torch 2.12 to 2.15"
        )
    return vars(owner)[name]
