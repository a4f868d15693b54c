"""Attention, written in the ways people write it."""

from __future__ import annotations

from benchmarks.random_models.habits import lines_of
from benchmarks.random_models.part import Part
from benchmarks.random_models.recipe import Recipe


def attention(r: Recipe, n: dict[str, str]) -> Part:
    """The attention of a layer; its body takes ``x`` and returns a tensor."""
    part = Part()
    part.init += [
        f"self.heads, self.kv_heads, self.head_dim = {r.heads}, {r.kv_heads}, {r.head_dim}"
    ]
    {"separate": _separate, "kv": _separate, "qkv": _packed}.get(r.packing, _blocks)(r, n, part)
    # written out in the layer, the sizes of what it was given are not those of what is gathered
    of = part.body[0].split()[0] if r.inline else "x"
    part.body.insert(int(r.inline), f"{_lead(r)} = {of}.shape[:2]")
    _heads(r, n, part)
    _rotary(r, part)
    if r.extra == "scale":
        part.init += [f"self.scale = nn.Parameter(torch.rand({r.heads}, 1, 1) + 0.5)"]
        part.body += ["q = q * self.scale"]
        part.rules["scale"] = "colwise"
    part.body += lines_of(r, "attention")
    if r.kv != "all" and r.groups != "gqa":
        _repeat(r, part)
    terms = _terms(r, part)
    (_fused if r.core in ("sdpa", "masked sdpa") else _manual)(r, part, terms)
    part.body += lines_of(r, "mixed")
    _merge(r, part)
    if r.extra == "gate":
        part.linear(r, "out_gate", (str(r.width), str(r.heads * r.head_dim)), True, "colwise")
        part.body += ["y = y * torch.sigmoid(self.out_gate(x))"]
    part.linear(r, n["o"], (str(r.heads * r.head_dim), str(r.width)), r.out_bias, "rowwise")
    part.body += [f"y = self.{n['o']}(y)"]
    if r.dropout:
        part.init += ["self.drop_out = nn.Dropout(0.1)"]
        part.body += ["y = self.drop_out(y)"]
    part.init += lines_of(r, "attention init")
    if r.view == "config":
        part.init += ["self.config = CONFIG"]
    return part


def _lead(r: Recipe) -> str:
    return "t, b" if r.sequence_dim == 0 else "b, t"


def _separate(r: Recipe, n: dict[str, str], part: Part) -> None:
    w, q, kv = str(r.width), r.heads * r.head_dim, r.kv_heads * r.head_dim
    part.linear(r, n["q"], (w, str(q)), r.qkv_bias, "colwise")
    part.body += [f"q = self.{n['q']}(x)"]
    if r.packing == "kv":
        rule = {"style": "colwise", "packed": ["k", "v"]}
        part.linear(r, n["kv"], (w, str(2 * kv)), r.qkv_bias, rule)
        part.body += [f"kv = self.{n['kv']}(x)"]
        if r.split == "chunk":
            part.body += ["k, v = kv.chunk(2, -1)"]
        elif r.split == "slices":
            part.body += ["k, v = kv[..., : kv.size(-1) // 2], kv[..., kv.size(-1) // 2 :]"]
        else:
            _sized(part, kv)
            part.body += ["k, v = kv.split(self.kv_size, dim=-1)"]
        return
    for name in ("k", "v"):
        part.linear(r, n[name], (w, str(kv)), r.qkv_bias, "colwise")
        part.body += [f"{name} = self.{n[name]}(x)"]


def _sized(part: Part, kv: int) -> None:
    part.init += [f"self.kv_size = {kv}"]
    part.attributes(kv_size="kv_heads * head_dim")


def _packed(r: Recipe, n: dict[str, str], part: Part) -> None:
    """All queries, then all keys, then all values."""
    q, kv = r.heads * r.head_dim, r.kv_heads * r.head_dim
    rule = {"style": "colwise", "packed": ["q", "k", "v"]}
    part.linear(r, n["qkv"], (str(r.width), str(q + 2 * kv)), r.qkv_bias, rule)
    part.body += [f"qkv = self.{n['qkv']}(x)"]
    if r.split == "chunk":
        part.body += ["q, k, v = qkv.chunk(3, -1)"]
        return
    if r.split == "threefold":
        part.body += [f"q, k, v = qkv.unflatten(-1, (3, -1, {r.head_dim})).unbind(2)"]
        return
    part.init += [f"self.q_size = {q}"]
    part.attributes(q_size="heads * head_dim")
    _sized(part, kv)
    if r.split == "slices":
        part.body += [
            "q = qkv[..., : self.q_size]",
            "k = qkv[..., self.q_size : self.q_size + self.kv_size]",
            "v = qkv[..., self.q_size + self.kv_size :]",
        ]
    else:
        part.body += ["q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)"]


