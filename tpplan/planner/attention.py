"""The ``attention`` style: head geometry, and the per-rank values of hard-coded attributes."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from tpplan.language import Diagnostic, Expression, ExpressionError, Rule


def per_rank_attributes(
    model: nn.Module,
    rules: Mapping[str, Rule],
    geometry: Mapping[str, tuple[int, int]],
    tp: int,
    wrong: list[Diagnostic],
) -> dict[str, dict[str, tuple[int, int]]]:
    """Module path -> attribute -> (present value, value per rank).

    Args:
        geometry: heads and head width of the column-parallel layers, from the trace.
        wrong: where each attribute that its expression does not reproduce is reported.
    """
    result: dict[str, dict[str, tuple[int, int]]] = {}
    for path, rule in rules.items():
        if rule.style != "attention":
            continue
        values = _geometry(path, rule, geometry, wrong)
        local = {k: v // tp if k in ("heads", "kv_heads") else v for k, v in values.items()}
        attributes = rule.options.get("attributes") or {}
        assert isinstance(attributes, Mapping)
        position = rule.option_positions.get("attributes", rule.position)
        for key in ("heads", "kv_heads"):
            if key in values and values[key] % tp:
                message = f"{path}: tp {tp} does not divide its {values[key]} {key}"
                wrong.append(Diagnostic(message, rule.position))
        for name, text in attributes.items():
            module = model.get_submodule(path)
            present = getattr(module, name, None)
            if not isinstance(present, int):
                message = f"{path} has no integer attribute '{name}'"
                wrong.append(Diagnostic(message, position))
                continue
            try:
                expression = Expression(str(text))
                computed = expression.evaluate(values)
            except ExpressionError as error:
                message = f"{path}: {name}: {error}"
                wrong.append(Diagnostic(message, position))
                continue
            if computed != present:
                message = f"{path}: '{text}' is {computed}, but {name} is {present}"
                known = ", ".join(f"{k} = {v}" for k, v in values.items())
                wrong.append(Diagnostic(message, position, f"what is known: {known}"))
                continue
            result.setdefault(path, {})[name] = (present, expression.evaluate(local))
    return result


def _geometry(
    path: str, rule: Rule, geometry: Mapping[str, tuple[int, int]], wrong: list[Diagnostic]
) -> dict[str, int]:
    inside = [shape for name, shape in geometry.items() if name.startswith(f"{path}.")]
    values: dict[str, int] = {}
    if inside:
        values = {
            "heads": max(count for count, _ in inside),
            "kv_heads": min(count for count, _ in inside),
            "head_dim": inside[0][1],
        }
    for key in ("heads", "kv_heads", "head_dim"):
        stated = rule.options.get(key)
        if isinstance(stated, int):
            values[key] = stated
        elif stated is not None:
            message = f"{path}: {key} must be a number in this version, not '{stated}'"
            wrong.append(Diagnostic(message, rule.option_positions.get(key, rule.position)))
    if "heads" in values:
        values.setdefault("kv_heads", values["heads"])
    return values
