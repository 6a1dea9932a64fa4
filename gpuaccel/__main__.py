"""`python -m gpuaccel` and `gpuaccel` are the command line.

Ctrl-C is handled before torch is imported, which takes seconds."""

import os
import signal
import sys


def main() -> int:
    """Run the command line of sys.argv and return its exit status."""
    # Under nohup, and in a script's background, SIGINT is ignored, and stays so.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _stop)
    from .cli import main

    return main()


def _stop(*_):
    """End at once: an exception would be caught by what happens to be imported."""
    print("gpuaccel: stopped", file=sys.stderr, flush=True)
    os._exit(128 + signal.SIGINT)


if __name__ == "__main__":
    sys.exit(main())