def _blocks(r: Recipe, n: dict[str, str], part: Part) -> None:
    """Queries, keys and values of each head, or of each key-value head."""
    size = (r.heads + 2 * r.kv_heads) * r.head_dim
    repeat = "heads" if r.packing == "per head" else "kv_heads"
    rule = {"style": "colwise", "packed": {"parts": ["q", "k", "v"], "repeat": repeat}}
    part.linear(r, n["qkv"], (str(r.width), str(size)), r.qkv_bias, rule)
    if r.packing == "per head":
        part.body += [
            f"qkv = self.{n['qkv']}(x).unflatten(-1, (-1, 3 * self.head_dim))",
            "q, k, v = qkv.chunk(3, -1)",
        ]
        return
    part.init += [f"self.groups = {r.heads // r.kv_heads}"]
    part.attributes(groups="heads // kv_heads")
    part.attention.update(heads=r.heads, kv_heads=r.kv_heads)  # no trace tells which is which
    part.body += [
        f"qkv = self.{n['qkv']}(x).unflatten(-1, (-1, self.groups + 2, self.head_dim))",
        "q, k, v = qkv[..., :-2, :].flatten(2, 3), qkv[..., -2, :], qkv[..., -1, :]",
    ]


def _heads(r: Recipe, n: dict[str, str], part: Part) -> None:
    """Queries, keys and values as (batch, heads, positions, columns)."""
    headed = r.packing in ("per head", "groups") or r.split == "threefold"
    if r.qk_norm.startswith("width"):
        kind = "nn.LayerNorm" if r.qk_norm.endswith("centred") else "RMS"
        for name, heads in (("q", r.heads), ("k", r.kv_heads)):
            part.init += [f"self.{n[name + 'n']} = {kind}({heads * r.head_dim}, {r.eps})"]
            part.body += [f"{name} = self.{n[name + 'n']}({name})"]
            part.rules[n[name + "n"]] = "colwise"
    if not headed:
        lead = _lead(r)
        for name in ("q", "k", "v"):
            part.body += [f"{name} = {_viewed(r, name, lead)}"]
        if r.view.startswith("heads"):
            part.attributes(heads="heads", kv_heads="kv_heads")
        if r.view == "config":
            part.attributes(**{"config.heads": "heads", "config.kv_heads": "kv_heads"})
    if r.qk_norm == "head":
        for name in ("q", "k"):
            part.init += [f"self.{n[name + 'n']} = RMS({r.head_dim}, {r.eps})"]
            part.body += [f"{name} = self.{n[name + 'n']}({name})"]
            part.rules[n[name + "n"]] = "replicate"
    order = "permute(1, 2, 0, 3)" if r.sequence_dim == 0 else "transpose(1, 2)"
    part.body += [f"q, k, v = (p.{order} for p in (q, k, v))"]


def _viewed(r: Recipe, name: str, lead: str) -> str:
    count = "heads" if name == "q" else "kv_heads"
    return {
        "minus one": f"{name}.view({lead}, -1, {r.head_dim})",
        "unflatten": f"{name}.unflatten(-1, (-1, self.head_dim))",
        "heads": f"{name}.view({lead}, self.{count}, self.head_dim)",
        "heads, minus one": f"{name}.reshape({lead}, self.{count}, -1)",
        "config": f"{name}.view({lead}, self.config.{count}, self.config.head_dim)",
    }[r.view]


def _rotary(r: Recipe, part: Part) -> None:
    if r.rotary == "none":
        return
    d = r.head_dim // 2 if r.rotary == "partial" else r.head_dim
    if r.rotary in ("inside", "partial"):
        part.body += [f"cos, sin = angles(t, {d}, x)"]
    elif r.rotary == "buffer":
        part.init += [
            f"cos, sin = angles(64, {d}, torch.zeros(()))",
            'self.register_buffer("cos", cos, persistent=False)',
            'self.register_buffer("sin", sin, persistent=False)',
        ]
        part.body += ["cos, sin = self.cos[:t].to(x.dtype), self.sin[:t].to(x.dtype)"]
    elif r.rotary == "given":
        part.given["rotary"] = f"angles(t, {d}, x)"
        part.body += ["cos, sin = rotary"]
    else:
        part.body += [
            f"cos, sin = angles(t, {d // 2}, x, twice=False)",
            "q, k = turned(q, cos, sin), turned(k, cos, sin)",
        ]
        return
    if r.rotary == "partial":
        part.body += [
            f"q = torch.cat([rotated(q[..., :{d}], cos, sin), q[..., {d}:]], -1)",
            f"k = torch.cat([rotated(k[..., :{d}], cos, sin), k[..., {d}:]], -1)",
        ]
    else:
        part.body += ["q, k = rotated(q, cos, sin), rotated(k, cos, sin)"]


