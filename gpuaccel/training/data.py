"""Real text, tokens and batches, with nothing downloaded.

    dataset = make_dataset()             # the text of Python's standard library, as bytes
    batches = Batches(dataset.train, batch=8, T=128, seed=0)
    inputs, targets = next(batches)      # (8, 128) int64 each; targets are one token further on
    dataset.tokenizer.decode(inputs[0])

Text is a file, a folder, or by default the `.py` files of the standard library, which are on every
machine. Tokens are bytes (`ByteTokenizer`) or a byte-level BPE, which is trained on the text and
kept in the cache. `Batches` is deterministic, and resumes exactly.
"""

import functools
import hashlib
import os
import pathlib
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from ..errors import ArgumentError, DataError, check_choice
from ..files import from_cache

ENDINGS = (".txt", ".md", ".py")
NamedTokenizer = Literal["byte", "bpe"]
CACHES = {"__pycache__"}
# Folders of the standard library's that are not read.
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
VALIDATION_EVERY = 20
# Characters that are encoded at once: a file of any size needs little memory.
PIECE = 1 << 18


# ---- text ----------------------------------------------------------------------------------------


def _files_below(folder, endings, skip=()) -> list[pathlib.Path]:
    """All files below a folder, in the same order on every machine.

    Hidden folders, caches and folders named in `skip` are left out."""
    skipped = CACHES | set(skip)
    paths = []
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in skipped]
        paths += [pathlib.Path(parent, name) for name in files if name.endswith(endings)]
    return sorted(paths, key=lambda path: path.relative_to(folder).parts)


def _read_text(path: pathlib.Path) -> str:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 text: byte {data[error.start]:#04x} at offset {error.start} "
            f"({error.reason}); expected UTF-8, convert the file or leave it out"
        ) from error


def load_text(
    path: str | os.PathLike | None, max_bytes: int | None = None
) -> tuple[list[str], str]:
    """The documents of a file, a folder, or the standard library, and in words where they are from.

    A document is a file that is not empty. max_bytes cuts at a whole character."""
    if max_bytes is not None and max_bytes < 1:
        raise ArgumentError(f"max_bytes is {max_bytes}; expected None or at least 1")
    if path is None:
        root = pathlib.Path(sysconfig.get_paths()["stdlib"])
        files = _files_below(root, (".py",), NOT_LIBRARY)
        source = "the sources of Python's standard library"
    else:
        root = pathlib.Path(path).expanduser()
        source = str(path)
        if not root.exists():
            raise DataError(
                f"{path} does not exist; expected a text file, or a folder with "
                f"{', '.join(ENDINGS)} files"
            )
        files = _files_below(root, ENDINGS) if root.is_dir() else [root]
    documents = []
    left = max_bytes
    for file in files:
        text = _read_text(file)
        if left is not None:
            data = text.encode()[:left]
            left -= len(data)
            text = data.decode(errors="ignore")
        if text:
            documents.append(text)
        if left == 0:
            break
    if not documents and root.is_file():
        raise DataError(f"{path} is empty; expected a file with UTF-8 text")
    if not documents:
        raise DataError(
            f"{root} holds no text; expected a folder with {', '.join(ENDINGS)} files that are "
            "not empty"
        )
    return documents, source


# ---- tokens --------------------------------------------------------------------------------------


def _as_list(tokens, vocab_size: int) -> list[int]:
    tokens = torch.as_tensor(tokens).flatten().tolist()
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise DataError(
                f"token {token} is not in the vocabulary; expected 0 to {vocab_size - 1}"
            )
    return tokens


class ByteTokenizer:
    """One token per byte of UTF-8; nothing to train."""

    vocab_size = 256

    def encode(self, text: str) -> np.ndarray:
        """(N,) uint16, N the length of the text as UTF-8.

        Args:
            text: any text.
        """
        return np.frombuffer(text.encode(), np.uint8).astype(np.uint16)

    def decode(self, tokens) -> str:
        """Text of a list, array or tensor of tokens; bytes that are no UTF-8 become U+FFFD.

        Args:
            tokens: whole numbers below 256.
        """
        return bytes(_as_list(tokens, 256)).decode("utf-8", errors="replace")


