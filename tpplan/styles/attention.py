"""``attention``: the module that computes attention, and what follows from its heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from tpplan.compiled import ModulePlan
from tpplan.language import FrozenMap, Rule
from tpplan.layout import Part, Rows, rows_of
from tpplan.roles.attention import MultiheadAttention
from tpplan.roles.evaluating import AsInEvaluation
from tpplan.styles.rowwise import ROWWISE
from tpplan.styles.style import Misfits, Roles, Style, divisors, runs_as

if TYPE_CHECKING:
    from tpplan.observe.trace import Call
    from tpplan.planner.sizes import Sizes
    from tpplan.planner.walk import Walk

_PACKED = ("in_proj_weight", "in_proj_bias")
# what torch's layers around it ask before they run fused code, which would read sharded weights
_FUSED = ("activation_relu_or_gelu", "use_nested_tensor")


class Attention(Style):
    """States heads for the projections inside of it; torch's own is a region by itself."""

    name = "attention"
    heads = True
    inner = FrozenMap({"out_proj": ROWWISE.name})

    def complaint(self, module: nn.Module, tp: int) -> str | None:
        """Of torch's own, which computes its projections by itself."""
        if not self.is_region(module):
            return None
        if module.bias_k is not None or module.add_zero_attn:
            return "nn.MultiheadAttention with add_bias_kv or add_zero_attn cannot be sharded"
        if (heads := int(module.num_heads)) % tp:  # type: ignore[arg-type]
            return f"tp {tp} does not divide its {heads} heads; tp may be {divisors(heads)}"
        return None

    def is_region(self, module: nn.Module) -> bool:
        """Whether it is torch's own."""
        return runs_as(module, nn.MultiheadAttention)

    def closes(self, options: Mapping[str, object]) -> bool:
        """As the plan says."""
        return options.get("reduce") == "here"

    def placement(
        self, leaf: str, module: nn.Module, transposed: bool, rows: Rows | None
    ) -> Placement:
        """Of torch's own by heads; any other has no parameters that are the style's."""
        if not self.is_region(module):
            return super().placement(leaf, module, transposed, rows)
        return Shard(0) if rows is None or leaf not in _PACKED else rows

    def lay_out(self, sizes: Sizes, path: str, rule: Rule, misfits: Misfits) -> None:
        """The heads of torch's own; its layers must not run what would read all of them."""
        module = sizes.model.get_submodule(path)
        if not self.is_region(module) or sizes.tp == 1:
            return
        packed = any(module._parameters.get(leaf) is not None for leaf in _PACKED)
        if packed and not sizes.complaints.wrong:
            width, heads = int(module.embed_dim), int(module.num_heads)  # type: ignore[arg-type]
            parts = [Part(name, width, heads) for name in ("q", "k", "v")]
            sizes.layouts[path] = rows_of(parts, 1, sizes.tp)
        for around, layer in sizes.model.named_modules():
            if not around or path.startswith(f"{around}."):
                for name in _FUSED:
                    present = getattr(layer, name, None)
                    if isinstance(present, bool | int):
                        sizes.attributes.setdefault(around, {})[name] = (present, 0)

    def leave(self, walk: Walk, call: Call) -> None:
        """Of torch's own the stream; others are what is inside of them."""
        if call.path in walk.multihead:
            walk.gives_whole(call)
            walk.gives_sum(call, call.outputs[:1])

    def roles(self, plan: ModulePlan, module: nn.Module, fused: type[nn.Module] | None) -> Roles:
        """Torch's own is computed anew from the rank's heads."""
        if plan.multihead:
            return [MultiheadAttention], None
        roles, inner = super().roles(plan, module, fused)
        if plan.options.get("eval"):
            roles = [AsInEvaluation, *roles]
        return roles, inner

    def reasons(self, plan: ModulePlan) -> tuple[str, str]:
        """Those of its output projection."""
        return ROWWISE.reasons(plan)


ATTENTION = Attention()
