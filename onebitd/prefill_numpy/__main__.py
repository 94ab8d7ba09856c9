"""python -m onebitd.prefill_numpy."""

import sys

from onebitd.prefill_numpy.program import main

sys.exit(main())