def _repeat(r: Recipe, part: Part) -> None:
    """Keys and values once for each head of the queries."""
    if r.groups == "ratio":
        part.body += [
            "k = k.repeat_interleave(q.size(1) // k.size(1), 1)",
            "v = v.repeat_interleave(q.size(1) // v.size(1), 1)",
        ]
        return
    if r.packing != "groups":
        part.init += [f"self.groups = {r.heads // r.kv_heads}"]
        part.attributes(groups="heads // kv_heads")
    once = {
        "interleave": "{0} = {0}.repeat_interleave(self.groups, 1)",
        "expand": "{0} = {0}[:, :, None].expand(-1, -1, self.groups, -1, -1).flatten(1, 2)",
    }[r.groups]
    part.body += [once.format(name) for name in ("k", "v")]


def _terms(r: Recipe, part: Part) -> list[str]:
    """What is added to the scores: biases of each head, and masks given as numbers."""
    terms = []
    if r.bias == "alibi":
        part.given["alibi"] = f"slopes({r.heads}, t, x)"
        part.attention["head_inputs"] = {"alibi": 1}
        terms += ["alibi"]
    elif r.bias == "table":
        part.init += [f"self.table = nn.Embedding(8, {r.heads})"]
        part.rules["table"] = "colwise"
        part.body += ["table = self.table(distances(t, x)).permute(2, 0, 1)[None]"]
        terms += ["table"]
    if r.core == "given":
        part.given["mask"] = "future(t, x)"
        terms += ["mask"]
    elif r.vary == "window":
        part.init += ["self.window = 3 if i % 2 else None"]
        part.body += ["window = band(t, self.window, x)"]
        terms += ["window"]
    return terms


def _fused(r: Recipe, part: Part, terms: list[str]) -> None:
    options = ", enable_gqa=True" if r.kv != "all" and r.groups == "gqa" else ""
    if r.dropout:
        options += ", dropout_p=0.1 if self.training and DROPPING else 0.0"
    if r.core == "sdpa":
        options += ", is_causal=True"
    elif terms:
        if "window" not in terms:
            terms = [*terms, "future(t, x)"]
        options += f", attn_mask={' + '.join(terms)}"
    else:
        part.body += ["mask = torch.ones(t, t, dtype=torch.bool, device=x.device).tril()"]
        options += ", attn_mask=mask"
    part.body += [f"y = F.scaled_dot_product_attention(q, k, v{options})"]


def _manual(r: Recipe, part: Part, terms: list[str]) -> None:
    scores = "q @ k.transpose(-2, -1)"
    if r.core == "einsum":
        scores = 'torch.einsum("bhqd,bhkd->bhqk", q, k)'
    part.body += [f"att = {scores} / math.sqrt(self.head_dim)"]
    part.body += [f"att = att + {term}" for term in terms]
    if r.core in ("triu", "einsum"):
        part.body += [
            'future = torch.full((t, t), float("-inf"), device=x.device, dtype=x.dtype).triu(1)',
            "att = att + future",
        ]
    elif r.core == "buffer":
        part.init += ['self.register_buffer("causal", torch.tril(torch.ones(64, 64)))']
        part.body += ['att = att.masked_fill(self.causal[:t, :t] == 0, float("-inf"))']
    elif r.core == "where":
        part.body += [
            "seen = torch.ones(t, t, dtype=torch.bool, device=x.device).tril()",
            "att = torch.where(seen, att, torch.finfo(att.dtype).min)",
        ]
    if r.extra == "sinks":
        part.init += [f"self.sinks = nn.Parameter(torch.randn({r.heads}))"]
        part.rules["sinks"] = "colwise"
        part.body += [
            "sinks = self.sinks.view(1, -1, 1, 1).expand(b, -1, t, 1)",
            "att = torch.cat([att, sinks], -1).softmax(-1)[..., :-1]",
        ]
    else:
        part.body += ["att = att.softmax(-1)"]
    if r.dropout:
        part.init += ["self.drop_weights = nn.Dropout(0.1)"]
        part.body += ["att = self.drop_weights(att)"]
    part.body += lines_of(r, "weights")
    values = 'torch.einsum("bhqk,bhkd->bhqd", att, v)' if r.core == "einsum" else "att @ v"
    part.body += [f"y = {values}"]


def _merge(r: Recipe, part: Part) -> None:
    lead = _lead(r)
    part.body += ["y = y.permute(2, 0, 1, 3)" if r.sequence_dim == 0 else "y = y.transpose(1, 2)"]
    if r.merge == "heads":
        part.attributes(heads="heads")
    elif r.merge == "width":
        part.init += [f"self.all_heads = {r.heads * r.head_dim}"]
        part.attributes(all_heads="heads * head_dim")
    part.body += [
        {
            "flatten": "y = y.flatten(2)",
            "reshape": f"y = y.reshape({lead}, -1)",
            "heads": f"y = y.contiguous().view({lead}, self.heads * self.head_dim)",
            "width": f"y = y.reshape({lead}, self.all_heads)",
        }[r.merge]
    ]
