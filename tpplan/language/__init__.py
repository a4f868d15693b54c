"""The plan language: YAML text to an immutable ``Plan``, or everything that is wrong with it."""

from tpplan.language.diagnostics import Diagnostic as Diagnostic
from tpplan.language.diagnostics import PlanError as PlanError
from tpplan.language.diagnostics import Position as Position
from tpplan.language.diagnostics import suggest as suggest
from tpplan.language.expressions import Expression as Expression
from tpplan.language.expressions import ExpressionError as ExpressionError
from tpplan.language.load import load as load
from tpplan.language.load import parse_mapping as parse_mapping
from tpplan.language.nearest import nearest as nearest
from tpplan.language.parse import Resolve as Resolve
from tpplan.language.parse import Source as Source
from tpplan.language.parse import parse as parse
from tpplan.language.patterns import Pattern as Pattern
from tpplan.language.patterns import PatternError as PatternError
from tpplan.language.plan import FrozenMap as FrozenMap
from tpplan.language.plan import Plan as Plan
from tpplan.language.plan import Rule as Rule
from tpplan.language.plan import as_written as as_written
from tpplan.language.schema import schema as schema
