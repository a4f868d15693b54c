"""A training step executed abstractly, and recorded."""

from tpplan.simulate.recorder import Recorder
from tpplan.simulate.steps import Collective

__all__ = ["Collective", "Recorder"]
