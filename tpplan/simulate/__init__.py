"""A training step executed abstractly, and recorded."""

from tpplan.simulate.execute import Training
from tpplan.simulate.recorder import Recorder
from tpplan.simulate.steps import Collective

__all__ = ["Collective", "Recorder", "Training"]
