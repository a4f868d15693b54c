"""Every private or version-dependent torch API that tpplan uses, in one place.

Written against torch 2.13 and meant to work on 2.12 to 2.15: what a release moves or renames is
mended here and nowhere else.
"""

from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec as DTensorSpec
from torch.distributed.tensor._dtensor_spec import TensorMeta as TensorMeta

from tpplan.compat.autograd import at_end_of_backward as at_end_of_backward
from tpplan.compat.autograd import backward_pass as backward_pass
from tpplan.compat.autograd import below_autograd as below_autograd
from tpplan.compat.autograd import differentiates_backward as differentiates_backward
from tpplan.compat.autograd import hooks_of as hooks_of
from tpplan.compat.autograd import in_backward as in_backward
from tpplan.compat.autograd import is_held_elsewhere as is_held_elsewhere
from tpplan.compat.autograd import run_after as run_after
from tpplan.compat.autograd import run_when_ready as run_when_ready
from tpplan.compat.autograd import running_node as running_node
from tpplan.compat.autograd import saved_tensors_hooks as saved_tensors_hooks
from tpplan.compat.autograd import sequence_number as sequence_number
from tpplan.compat.autograd import set_hooks as set_hooks
from tpplan.compat.fakes import FakeTensorMode as FakeTensorMode
from tpplan.compat.fakes import uncached as uncached
from tpplan.compat.modes import NeedsValuesError as NeedsValuesError
from tpplan.compat.modes import Uncompiled as Uncompiled
from tpplan.compat.modes import constant_in_graphs as constant_in_graphs
from tpplan.compat.modes import dispatch_is_observed as dispatch_is_observed
from tpplan.compat.modes import dispatch_modes as dispatch_modes
from tpplan.compat.modes import fakes_are_made as fakes_are_made
from tpplan.compat.modes import is_fake as is_fake
from tpplan.compat.modes import is_traced as is_traced
from tpplan.compat.modes import is_transformed as is_transformed
from tpplan.compat.modes import is_wrapped as is_wrapped
from tpplan.compat.modes import only_old_graphs as only_old_graphs
from tpplan.compat.modes import quiet as quiet
from tpplan.compat.modes import rehearsed_in as rehearsed_in
from tpplan.compat.modes import tracer as tracer
from tpplan.compat.modes import unfused as unfused
from tpplan.compat.modes import unmoded as unmoded
from tpplan.compat.modes import unobserved as unobserved
from tpplan.compat.modes import without_fakes as without_fakes
from tpplan.compat.ops import draws as draws
from tpplan.compat.ops import has_data as has_data
from tpplan.compat.ops import is_composite as is_composite
from tpplan.compat.ops import is_view as is_view
from tpplan.compat.ops import memory_of as memory_of
from tpplan.compat.ops import queue_of as queue_of
from tpplan.compat.ops import written_by as written_by
from tpplan.compat.pipelines import backward_is_split as backward_is_split
from tpplan.compat.pipelines import only_sizes_count as only_sizes_count
from tpplan.compat.recorders import records_nothing as records_nothing
from tpplan.compat.sites import Running as Running
from tpplan.compat.sites import Site as Site
from tpplan.compat.sites import running as running
from tpplan.compat.sizes import always as always
from tpplan.compat.sizes import bind_all_to_sizes as bind_all_to_sizes
from tpplan.compat.sizes import bind_to_sizes as bind_to_sizes
from tpplan.compat.sizes import larger as larger
from tpplan.compat.sizes import smaller as smaller
from tpplan.compat.symmetric import fused_all_gather_matmul as fused_all_gather_matmul
from tpplan.compat.symmetric import fused_matmul_reduce_scatter as fused_matmul_reduce_scatter
from tpplan.compat.tensors import StridedShard as StridedShard
from tpplan.compat.tensors import dtensor as dtensor
from tpplan.compat.tensors import dtensor_spec as dtensor_spec
from tpplan.compat.tensors import full_states_by as full_states_by
from tpplan.compat.tensors import kept_by_fsdp as kept_by_fsdp
from tpplan.compat.tensors import local_of as local_of
from tpplan.compat.tensors import mesh_of as mesh_of
from tpplan.compat.tensors import shards_of as shards_of
from tpplan.compat.tensors import spec_of as spec_of
from tpplan.compat.tensors import tangents_of as tangents_of
from tpplan.compat.tensors import unflattened as unflattened
from tpplan.compat.threads import one_thread as one_thread
from tpplan.compat.worlds import fake_world as fake_world
from tpplan.compat.worlds import mesh_of_all as mesh_of_all
from tpplan.compat.worlds import simulate as simulate
