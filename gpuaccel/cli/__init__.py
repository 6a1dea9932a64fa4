"""The command line: main."""
