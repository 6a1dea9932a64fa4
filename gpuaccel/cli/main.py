"""The command line: `gpuaccel train | kernels | doctor`, a module each.

    $ gpuaccel doctor                                     # what runs here, and why
    $ gpuaccel kernels --arch sm_90                       # registers, shared memory, spills; no GPU
    $ gpuaccel train --model tiny --steps 200             # real text, progress, checkpoints, sample
    $ gpuaccel train --model tiny --steps 200 --resume    # resumes a killed run bit for bit
    $ gpuaccel train --nproc 2                            # two ranks of this machine
    $ torchrun --nproc-per-node 8 -m gpuaccel train       # the ranks that torchrun starts

Exit status: 0 done; 1 an error that the user can mend (one line on stderr), or a problem that
`doctor` found; 2 wrong usage; 130 stopped with Ctrl-C, 143 with SIGTERM (`train`: after the running
step, with a checkpoint).
"""

import argparse
import os
import sys
import warnings

from .. import __version__
from ..errors import GpuaccelError
from .doctor import add_parser as add_doctor
from .kernels import add_parser as add_kernels
from .signals import INTERRUPTED, StopSignals
from .train import add_parser as add_train


def main(argv=None) -> int:
    """Run one command line (default: sys.argv) and return its exit status.

    Args:
        argv: the words behind `gpuaccel`; None: those of this process.
    """
    with StopSignals() as signals:
        try:
            status = _run(argv)
        except KeyboardInterrupt as stop:
            print(f"gpuaccel: {str(stop) or 'stopped'}", file=sys.stderr)
            return signals.status
    # ranks that were stopped do not know which signal their parent has got
    return signals.status if status == INTERRUPTED else status


def _run(argv) -> int:
    try:
        args = _parser().parse_args(argv)
        args.words = ["gpuaccel", *(sys.argv[1:] if argv is None else argv)]
    except SystemExit as stop:
        # argparse has printed its message
        return int(stop.code or 0)
    if hasattr(sys.stdout, "reconfigure"):
        # a sample may hold characters that the terminal cannot show
        sys.stdout.reconfigure(errors="replace")
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: print(f"gpuaccel: {message}", file=sys.stderr)
        try:
            return args.run(args)
        except GpuaccelError as error:
            print(f"gpuaccel: {error}", file=sys.stderr)
            return 1
        except BrokenPipeError:  # `gpuaccel kernels | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        except OSError as error:
            print(f"gpuaccel: {error}", file=sys.stderr)
            return 1
        except RuntimeError as error:
            # pathlib's, of ~name
            if "home directory" not in str(error):
                raise
            print("gpuaccel: a path begins with ~ and no such user is known", file=sys.stderr)
            return 1


def _parser():
    parser = argparse.ArgumentParser(
        prog="gpuaccel", description="Train on real text, and look at what runs and why."
    )
    parser.add_argument("--version", action="version", version=f"gpuaccel {__version__}")
    commands = parser.add_subparsers(metavar="command", required=True)
    for add_command in (add_train, add_kernels, add_doctor):
        add_command(commands)
    return parser
