"""`python -m gpuaccel` is the command line, the same as `gpuaccel`."""

import sys

from .cli import main

sys.exit(main())
