"""tpplan: compile a YAML sharding plan onto a PyTorch model that was never written for it."""

from tpplan.api import load_plan, parallelize

__version__ = "0.1.0"
__all__ = ["load_plan", "parallelize"]
