"""What the commands' parsers share: a subcommand with its help, numbers with bounds, and paths."""

import argparse
import functools
import math


def add_command(commands, name, run, summary):
    """Add subcommand `name`, which calls run(args) and returns its exit status.

    commands: what ArgumentParser.add_subparsers() returned. summary: one line, for the help.
    Returns the subcommand's parser."""
    parser = commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        formatter_class=functools.partial(argparse.HelpFormatter, max_help_position=30),
    )
    parser.set_defaults(run=run)
    return parser


def path(text):
    """A `type=` for add_argument: text that may be a path."""
    if not text or "\0" in text:
        raise argparse.ArgumentTypeError(f"is {text!r}; expected a path")
    return text


def number(least, most=None, kind=int):
    """A `type=` for add_argument: a finite number of this kind, from `least` to `most`."""
    word = "a whole number" if kind is int else "a number"
    bounds = f"of at least {least}" if most is None else f"from {least} to {most}"

    def parse(text):
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not least <= value < math.inf or (most is not None and value > most):
            raise argparse.ArgumentTypeError(f"is {text!r}; expected {word} {bounds}")
        return value

    return parse
