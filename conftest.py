"""What of the package can be collected here: an integration needs the library it integrates."""

from importlib.util import find_spec

# Without torchft (an extra of its own) the doctests of that integration cannot be imported.
collect_ignore = [] if find_spec("torchft") else ["src/evenstride/integrations/torchft"]
