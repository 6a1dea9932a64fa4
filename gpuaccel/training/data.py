"""Real text, tokens and batches, with nothing downloaded.

    dataset = make_dataset()             # the text of Python's standard library, as bytes
    batches = Batches(dataset.train, batch=8, T=128, seed=0)
    inputs, targets = next(batches)      # (8, 128) int64 each; targets are one token further on
    dataset.tokenizer.decode(inputs[0])

Text is a file, a folder, or by default the `.py` files of the standard library, which are on every
machine. Tokens are bytes (`ByteTokenizer`) or a byte-level BPE (`train_bpe`, kept in the cache).
Every twentieth document is for validation. `Batches` is deterministic, and resumes exactly.
"""

import hashlib
import os
import pathlib
import sysconfig
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

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


@dataclass(frozen=True)
class Corpus:
    """Text to train on.

    Attributes:
        documents: texts, at least one; none is empty.
        source: where the text is from, in words.
        bytes: length of all documents as UTF-8.
    """

    documents: list[str]
    source: str
    bytes: int

    def digest(self) -> str:
        """sha256 over the documents and where each ends."""
        total = hashlib.sha256()
        for document in self.documents:
            data = document.encode()
            total.update(len(data).to_bytes(8, "little"))
            total.update(data)
        return total.hexdigest()


def _files_below(folder, endings, skip=()):
    """All files below a folder, in the same order on every machine.

    Hidden folders, caches and folders named in `skip` are left out."""
    skipped = CACHES | set(skip)
    paths = []
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in skipped]
        paths += [pathlib.Path(parent, name) for name in files if name.endswith(endings)]
    return sorted(paths, key=lambda path: path.relative_to(folder).parts)


def _read_text(path, limit):
    """A file's text, at most `limit` bytes of it (cut at a character) if there is a limit."""
    try:
        with open(path, "rb") as file:
            data = file.read() if limit is None else file.read(limit + 1)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    cut = limit is not None and len(data) > limit
    data = data[:limit] if cut else data
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        if cut and error.reason == "unexpected end of data":
            return data[: error.start].decode("utf-8")
        raise DataError(
            f"{path} is not UTF-8 text: byte {data[error.start]:#04x} at offset {error.start} "
            f"({error.reason}); expected UTF-8, convert the file or leave it out"
        ) from error


def load_text(path: str | os.PathLike | None = None, *, max_bytes: int | None = None) -> Corpus:
    """Text of a file, a folder, or the standard library. A document is a file that is not empty.

    Args:
        path: a file of any name; a folder, of which `*.txt`, `*.md` and `*.py` are read recursively
            and sorted; None: the standard library.
        max_bytes: stop after that many bytes of text.

    Raises:
        DataError: for no such file or folder, no text in it, a file that cannot be read or is not
            UTF-8 (with the byte's offset).
        ArgumentError: for a max_bytes below 1.
    """
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
    size = 0
    for file in files:
        if max_bytes is not None and size >= max_bytes:
            break
        text = _read_text(file, None if max_bytes is None else max_bytes - size)
        if text:
            documents.append(text)
            size += len(text.encode())
    if not documents and root.is_file():
        raise DataError(f"{path} is empty; expected a file with UTF-8 text")
    if not documents:
        raise DataError(
            f"{root} holds no text; expected a folder with {', '.join(ENDINGS)} files that are "
            "not empty"
        )
    return Corpus(documents, source, size)


# ---- tokens --------------------------------------------------------------------------------------


def _as_bytes(text):
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"character {text[error.start]!r} at position {error.start} has no UTF-8 form; "
            "expected text without lone surrogates"
        ) from error


def _as_list(tokens, vocab_size):
    if hasattr(tokens, "reshape"):
        tokens = tokens.reshape(-1).tolist()
    else:
        tokens = [int(token) for token in tokens]
    for position, token in enumerate(tokens):
        if not 0 <= token < vocab_size:
            raise DataError(
                f"token {token} at position {position} is not in the vocabulary; "
                f"expected 0 to {vocab_size - 1}"
            )
    return tokens


class _TextTokenizer(Protocol):
    """What a tokenizer of one's own needs."""

    vocab_size: int

    def encode(self, text: str, /) -> Sequence[int] | np.ndarray:
        """The tokens of a text."""

    def decode(self, tokens: Any, /) -> str:
        """The text of an array, tensor or iterable of tokens."""


