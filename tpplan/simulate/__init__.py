"""A training step executed abstractly, and recorded."""

from tpplan.simulate.execute import Execution, Training
from tpplan.simulate.recorder import Recorder
from tpplan.simulate.steps import Collective

__all__ = ["Collective", "Execution", "Recorder", "Training"]
