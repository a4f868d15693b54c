"""What a step costs: collectives, memory and time on some hardware, and what to choose."""

from tpplan.cost.advise import Task as Task
from tpplan.cost.advise import advise as advise
from tpplan.cost.curves import with_companions as with_companions
from tpplan.cost.dry_run import Setting as Setting
from tpplan.cost.dry_run import dry_run as dry_run
from tpplan.cost.dry_run import with_labels as with_labels
from tpplan.cost.hardware import DEFAULT as DEFAULT
from tpplan.cost.hardware import Hardware as Hardware
from tpplan.cost.hardware import Link as Link
from tpplan.cost.hardware import load_hardware as load_hardware
from tpplan.cost.hardware import shipped_hardware as shipped_hardware
