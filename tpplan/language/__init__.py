"""The plan language: YAML text to an immutable ``Plan``, or everything that is wrong with it."""

from tpplan.language.diagnostics import Diagnostic, PlanError, Position, suggest
from tpplan.language.expressions import Expression, ExpressionError
from tpplan.language.load import load, parse_mapping
from tpplan.language.nearest import nearest
from tpplan.language.parse import Resolve, Source, parse
from tpplan.language.patterns import Pattern, PatternError
from tpplan.language.plan import FrozenMap, Plan, Rule
from tpplan.language.schema import schema

__all__ = [
    "Diagnostic",
    "Expression",
    "ExpressionError",
    "FrozenMap",
    "Pattern",
    "PatternError",
    "Plan",
    "PlanError",
    "Position",
    "Resolve",
    "Rule",
    "Source",
    "load",
    "nearest",
    "parse",
    "parse_mapping",
    "schema",
    "suggest",
]
