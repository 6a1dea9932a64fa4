"""What the commands' parsers share: a subcommand with its help, and numbers with a lower bound."""

import argparse
import functools


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


def at_least(least, kind=int):
    """A `type=` for add_argument: a finite number of this kind that is not below `least`."""

    def parse(text):
        value = kind(text)
        if not least <= value < float("inf"):
            raise argparse.ArgumentTypeError(f"is {text}, expected at least {least}")
        return value

    # argparse names the type in its message about text that is no number
    parse.__name__ = "whole number" if kind is int else "number"
    return parse
