"""The whole model's text, its plan, and a call of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import yaml

from benchmarks.random_models.block import Block, norm, normed
from benchmarks.random_models.habits import lines_of
from benchmarks.random_models.helpers import with_helpers
from benchmarks.random_models.part import NAMES, Rules, indented, method, module
from benchmarks.random_models.recipe import Recipe


@dataclass(frozen=True)
class Case:
    """A model and a plan for it.

    Attributes:
        source: defines ``make()`` and ``call(batch, length, generator)``.
        plan: YAML; right: whether the plan is right for the model, as far as its author knows.
        late_double: whether the model is made float64 only after it is sharded.
    """

    source: str
    plan: str
    right: bool = True
    late_double: bool = True


def case_of(r: Recipe) -> Case:
    """The model of a recipe with a right plan."""
    source, plan = written(r)
    return Case(source, plan_text(plan), r.habit == "", r.late_double)


def plan_text(plan: dict[str, Any]) -> str:
    """A plan as a user writes it, each rule on a line."""
    lines = ["tpplan: 1"]
    for key, value in plan.items():
        if not isinstance(value, dict):
            lines.append(f"{key}: {value}")
            continue
        lines.append(f"{key}:")
        lines += [f"  {_flow(pattern)}: {_flow(rule)}" for pattern, rule in value.items()]
    return "\n".join(lines) + "\n"


def _flow(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=1000, sort_keys=False)
    return text.removesuffix("\n...\n").strip()


def written(r: Recipe) -> tuple[str, dict[str, Any]]:
    """The source of a model, and its plan as a mapping."""
    names = dict(NAMES[r.names])
    block = Block(r, names)
    text = block.text()
    model = _Model(r, names, block)
    text += model.text()
    plan: dict[str, Any] = {}
    if r.sequence_dim == 0:
        plan["sequence_dim"] = 0
    if r.stack == "attributes":
        plan["layers"] = f"{model.inside}{names['h']}?"
    plan["rules"] = model.rules
    return with_helpers(r, text + _call(r)), plan


class _Model:
    def __init__(self, r: Recipe, names: dict[str, str], block: Block) -> None:
        self.r, self.n, self.block = r, names, block
        self.init: list[str] = []
        self.body: list[str] = []
        self.rules: Rules = {}
        self.inside = f"{names['body']}." if r.nested else ""

    def text(self) -> str:
        r = self.r
        self._start()
        self._stack()
        self.body += lines_of(r, "model")
        if r.final_norm:
            self._norm("last", "x")
        if r.nested:
            return self._nested()
        end_init, end = self._end()
        init = [*self.init, *end_init, *lines_of(r, "model init")]
        forward = method("forward", self._arguments(), [*self.body, *end])
        return module("Model", "", init, forward) + "def make():\n    return Model()\n\n\n"

    def _arguments(self) -> list[str]:
        labels = ["labels=None"] if "loss" in self.r.output else []
        return ["ids" if self.r.entry == "ids" else "x", *labels]

    def _nested(self) -> str:
        n = self.n
        body = [*self.body, "return x" if self.r.auxiliary != "embeddings" else "return x, start"]
        inner = module("Body", "", self.init, method("forward", ["ids"], body))
        end_init, end = self._end()
        call = "x, start" if self.r.auxiliary == "embeddings" else "x"
        lines = [f"{call} = self.{n['body']}(ids)", *end]
        init = [f"self.{n['body']} = Body()", *end_init, *lines_of(self.r, "model init")]
        outer = module("Model", "", init, method("forward", self._arguments(), lines))
        return inner + outer + "def make():\n    return Model()\n\n\n"

    def _norm(self, name: str, x: str) -> None:
        made = norm(self.r, self.r.width, varies=False)
        if made is not None:
            self.init.append(f"self.{self.n[name]} = {made}")
            self.rules[self.inside + self.n[name]] = "sequence_parallel"
        self.body.append(f"x = {normed(self.r, self.n[name], x)}")

    def _start(self) -> None:
        """From the model's input to the first layer."""
        r, n = self.r, self.n
        length = "x.size(0), x.size(1)" if r.sequence_dim == 0 else "x.size(1), x.size(0)"
        if r.entry == "ids":
            table = r.positions in ("parameter", "sinusoid", "buffer")
            rule = {"style": "vocab", "output": "gather"} if table else "vocab"
            self.init.append(f"self.{n['embed']} = nn.Embedding({r.vocabulary}, {r.width})")
            self.rules[self.inside + n["embed"]] = rule
            self.body += ["b, t = ids.shape", f"x = self.{n['embed']}(ids)"]
        else:
            self.body += [f"t, b = {length}"]
        if r.scaled_embedding:
            self.body += [f"x = x * {r.width} ** 0.5"]
        self._positions()
        if r.first_norm:
            self._norm("n0", "x")
        if r.dropout:
            self.init.append("self.drop = nn.Dropout(0.1)")
            self.body.append("x = self.drop(x)")
        if r.auxiliary == "embeddings":
            self.body.append("start = x")

    def _positions(self) -> None:
        r, n = self.r, self.n
        if r.positions == "learned":
            self.init.append(f"self.{n['where']} = nn.Embedding(64, {r.width})")
            self.rules[self.inside + n["where"]] = "sequence_parallel"
            self.body.append(f"x = x + self.{n['where']}(torch.arange(t, device=ids.device))")
        elif r.positions == "parameter":
            self.init.append(f"self.{n['where']} = nn.Parameter(torch.randn(1, 64, {r.width}))")
            self.rules[self.inside + n["where"]] = "replicate"
            self.body.append(f"x = x + self.{n['where']}[:, :t]")
        elif r.positions == "sinusoid":
            self.body.append(f"x = x + sinusoid(t, {r.width}, x)")
        elif r.positions == "buffer":
            made = f"sinusoid(64, {r.width}, torch.zeros(()))"
            self.init.append(f'self.register_buffer("{n["where"]}", {made})')
            self.body.append(f"x = x + self.{n['where']}[:t]")

    def _stack(self) -> None:
        r, h = self.r, self.n["h"]
        made = {
            "list": f"nn.ModuleList(Block(i) for i in range({r.layers}))",
            "sequential": f"nn.Sequential(*(Block(i) for i in range({r.layers})))",
            "dict": f"nn.ModuleDict({{str(i): Block(i) for i in range({r.layers})}})",
        }.get(r.stack)
        if r.shared == "layer":
            made = f"nn.ModuleList([Block(0)] * {r.layers})"
        elif r.shared == "loop":
            made = "nn.ModuleList([Block(0)])"
        if made is None:
            self.init += [f"self.{h}{i} = Block({i})" for i in range(r.layers)]
        else:
            self.init += [f"self.{h} = {made}"]
        if r.shared == "weight":
            self.init.append(self._tie())
        pattern = f"{h}?" if r.stack == "attributes" else f"{h}.*"
        for path, rule in self.block.rules.items():
            self.rules[f"{self.inside}{pattern}{f'.{path}' if path else ''}"] = rule
        self.body += [f"{name} = {made}" for name, made in self.block.given.items()]
        if r.stack == "sequential":
            self.body.append(f"x = self.{h}(x)")
            return
        self.body += [f"for layer in {self._layers()}:", *indented(self._step())]

    def _tie(self) -> str:
        r, n = self.r, self.n
        first, second = (
            f"self.{n['h']}{i}"
            if r.stack == "attributes"
            else f'self.{n["h"]}["{i}"]'
            if r.stack == "dict"
            else f"self.{n['h']}[{i}]"
            for i in (0, 1)
        )
        if r.mlp == "sequential":
            path = f"{n['mlp']}[0].weight"
        else:
            name = n["up"] if r.mlp in ("plain", "gated") else n["both"]
            path = f"{name}.weight" if r.inline else f"{n['mlp']}.{name}.weight"
        return f"{second}.{path} = {first}.{path}"

    def _layers(self) -> str:
        r, h = self.r, self.n["h"]
        if r.shared == "loop":
            return f"[self.{h}[0]] * {r.layers}"
        if r.stack == "attributes":
            return f"({', '.join(f'self.{h}{i}' for i in range(r.layers))},)"
        return f"self.{h}.values()" if r.stack == "dict" else f"self.{h}"

    def _step(self) -> list[str]:
        r = self.r
        x, given = self.n["x"], list(self.block.given)
        said = [f"{a}={a}" if r.keywords else a for a in given]
        call = f"layer({', '.join([f'{x}=x' if r.keywords else 'x', *said])})"
        unpack = {"tensor": "", "tuple": "[0]", "dict": '["x"]'}[r.returns]
        if r.checkpoint == "none":
            return [f"x = {call}{unpack}"]
        again = f"checkpoint(layer, x, {''.join(f'{a}, ' for a in given)}"
        again += f"use_reentrant={r.checkpoint == 'reentrant'})"
        return ["if self.training:", f"    x = {again}{unpack}", "else:", f"    x = {call}{unpack}"]

    def _end(self) -> tuple[list[str], list[str]]:
        """From the last norm to what the model returns."""
        r = self.r
        init: list[str] = []
        lines: list[str] = []
        aux = {"hidden": "x", "logits": "logits", "embeddings": "start"}.get(r.auxiliary)
        out = "x"
        if r.entry == "ids" and r.head != "none":
            out = "logits"
            init, lines = self._head()
        if r.auxiliary != "none":
            lines += [f"auxiliary = {aux}.pow(2).mean()"]
        lines += lines_of(r, "output", out=out)
        rest = [] if r.auxiliary == "none" else ["auxiliary"]
        if "loss" in r.output:
            shifted = r.output == "shifted loss"
            a, b = ("logits[:, :-1]", "labels[:, 1:]") if shifted else ("logits", "labels")
            flat = "reshape" if shifted else "view"
            loss = f"F.cross_entropy({a}.{flat}(-1, {r.vocabulary}), {b}.reshape(-1))"
            lines += ["loss = None", "if labels is not None:", f"    loss = {loss}"]
            if r.output == "loss, dict":
                pairs = ", ".join(f'"{name}": {name}' for name in ("logits", "loss", *rest))
                return init, [*lines, f"return {{{pairs}}}"]
            said = ", ".join(f"{name}={name}" for name in ("logits", "loss", *rest))
            return init, [*lines, f"return Output({said})"]
        if r.output == "dict":
            pairs = ", ".join(f'"{name}": {name}' for name in (out, *rest))
            return init, [*lines, f"return {{{pairs}}}"]
        if r.output == "dataclass":
            said = ", ".join([f"logits={out}", *(f"{name}={name}" for name in rest)])
            return init, [*lines, f"return Output({said})"]
        if rest or r.output == "tuple":
            return init, [*lines, f"return {', '.join([out, *rest])},".replace(",,", ",")]
        return init, [*lines, f"return {out}"]

    def _head(self) -> tuple[list[str], list[str]]:
        r, n = self.r, self.n
        embed = f"self.{self.inside}{n['embed']}"
        init: list[str] = []
        if r.head == "functional":
            lines = [f"logits = F.linear(x, {embed}.weight)"]
        else:
            bias = r.head == "bias"
            init = [f"self.{n['head']} = nn.Linear({r.width}, {r.vocabulary}, bias={bias})"]
            self.rules[n["head"]] = "vocab"
            if r.head == "tied":
                init += [f"self.{n['head']}.weight = {embed}.weight"]
            lines = [f"logits = self.{n['head']}(x)"]
        if r.logits == "scaled":
            lines += ["logits = logits * 0.25"]
        elif r.logits == "capped":
            lines += ["logits = 5.0 * torch.tanh(logits / 5.0)"]
        return init, lines


def _call(r: Recipe) -> str:
    """A function that makes a call's arguments."""
    if r.entry == "ids":
        given = f'{{"ids": torch.randint(0, {r.vocabulary}, (batch, length), generator=generator)}}'
        lines = [f"given = {given}"]
        if "loss" in r.output:
            lines += [
                f"labels = torch.randint(0, {r.vocabulary}, (batch, length), generator=generator)",
                "labels[0, 0] = -100",
                'given["labels"] = labels',
            ]
        lines += ["return given"]
    else:
        shape = "length, batch" if r.sequence_dim == 0 else "batch, length"
        lines = [f'return {{"x": torch.randn({shape}, {r.width}, generator=generator)}}']
    return "\n".join(["def call(batch, length, generator):", *indented(lines)]) + "\n"
