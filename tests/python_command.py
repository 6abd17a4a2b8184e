"""How tests start Python."""

import sys

# Warnings are errors.
STRICT = (sys.executable, '-W', 'error')
