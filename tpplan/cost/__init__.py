"""What a step costs: collectives, memory and time on some hardware, and what to choose."""

from tpplan.cost.advise import Task, advise
from tpplan.cost.curves import with_companions
from tpplan.cost.dry_run import Setting, dry_run, with_labels
from tpplan.cost.hardware import Hardware, Link, load_hardware, shipped_hardware

__all__ = [
    "Hardware",
    "Link",
    "Setting",
    "Task",
    "advise",
    "dry_run",
    "load_hardware",
    "shipped_hardware",
    "with_companions",
    "with_labels",
]
