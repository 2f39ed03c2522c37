"""`python -m piecewise_backend` is the command `piecewise`."""

import sys

from piecewise_backend.command_line import main

sys.exit(main())
