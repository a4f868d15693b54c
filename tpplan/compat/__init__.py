"""Every private or version-dependent torch API that tpplan uses, in one place.

Written against torch 2.13 and meant to work on 2.12 to 2.15: what a release moves or renames is
mended here and nowhere else.
"""

from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from tpplan.compat.autograd import (
    below_autograd,
    differentiates_backward,
    hooks_of,
    in_backward,
    is_held_elsewhere,
    run_when_ready,
    running_node,
    sequence_number,
    set_hooks,
)
from tpplan.compat.modes import (
    NeedsValuesError,
    dispatch_is_observed,
    dispatch_modes,
    fakes_are_made,
    is_fake,
    is_traced,
    quiet,
    rehearsed_in,
    tracer,
    unfused,
    unmoded,
    unobserved,
    without_fakes,
)
from tpplan.compat.ops import (
    has_data,
    is_composite,
    is_view,
    memory_of,
    queue_of,
    written_by,
)
from tpplan.compat.tensors import (
    dtensor,
    dtensor_spec,
    kept_by_fsdp,
    local_of,
    mesh_of,
    shards_of,
    spec_of,
    unflattened,
)
from tpplan.compat.worlds import (
    fake_world,
    simulate,
)

__all__ = [
    "DTensorSpec",
    "FakeTensor",
    "FakeTensorMode",
    "NeedsValuesError",
    "below_autograd",
    "differentiates_backward",
    "dispatch_is_observed",
    "dispatch_modes",
    "dtensor",
    "dtensor_spec",
    "fake_world",
    "fakes_are_made",
    "has_data",
    "hooks_of",
    "in_backward",
    "is_composite",
    "is_fake",
    "is_held_elsewhere",
    "is_traced",
    "is_view",
    "kept_by_fsdp",
    "local_of",
    "memory_of",
    "mesh_of",
    "queue_of",
    "quiet",
    "rehearsed_in",
    "run_when_ready",
    "running_node",
    "sequence_number",
    "set_hooks",
    "shards_of",
    "simulate",
    "spec_of",
    "tracer",
    "unflattened",
    "unfused",
    "unmoded",
    "unobserved",
    "without_fakes",
    "written_by",
]
