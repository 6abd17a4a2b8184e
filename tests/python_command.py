"""How tests start Python."""

import sys

# Warnings are errors, but for a program that another process is just writing
# into the cache: it is compiled once more.
STRICT = (
    *(sys.executable, '-W', 'error'),
    *('-W', 'ignore:Error reading persistent compilation cache'),
)
