"""Run the command line: ``python -m rematplan``."""

import sys

from rematplan.cli import main

sys.exit(main())
