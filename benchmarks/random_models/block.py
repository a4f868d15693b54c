"""A layer: norms, attention and MLP, and how they are put together."""

from __future__ import annotations

from benchmarks.random_models.attention import attention
from benchmarks.random_models.habits import lines_of
from benchmarks.random_models.mlp import mlp
from benchmarks.random_models.part import Part, Rules, method, module
from benchmarks.random_models.recipe import Recipe


def norm(r: Recipe, width: int, varies: bool = True) -> str | None:
    """The expression that makes a norm; None where it is a function."""
    eps = f"({r.eps}, 1e-2)[i % 2]" if r.vary == "eps" and varies else str(r.eps)
    return {
        "LayerNorm": f"nn.LayerNorm({width}, eps={eps})",
        "RMSNorm": f"nn.RMSNorm({width}, eps={eps})",
        "own RMS": f"RMS({width}, {eps})",
        "own layer": f"OwnLayerNorm({width}, {eps})",
        "plus one": f"PlusOne({width}, {eps})",
        "unit": f"Unit({width})",
        "no bias": f"nn.LayerNorm({width}, eps={eps}, bias=False)",
        "functional": None,
    }[r.norm]


def normed(r: Recipe, name: str, x: str) -> str:
    """The expression that applies the norm ``name``."""
    if r.norm == "functional":
        return f"F.layer_norm({x}, ({r.width},))"
    return f"self.{name}({x})"


class Block:
    """The layer's text, and its rules."""

    def __init__(self, r: Recipe, names: dict[str, str]) -> None:
        self.r, self.n = r, names
        self.rules: Rules = {}
        self.init: list[str] = []
        self.methods: list[list[str]] = []
        self.classes: list[str] = []
        self.given: dict[str, str] = {}
        if r.attends:
            self._add(attention(r, names), names["attn"], "Attention", "attend")
        if r.has_mlp:
            self._add(mlp(r, names), names["mlp"], "MLP", "feed")
        self.x = names["x"]
        if r.residual == "embeddings":
            self.given["first"] = "x"

    def _add(self, part: Part, name: str, cls: str, verb: str) -> None:
        arguments = ["x", *part.given]
        self.given.update(part.given)
        skipped = self.r.vary == "skip" and cls == "MLP"
        body = [*part.body, "return y"]
        if self.r.inline and not skipped:
            self.init += part.init
            self.methods.append(method(verb, arguments, body))
            where = ""
        elif cls == "MLP" and self.r.mlp == "sequential":
            self.init += part.init
            made = f"{part.body[0]} if i % 2 == 0 else None" if skipped else part.body[0]
            self.init.append(f"self.{name} = {made}")
            where = f"{name}."
        else:
            self.classes.append(module(cls, "i", part.init, method("forward", arguments, body)))
            made = f"{cls}(i) if i % 2 == 0 else None" if skipped else f"{cls}(i)"
            self.init.append(f"self.{name} = {made}")
            where = f"{name}."
        if part.attention:
            self.rules[where.removesuffix(".")] = {"style": "attention", **part.attention}
        self.rules.update({f"{where}{path}": rule for path, rule in part.rules.items()})

    def text(self) -> str:
        """The classes of the layer."""
        self.init += lines_of(self.r, "stream init")
        body = [f"x = {self.x}"] if self.x != "x" else []
        body += lines_of(self.r, "stream")
        body += self._parallel() if self.r.order.startswith("parallel") else self._in_turn()
        body += lines_of(self.r, "layer end")
        body += [
            {"tensor": "return x", "tuple": "return (x,)", "dict": 'return {"x": x}'}[
                self.r.returns
            ]
        ]
        forward = method("forward", [self.x, *self.given], body)
        init = [*self.init, *lines_of(self.r, "block init")]
        return "".join(self.classes) + module("Block", "i", init, forward, *self.methods)

    def _norm(self, name: str) -> str:
        made = norm(self.r, self.r.width)
        if made is not None:
            self.init.append(f"self.{self.n[name]} = {made}")
            self.rules[self.n[name]] = "sequence_parallel"
        return self.n[name]

    def _of(self, branch: str, x: str) -> str:
        """The call of attention or MLP."""
        inline = self.r.inline and not (branch == "mlp" and self.r.vary == "skip")
        verb = {"attn": "attend", "mlp": "feed"}[branch] if inline else self.n[branch]
        extra = [a for a in self.given if a != "first"] if branch == "attn" else []
        said = [f"{a}={a}" if self.r.keywords else a for a in extra]
        first = f"x={x}" if self.r.keywords and self.r.mlp != "sequential" else x
        return f"self.{verb}({', '.join([first, *said])})"

    def _added(self, y: str, number: int) -> str:
        r = self.r
        if r.residual == "constant":
            return f"x + 0.5 * {y}"
        if r.residual in ("vector", "scalar"):
            shape = str(r.width) if r.residual == "vector" else ""
            self.init.append(f"self.gain{number} = nn.Parameter(torch.randn({shape or '()'}))")
            self.rules[f"gain{number}"] = "replicate"
            return f"x + self.gain{number} * {y}"
        return f"x + {y}"

    def _in_turn(self) -> list[str]:
        r, lines = self.r, []
        if r.residual == "embeddings":
            lines += ["x = x + 0.1 * first"]
        branches = [b for b, there in (("attn", r.attends), ("mlp", r.has_mlp)) if there]
        for number, branch in enumerate(branches, 1):
            step = []
            y = "x"
            if r.order in ("pre", "sandwich"):
                y = normed(r, self._norm(f"n{number}"), "x")
            y = self._of(branch, y)
            if r.order == "sandwich":
                y = normed(r, self._norm(f"m{number}"), y)
            if r.order == "post":
                total = self._added(y, number)
                step += [f"x = {normed(r, self._norm(f'n{number}'), total)}"]
            else:
                step += [f"x = {self._added(y, number)}"]
            if branch == "mlp" and r.vary == "skip":
                step = [f"if self.{self.n['mlp']} is not None:", *(f"    {s}" for s in step)]
            lines += step
        return lines

    def _parallel(self) -> list[str]:
        r = self.r
        lines = ["x = x + 0.1 * first"] if r.residual == "embeddings" else []
        lines += [f"h = {normed(r, self._norm('n1'), 'x')}"]
        second = "h"
        if r.order == "parallel, two norms":
            second = "g"
            lines += [f"g = {normed(r, self._norm('n2'), 'x')}"]
        both = f"({self._of('attn', 'h')} + {self._of('mlp', second)})"
        if r.vary == "skip":
            lines += [
                f"y = {self._of('attn', 'h')}",
                f"if self.{self.n['mlp']} is not None:",
                f"    y = y + {self._of('mlp', second)}",
            ]
            both = "y"
        return [*lines, f"x = {self._added(both, 1)}"]
