"""Plans written for models that nobody planned: found in a trace, proved by the compiler."""

from tpplan.suggestion.find import Suggestion as Suggestion
from tpplan.suggestion.find import find as find
from tpplan.suggestion.mend import mended as mended
from tpplan.suggestion.told import explained as explained
