"""MLPs, written in the ways people write them."""

from __future__ import annotations

from benchmarks.random_models.habits import lines_of
from benchmarks.random_models.part import Part, linear
from benchmarks.random_models.recipe import Recipe

_ACTIVATIONS = {
    "relu": "F.relu({})",
    "gelu": "F.gelu({})",
    "tanh": 'F.gelu({}, approximate="tanh")',
    "silu": "F.silu({})",
    "square": "F.relu({}).square()",
    "quick": "quick_gelu({})",
    "module": "self.act({})",
}
_PACKED = {"style": "colwise", "packed": ["gate", "up"]}


def mlp(r: Recipe, n: dict[str, str]) -> Part:
    """The MLP of a layer; its body takes ``x`` and returns a tensor."""
    part = Part()
    inner = "inner" if r.vary == "inner" else str(r.inner)
    if r.vary == "inner":
        part.init += [f"inner = ({r.inner}, {2 * r.inner})[i % 2]"]
    if r.mlp == "sequential":
        return _sequential(r, part, inner)
    if r.vary == "activation":
        part.init += [f"self.act = (F.{r.activation}, F.tanh)[i % 2]"]
    elif r.activation == "module":
        part.init += ["self.act = nn.GELU()"]
    act = "self.act({})" if r.vary == "activation" else _ACTIVATIONS[r.activation]
    w, bias = str(r.width), r.mlp_bias
    if r.mlp in ("plain", "gated"):
        part.linear(r, n["up"], (w, inner), bias, "colwise")
    if r.mlp == "gated":
        part.linear(r, n["gate"], (w, inner), bias, "colwise")
        gate = act.format(f"self.{n['gate']}(x)")
        part.body += [f"y = {gate} * self.{n['up']}(x)"]
    elif r.mlp == "plain":
        up = f"self.{n['up']}(x)"
        part.body += [f"y = {act.format(up)}"]
    else:
        first = {"packed": ["gate", "up"], "up first": ["up", "gate"]}.get(r.mlp)
        rule = "colwise" if first is None else {"style": "colwise", "packed": first}
        part.linear(r, n["both"], (w, f"2 * {inner}"), bias, rule)
        part.body += [f"both = self.{n['both']}(x)"]
        cut = "both[..., ::2], both[..., 1::2]" if first is None else "both.chunk(2, dim=-1)"
        names = "up, gate" if r.mlp == "up first" else "gate, up"
        part.body += [f"{names} = {cut}", f"y = {act.format('gate')} * up"]
    if r.mlp_extra.endswith("norm"):
        kind = "RMS" if r.mlp_extra == "norm" else "nn.LayerNorm"
        part.init += [f"self.inner_norm = {kind}({inner}, {r.eps})"]
        part.rules["inner_norm"] = "colwise"
        part.body += ["y = self.inner_norm(y)"]
    elif r.mlp_extra == "scale":
        part.init += [f"self.inner_scale = nn.Parameter(torch.rand({inner}) + 0.5)"]
        part.rules["inner_scale"] = "colwise"
        part.body += ["y = y * self.inner_scale"]
    enters = n["up"] if r.mlp in ("plain", "gated") else n["both"]
    named = {"up": enters, "down": n["down"], "inner": inner}
    part.init += lines_of(r, "mlp init", **named)
    part.body += lines_of(r, "mlp", **named)
    if r.dropout:
        part.init += ["self.drop_inner = nn.Dropout(0.1)"]
        part.body += ["y = self.drop_inner(y)"]
    part.linear(r, n["down"], (inner, w), bias, "rowwise")
    part.body += [f"y = self.{n['down']}(y)"]
    part.init += lines_of(r, "mlp end", **named)
    return part


def _sequential(r: Recipe, part: Part, inner: str) -> Part:
    """An ``nn.Sequential``: its one line of init is what makes it."""
    w, bias = str(r.width), r.mlp_bias
    inside = [linear(r, w, inner, bias), "nn.GELU()", linear(r, inner, w, bias)]
    if r.dropout:
        inside.insert(2, "nn.Dropout(0.1)")
    part.body = [f"nn.Sequential({', '.join(inside)})"]
    part.rules = {"0": "colwise", str(len(inside) - 1): "rowwise"}
    return part
