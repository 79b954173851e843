"""`python -m gdp` is `gdp`."""

import sys

from gdp.cli import main

if __name__ == "__main__":
    sys.exit(main())
