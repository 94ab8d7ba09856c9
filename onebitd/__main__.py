"""`python -m onebitd` is `onebitd`."""

import sys

from onebitd.surfaces.start import main

if __name__ == "__main__":
    sys.exit(main())