class BPETokenizer:
    """Byte-level BPE of the `tokenizers` library: any text has tokens, which decode to that text.

    Args:
        description: what `to_json()` of another one returned.
    """

    def __init__(self, description: str):
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_str(description)
        self.vocab_size = self._tokenizer.get_vocab_size()

    def to_json(self) -> str:
        """All of the tokenizer as text."""
        return self._tokenizer.to_str()

    def encode(self, text: str) -> np.ndarray:
        """(N,) uint16, on all cores. No token crosses the end of a piece of 262,144 characters.

        Args:
            text: any text.
        """
        pieces = [text[start : start + PIECE] for start in range(0, len(text), PIECE)]
        parts = [np.zeros(0, np.uint16)]
        for start in range(0, len(pieces), 16):
            encoded = self._tokenizer.encode_batch_fast(
                pieces[start : start + 16], add_special_tokens=False
            )
            parts += [np.array(result.ids, np.uint16) for result in encoded]
        return np.concatenate(parts)

    def decode(self, tokens) -> str:
        """Text of a list, array or tensor of tokens; bytes that are no UTF-8 become U+FFFD.

        Args:
            tokens: whole numbers below vocab_size.
        """
        return self._tokenizer.decode(_as_list(tokens, self.vocab_size), skip_special_tokens=False)


