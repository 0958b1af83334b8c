"""``python -m perfbench``."""

import sys

from perfbench.commands import main

sys.exit(main())
