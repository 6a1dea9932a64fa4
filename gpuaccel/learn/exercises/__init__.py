"""Exercises of the notebooks: exercises (shows and checks them), and one module of puzzles per notebook or two."""