def train_bpe(documents: list[str], vocab_size: int) -> BPETokenizer:
    """One that is trained on texts; it has fewer tokens where too few pairs repeat."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(documents, trainer, length=len(documents))
    return BPETokenizer(tokenizer.to_str())


# ---- datasets ------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class TokenDataset:
    """A text as tokens. `train` and `val` share no text.

    Attributes:
        train: (N,) int32, documents one after another.
        val: (M,) int32.
        vocab_size: number of different tokens.
        tokenizer: made the tokens, and decodes them.
        source: where the text came from, in words.
    """

    train: torch.Tensor
    val: torch.Tensor
    vocab_size: int
    tokenizer: ByteTokenizer | BPETokenizer
    source: str


def _split(documents: list[str]) -> tuple[str, str]:
    """The texts for training and for validation.

    Every twentieth document is for validation, if that gives from a fiftieth to a fifth of the
    characters; otherwise the last tenth of all characters is."""
    val = documents[VALIDATION_EVERY - 1 :: VALIDATION_EVERY]
    total = sum(map(len, documents))
    if total / 50 <= sum(map(len, val)) <= total / 5:
        train = [text for i, text in enumerate(documents, 1) if i % VALIDATION_EVERY]
        return "".join(train), "".join(val)
    text = "".join(documents)
    return text[: total * 9 // 10], text[total * 9 // 10 :]


def _bpe_tokens(documents: list[str], vocab_size: int):
    """(tokenizer, tokens for training, for validation), from the cache if they are there.

    Both take seconds. A text and a size have one entry."""

    def make() -> bytes:
        tokenizer = train_bpe(documents, vocab_size)
        train, val = (tokenizer.encode(text).astype("<u2").tobytes() for text in _split(documents))
        return b"%s\n%d\n%s%s" % (tokenizer.to_json().encode(), len(train), train, val)

    def load(content: bytes):
        description, size, tokens = content.split(b"\n", 2)
        train, val = tokens[: int(size)], tokens[int(size) :]
        tokenizer = BPETokenizer(description.decode())
        return tokenizer, np.frombuffer(train, "<u2"), np.frombuffer(val, "<u2")

    digest = hashlib.sha256()
    for document in documents:
        data = document.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return from_cache("bpe", f"{digest.hexdigest()}-{vocab_size}", make, load)


def make_dataset(
    path: str | os.PathLike | None = None,
    tokenizer: NamedTokenizer = "byte",
    max_bytes: int | None = None,
    vocab_size: int = 32768,
) -> TokenDataset:
    """Read a text as tokens, split into training and validation.

    For tokens of another tokenizer make the tensor yourself: Batches takes any.

    Args:
        path: a text file of any name; a folder, of which `*.txt`, `*.md` and `*.py` are read
            recursively and sorted; or None, the default: the standard library.
        tokenizer: "byte" (256 tokens, the default) or "bpe" (trained on this text, up to
            `vocab_size` tokens; the first time it takes seconds).
        max_bytes: stop after that many bytes of text. Default: all of it.
        vocab_size: of a "bpe" that is trained, 256 to 65,536.

    Returns:
        A TokenDataset with `train` and `val`, int32 tokens.

    Raises:
        ArgumentError: for an unknown tokenizer, a vocab_size out of range, and max_bytes below 1.
        DataError: for no such file or folder, no text in it, and a file that cannot be read or is
            not UTF-8 (with the byte's offset).

    Example:
        >>> import pathlib
        >>> size = pathlib.Path("corpus.txt").write_text("to be, or not to be. " * 100)
        >>> data = ga.training.make_dataset("corpus.txt")
        >>> len(data.train), len(data.val), data.vocab_size
        (1890, 210, 256)
    """
    check_choice("tokenizer", tokenizer, NamedTokenizer)
    if not 256 <= vocab_size <= 65536:
        raise ArgumentError(
            f"vocab_size is {vocab_size}; expected 256 (the bytes) to 65536 (what fits uint16)"
        )
    documents, source = load_text(path, max_bytes)
    reader: ByteTokenizer | BPETokenizer = ByteTokenizer()
    if tokenizer == "bpe":
        reader, *arrays = _bpe_tokens(documents, vocab_size)
    else:
        arrays = [reader.encode(text) for text in _split(documents)]
    train, val = (torch.from_numpy(tokens.astype(np.int32)) for tokens in arrays)
    return TokenDataset(train, val, reader.vocab_size, reader, source)


# ---- batches -------------------------------------------------------------------------------------


def _sequence_count(tokens: torch.Tensor, T: int) -> int:
    """How many sequences of T inputs there are.

    Sequence i has inputs [i*T, (i+1)*T), and targets one token further on."""
    if tokens.dim() != 1 or tokens.is_floating_point() or tokens.device.type != "cpu":
        raise ArgumentError(
            f"tokens are {tokens.dtype} {list(tokens.shape)} on {tokens.device}; "
            "expected a 1-D integer tensor on the CPU"
        )
    if T < 1:
        raise ArgumentError(f"T is {T}; expected at least 1")
    if len(tokens) < T + 1:
        raise DataError(
            f"too little text: {len(tokens)} tokens, but one sequence of T={T} needs {T + 1}"
        )
    return (len(tokens) - 1) // T


def _gather(tokens, indices, T, device) -> tuple[torch.Tensor, torch.Tensor]:
    """(inputs, targets) of the sequences with these indices, each (len(indices), T) int64.

    Both in one copy, which to a GPU is from pinned memory."""
    device = torch.device(device)
    positions = indices.view(1, -1, 1) * T + torch.arange(T) + torch.tensor([0, 1]).view(2, 1, 1)
    both = tokens[positions].long()
    if device.type == "cuda":
        both = both.pin_memory()
    inputs, targets = both.to(device, non_blocking=True)
    return inputs, targets


def _check_rank(rank, ranks):
    if ranks < 1 or not 0 <= rank < ranks:
        raise ArgumentError(f"rank is {rank} of {ranks}; expected 0 to {max(ranks, 1) - 1}")


def shard(batches: Iterable, rank: int, ranks: int, *, seed: int | None = None) -> list:
    """Rank `rank`'s share of a list of batches (or files, or anything): every `ranks`-th of them.

    The shares are disjoint and complete, and equally long: a rank that has one less has None at the
    end, with which it takes part in a step without a batch.

    Args:
        batches: any iterable.
        rank: from 0 to ranks - 1.
        ranks: number of shares.
        seed: shuffle them first, with this seed, such as the number of the epoch; None, the
            default: in their order.

    Raises:
        DataError: when there are fewer batches than ranks.
    """
    _check_rank(rank, ranks)
    batches = list(batches)
    if len(batches) < ranks:
        raise DataError(f"{len(batches)} batches for {ranks} ranks; expected at least one for each")
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(batches), generator=generator)
        batches = [batches[i] for i in order.tolist()]
    share = batches[rank::ranks]
    longest = -(-len(batches) // ranks)
    return share + [None] * (longest - len(share))


class Batches:
    """Endless, deterministic batches of sequences of T tokens, shuffled anew in every epoch.

    Sequences do not overlap, and an epoch visits each once: except for the first token and an
    incomplete last sequence, each token is a target once. next() returns (inputs, targets), int64,
    each (batch, T); targets are the inputs shifted by one. A batch at the end of an epoch
    continues in the next.

    The position is the same on every rank.

    Args:
        tokens: (N,) integer tensor on the CPU.
        batch: sequences per batch of a rank, 1 or more.
        T: tokens per sequence, 1 or more.
        seed: seed + epoch seeds the shuffle.
        device: where batches are copied, without waiting; default: the CPU.
        rank: this rank, from 0.
        ranks: number of ranks. Together, they visit each sequence once per epoch.
        micro_batches: of a step on each rank. They go to the ranks in turn, so that a step of all
            ranks depends on ranks * micro_batches only, and a run can continue with another number
            of ranks.

    Raises:
        DataError: when there is not one whole sequence (T + 1 tokens), or an epoch has fewer
            batches than there are ranks.
        ArgumentError: for a batch below 1, and for one that micro_batches and ranks do not divide
            into equal parts.

    Example:
        >>> tokens, device = torch.arange(101), ga.default_device()
        >>> batches = ga.training.Batches(tokens, batch=2, T=10, device=device)
        >>> inputs, targets = next(batches)
        >>> inputs.shape, bool((targets == inputs + 1).all())
        (torch.Size([2, 10]), True)
        >>> batches.state_dict()["index"]
        2
    """

    def __init__(
        self,
        tokens: torch.Tensor,
        batch: int,
        T: int,
        seed: int = 0,
        device: str | torch.device = "cpu",
        rank: int = 0,
        ranks: int = 1,
        micro_batches: int = 1,
    ):
        if batch < 1:
            raise ArgumentError(f"batch is {batch}; expected at least 1")
        _check_rank(rank, ranks)
        if micro_batches < 1 or batch % micro_batches and ranks > 1:
            raise ArgumentError(
                f"a batch of {batch} sequences in {micro_batches} micro-batches; expected equal "
                f"ones on {ranks} ranks"
            )
        self.tokens = tokens
        self.batch = batch
        self.T = T
        self.seed = seed
        self.device = device
        self.rank = rank
        self.ranks = ranks
        self.micro_batches = micro_batches
        self.sequences = _sequence_count(tokens, T)  # per epoch
        if self.sequences < ranks * batch and ranks > 1:
            raise DataError(
                f"too little text: an epoch has {self.sequences} sequences of T={T}, "
                f"{self.sequences // batch} batches of {batch}, for {ranks} ranks; expected at "
                "least one batch for each"
            )
        self._go_to(epoch=0, index=0)

    def _go_to(self, epoch, index):
        generator = torch.Generator().manual_seed(self.seed + epoch)
        self.epoch = epoch
        self.index = index  # sequences of this epoch that are done
        self._order = torch.randperm(self.sequences, generator=generator)

    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(inputs, targets), each (batch, T) int64 on `device`."""
        parts = []
        missing = self.batch * self.ranks
        while missing:
            if self.index >= self.sequences:
                self._go_to(self.epoch + 1, 0)
            part = self._order[self.index : self.index + missing]
            parts.append(part)
            self.index += len(part)
            missing -= len(part)
        indices = torch.cat(parts)
        if self.ranks > 1:
            indices = indices.view(self.micro_batches, self.ranks, -1)[:, self.rank].flatten()
        return _gather(self.tokens, indices, self.T, self.device)

    @functools.cached_property
    def sha256(self) -> str:
        """sha256 of the tokens as little-endian int64; computed when it is first needed."""
        total = hashlib.sha256()
        for piece in self.tokens.split(1 << 20):
            total.update(piece.numpy().astype("<i8").data)
        return total.hexdigest()

    def state_dict(self) -> dict:
        """The position: epoch, sequences done in it by all ranks, and what they depend on.

        Batch size and number of ranks may change at a resume."""
        return {
            "epoch": self.epoch,
            "index": self.index,
            "seed": self.seed,
            "sequences": self.sequences,
            "T": self.T,
            "sha256": self.sha256,
        }

    def load_state_dict(self, state: dict):
        """Continue where `state_dict()` was taken.

        Args:
            state: what state_dict() returned.

        Raises:
            DataError: with nothing changed, where the text or T was another.
        """
        for key in ("sequences", "T", "sha256"):
            stored, expected = state.get(key), getattr(self, key)
            if stored != expected:
                raise DataError(
                    f"the data position has {key}={stored}, expected {key}={expected}: "
                    "it was taken on another text or with another T"
                )
        self.seed = state["seed"]
        self._go_to(state["epoch"], state["index"])


def val_batches(
    tokens: torch.Tensor,
    batch: int,
    T: int,
    limit: int | None = None,
    device: str | torch.device = "cpu",
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The batches of a text in order: (inputs, targets), each (batch, T) int64 on `device`.

    All have `batch` sequences, and what is left at the end is not used; a text of fewer sequences
    gives one smaller batch.

    Args:
        tokens: (N,) integers on the CPU, at least T + 1.
        batch: sequences per batch, 1 or more.
        T: tokens per sequence.
        limit: only the first ones.
        device: where batches lie. Default: the CPU.

    Raises:
        ArgumentError: for a batch below 1.
    """
    if batch < 1:
        raise ArgumentError(f"batch is {batch}; expected at least 1")
    count = _sequence_count(tokens, T)
    whole = count // batch * batch or count
    return [
        _gather(tokens, indices, T, device) for indices in torch.arange(whole).split(batch)[:limit]
    ]
