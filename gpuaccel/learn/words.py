"""The words that the network of the notebooks learns: those in Python's standard library.

inputs, targets = ga.learn.words(device)      # four letters -> the next one
"""

import pathlib
import re
import sysconfig

import torch
from torch import Tensor

# The dot stands before and behind a word.
LETTERS = ".abcdefghijklmnopqrstuvwxyz"


def words(device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Every four letters of every word, and the letter behind them.

    Args:
        device: of the tensors.

    Returns:
        Two int64 tensors, inputs (N, 4) and targets (N), of indices into LETTERS; N is about
        60,000.

    Example:
        >>> inputs, targets = ga.learn.words()
        >>> inputs.shape[1], len(inputs) == len(targets)
        (4, True)
    """
    library = pathlib.Path(sysconfig.get_paths()["stdlib"]).glob("*.py")
    text = " ".join(path.read_text(errors="ignore") for path in library)
    found = sorted(set(re.findall(r"\b[a-z]{4,10}\b", text)))
    four = [("...." + word)[k : k + 4] for word in found for k in range(len(word) + 1)]
    inputs = torch.tensor([[LETTERS.index(c) for c in part] for part in four], device=device)
    after = torch.tensor([LETTERS.index(c) for word in found for c in word + "."], device=device)
    return inputs, after
