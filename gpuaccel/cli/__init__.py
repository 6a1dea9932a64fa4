"""The command line: train a model, list what kernels cost, look at the machine.

`main(argv)` runs one command line and returns its exit status; `doctor()` is the command of that
name for a notebook. Each command has a module of its own."""

from .doctor import Doctor, doctor
from .main import main

__all__ = ["Doctor", "doctor", "main"]
