"""``python -m nsa``."""

import sys

from nsa.cli import main

sys.exit(main())