class ByteTokenizer:
    """One token per byte of UTF-8; nothing to train."""

    vocab_size = 256

    def encode(self, text: str) -> np.ndarray:
        """(N,) uint16, N the length of the text as UTF-8.

        Args:
            text: any text.
        """
        return np.frombuffer(_as_bytes(text), np.uint8).astype(np.uint16)

    def decode(self, tokens) -> str:
        """Text of an array, tensor or iterable of tokens; bytes that are no UTF-8 become U+FFFD.

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
        """(N,) uint16. Text is encoded in pieces of 262,144 characters, which no token crosses.

        Args:
            text: any text.
        """
        _as_bytes(text)
        return self.encode_all([text])[0]

    def encode_all(self, texts: list[str]) -> list[np.ndarray]:
        """`encode` of each text, several texts at a time on all cores.

        Args:
            texts: any texts.
        """
        pieces = [
            (index, text[start : start + PIECE])
            for index, text in enumerate(texts)
            for start in range(0, len(text), PIECE)
        ]
        parts = [[np.zeros(0, np.uint16)] for _ in texts]
        for start in range(0, len(pieces), 16):
            group = pieces[start : start + 16]
            encoded = self._tokenizer.encode_batch_fast(
                [piece for _, piece in group], add_special_tokens=False
            )
            for (index, _), result in zip(group, encoded):
                parts[index].append(np.array(result.ids, np.uint16))
        return [np.concatenate(part) for part in parts]

    def decode(self, tokens) -> str:
        """Text of an array, tensor or iterable of tokens; bytes that are no UTF-8 become U+FFFD.

        Args:
            tokens: whole numbers.
        """
        return self._tokenizer.decode(_as_list(tokens, self.vocab_size), skip_special_tokens=False)


def train_bpe(corpus: Corpus, vocab_size: int = 32768, cache: bool = True) -> BPETokenizer:
    """Train a byte-level BPE on a text.

    Args:
        corpus: what load_text returned.
        vocab_size: 256 to 65,536; the tokenizer has fewer entries if too few pairs repeat.
        cache: read a tokenizer that was trained on this text with this size before. Training takes
            about 7 s for the standard library on two cores.

    Raises:
        ArgumentError: for a vocab_size out of range.
    """
    if not 256 <= vocab_size <= 65536:
        raise ArgumentError(
            f"vocab_size is {vocab_size}; expected 256 (the bytes) to 65536 (what fits uint16)"
        )

    def train():
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            show_progress=False,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        )
        tokenizer.train_from_iterator(corpus.documents, trainer, length=len(corpus.documents))
        return tokenizer.to_str().encode()

    load = lambda content: BPETokenizer(content.decode())
    if not cache:
        return load(train())
    return from_cache("bpe", f"{corpus.digest()}-{vocab_size}.json", train, load)


# ---- datasets ------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class TokenDataset:
    """A corpus as tokens. `train` and `val` share no text.

    Attributes:
        train: (N,) int32, documents one after another.
        val: (M,) int32; shares no text with `train`.
        vocab_size: number of different tokens.
        tokenizer: made the tokens, and decodes them.
        source: where the text came from, in words.
    """

    train: torch.Tensor
    val: torch.Tensor
    vocab_size: int
    tokenizer: _TextTokenizer
    source: str


def _split(documents):
    """(train, val) of a list of token arrays.

    Every twentieth document is for validation, if that gives from a fiftieth to a fifth of the
    tokens; otherwise the last tenth of all tokens is."""
    val = documents[VALIDATION_EVERY - 1 :: VALIDATION_EVERY]
    total = sum(map(len, documents))
    if total / 50 <= sum(map(len, val)) <= total / 5:
        train = [
            document for index, document in enumerate(documents) if (index + 1) % VALIDATION_EVERY
        ]
        return np.concatenate(train), np.concatenate(val)
    tokens = np.concatenate(documents)
    cut = len(tokens) * 9 // 10
    return tokens[:cut], tokens[cut:]


def _unpacked(content, count):
    """The tokens of each of `count` documents: the content is their lengths, then all tokens."""
    lengths = np.frombuffer(content, "<i8", count)
    tokens = np.frombuffer(content, "<u2", offset=lengths.nbytes)
    if lengths.min() < 0 or lengths.sum() != len(tokens):
        raise ValueError(f"found {len(tokens)} tokens; expected {lengths.sum()}")
    return np.split(tokens, np.cumsum(lengths)[:-1])


def make_dataset(
    path: str | os.PathLike | None = None,
    tokenizer: NamedTokenizer | _TextTokenizer = "byte",
    max_bytes: int | None = None,
    vocab_size: int = 32768,
) -> TokenDataset:
    """Read a text as tokens, split into training and validation.

    Args:
        path: a text file, a folder of texts, or None: the standard library. See load_text.
        tokenizer: "byte" (256 tokens, the default), "bpe" (trained on this text, up to `vocab_size`
            tokens), or a tokenizer you have, with encode and decode.
        max_bytes: stop after that many bytes of text. Default: all of it.
        vocab_size: of a "bpe" that is trained, 256 to 65,536.

    Returns:
        A TokenDataset with `train` and `val`, int32 tokens.

    Raises:
        ArgumentError: for what is no tokenizer, a vocab_size out of range, and max_bytes below 1.
        DataError: for no such file or folder, no text in it, and a file that is not UTF-8.

    Example:
        >>> import pathlib
        >>> size = pathlib.Path("corpus.txt").write_text("to be, or not to be. " * 100)
        >>> data = ga.make_dataset("corpus.txt")
        >>> len(data.train), len(data.val), data.vocab_size
        (1890, 210, 256)
    """
    if isinstance(tokenizer, str):
        check_choice(
            "tokenizer", tokenizer, NamedTokenizer, ", or an object with encode and decode"
        )
    corpus = load_text(path, max_bytes=max_bytes)
    if isinstance(tokenizer, str):
        tokenizer = ByteTokenizer() if tokenizer == "byte" else train_bpe(corpus, vocab_size)
    if isinstance(tokenizer, BPETokenizer):
        key = hashlib.sha256((corpus.digest() + tokenizer.to_json()).encode()).hexdigest()

        def encode():
            arrays = tokenizer.encode_all(corpus.documents)
            lengths = np.array(list(map(len, arrays)), "<i8")
            return lengths.tobytes() + np.concatenate(arrays).astype("<u2").tobytes()

        load = lambda content: _unpacked(content, len(corpus.documents))
        documents = from_cache("bpe", f"{key}.tokens", encode, load)
    else:
        documents = [tokenizer.encode(document) for document in corpus.documents]
    train, val = (torch.from_numpy(tokens.astype(np.int32)) for tokens in _split(documents))
    return TokenDataset(train, val, tokenizer.vocab_size, tokenizer, corpus.source)


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


def _gather(tokens, indices, T, device, pin=False) -> tuple[torch.Tensor, torch.Tensor]:
    """(inputs, targets) of the sequences with these indices, each (len(indices), T) int64.

    Both in one copy, which to a GPU is from pinned memory."""
    device = torch.device(device)
    positions = indices.view(1, -1, 1) * T + torch.arange(T) + torch.tensor([0, 1]).view(2, 1, 1)
    both = tokens[positions].long()
    if pin or device.type == "cuda":
        both = both.pin_memory()
    inputs, targets = both.to(device, non_blocking=True)
    return inputs, targets


def _check_rank(rank, ranks):
    if ranks < 1 or not 0 <= rank < ranks:
        raise ArgumentError(f"rank is {rank} of {ranks}; expected 0 to {max(ranks, 1) - 1}")


def shard(
    batches: Iterable, rank: int, ranks: int, *, seed: int | None = None, epoch: int = 0
) -> list:
    """Rank `rank`'s share of a list of batches (or files, or anything): every `ranks`-th of them.

    The shares are disjoint and complete, and equally long: a rank that has one less has None at the
    end, with which it takes part in a step without a batch.

    Args:
        batches: any iterable.
        rank: from 0 to ranks - 1.
        ranks: number of shares.
        seed: shuffle them first, with seed + epoch; None, the default: in their order.
        epoch: number of the epoch.

    Raises:
        DataError: when there are fewer batches than ranks.
    """
    _check_rank(rank, ranks)
    batches = list(batches)
    if len(batches) < ranks:
        raise DataError(f"{len(batches)} batches for {ranks} ranks; expected at least one for each")
    if seed is not None:
        generator = torch.Generator().manual_seed(seed + epoch)
        order = torch.randperm(len(batches), generator=generator)
        batches = [batches[i] for i in order.tolist()]
    share = batches[rank::ranks]
    longest = -(-len(batches) // ranks)
    return share + [None] * (longest - len(share))


class Batches:
    """Endless, deterministic batches of sequences of T tokens, shuffled anew in every epoch.

    Sequences do not overlap, and an epoch visits each once: each token is a target once. Only the
    last, incomplete sequence is left out. A batch at the end of an epoch goes on into the next.

    The position is the same on every rank.

    Args:
        tokens: (N,) integer tensor on the CPU.
        batch: sequences per batch, 1 or more.
        T: tokens per sequence, 1 or more.
        seed: seed + epoch seeds the shuffle.
        device: where batches are copied, without waiting; default: the CPU.
        pin: leave CPU batches in pinned memory, for copies of your own.
        rank, ranks: this rank's share, a batch of each step. All ranks visit each sequence once.
        micro_batches: of a step on each rank. They go to the ranks in turn, so that a step of all
            ranks depends on ranks * micro_batches only, and a run can go on with another number of
            ranks.

    Raises:
        DataError: when there is not one whole sequence (T + 1 tokens), or an epoch has fewer
            batches than there are ranks.
        ArgumentError: for a batch below 1, and for one that micro_batches and ranks do not divide
            into equal parts.

    Example:
        >>> batches = ga.Batches(torch.arange(101), batch=2, T=10, device=ga.default_device())
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
        pin: bool = False,
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
        self.pin = pin
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
        self.tokens_per_batch = batch * T
        self._sha256: str | None = None
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
            if self.index == self.sequences:
                self._go_to(self.epoch + 1, 0)
            part = self._order[self.index : self.index + missing]
            parts.append(part)
            self.index += len(part)
            missing -= len(part)
        indices = torch.cat(parts)
        if self.ranks > 1:
            indices = indices.view(self.micro_batches, self.ranks, -1)[:, self.rank].flatten()
        return _gather(self.tokens, indices, self.T, self.device, self.pin)

    @property
    def sha256(self) -> str:
        """sha256 of the tokens as little-endian int64; computed once, when it is first needed."""
        if self._sha256 is None:
            total = hashlib.sha256()
            for piece in self.tokens.split(1 << 20):
                total.update(piece.numpy().astype("<i8").data)
            self._sha256 = total.hexdigest()
        return self._sha256

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
            DataError: with nothing changed, where the text or T was another, or the position is
                none of this text. Warns where the state has no hash of its text: before version 0.2
                it had none.
        """
        for key in ("sequences", "T"):
            stored = state.get(key)
            expected = getattr(self, key)
            if stored != expected:
                raise DataError(
                    f"the data position has {key}={stored}, expected {key}={expected}: "
                    "it was taken on another text or with another T"
                )
        if not (state["epoch"] >= 0 and 0 <= state["index"] <= self.sequences):
            raise DataError(
                f"the data position is epoch {state['epoch']}, index {state['index']}; "
                f"expected an epoch of at least 0 and an index of 0 to {self.sequences}"
            )
        if "sha256" not in state:
            warnings.warn(
                "the data position has no hash of its text, because an older version wrote it: "
                "nothing can tell whether this is the text of that run",
                stacklevel=2,
            )
        elif state["sha256"] != self.sha256:
            raise DataError(
                f"the data position was taken on another text of as many tokens: sha256 "
                f"{state['sha256']}, expected {self.sha256}"
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
        tokens: (N,) integers on the CPU.
        batch: sequences per batch, 1 or more.
        T: tokens per sequence.
        limit: only the first ones.
        device: where batches lie. Default: the CPU.

    Raises:
        DataError: when there is no whole sequence (T + 1 tokens).
        ArgumentError: for a batch below 1.
    """
    if batch < 1:
        raise ArgumentError(f"batch is {batch}; expected at least 1")
    count = _sequence_count(tokens, T)
    whole = count // batch * batch or count
    return [
        _gather(tokens, indices, T, device) for indices in torch.arange(whole).split(batch)[:limit]
    ]
