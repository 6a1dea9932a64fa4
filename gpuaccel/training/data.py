"""Real text, tokens and batches, with nothing downloaded.

    >>> dataset = make_dataset()                       # Python's own standard library as text, one token per byte
    >>> batches = Batches(dataset.train, batch=8, T=128, seed=0)
    >>> inputs, targets = next(batches)                # (8, 128) int64 each; targets are inputs moved on by one token
    >>> dataset.tokenizer.decode(inputs[0])

Text comes from a file, a folder, or by default from the `.py` files of the standard library, there on every machine.
Tokens are bytes (`ByteTokenizer`) or a byte-level BPE (`train_bpe`, kept in the cache). Every twentieth document is for
validation. `Batches` is deterministic and resumes at the very window where it stopped.
"""

import hashlib
import os
import pathlib
import sysconfig
import warnings
from dataclasses import dataclass

import numpy as np
import torch

from ..backends import cache_dir
from ..errors import ArgumentError, DataError
from ..files import written_aside

ENDINGS = (".txt", ".md", ".py")
CACHES = {"__pycache__"}
NOT_LIBRARY = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
}  # skipped in the standard library
VALIDATION_EVERY = 20
PIECE = 1 << 18  # characters encoded at once, so that a file of any size needs little memory


# ---- text -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Corpus:
    """Text to train on."""

    documents: "list[str]"  # never empty, no empty document
    source: str  # where it came from, in words
    bytes: int  # length of all documents as UTF-8

    def digest(self) -> str:
        """sha256 over the documents and where each ends."""
        whole = hashlib.sha256()
        for document in self.documents:
            data = document.encode()
            whole.update(len(data).to_bytes(8, "little"))
            whole.update(data)
        return whole.hexdigest()


def _files_below(folder, endings, skip=()):
    """All files below a folder in the same order everywhere; hidden folders and caches are left out."""
    found = []
    for here, folders, files in os.walk(folder):
        folders[:] = [
            name for name in folders if not name.startswith(".") and name not in CACHES | set(skip)
        ]
        found += [pathlib.Path(here, name) for name in files if name.endswith(endings)]
    return sorted(found, key=lambda path: path.relative_to(folder).parts)


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


def load_text(path=None, *, max_bytes=None) -> Corpus:
    """Text of a file (any name), a folder (its *.txt, *.md and *.py, recursively, sorted), or the standard library.

    max_bytes: stop after that many bytes of text. One document is one file; empty files in a folder are left out.
    DataError: no such file or folder, no text in it, a file that cannot be read or is not UTF-8 (with the byte's
    offset)."""
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
                f"{path} does not exist; expected a text file, or a folder with {', '.join(ENDINGS)} files"
            )
        files = _files_below(root, ENDINGS) if root.is_dir() else [root]
    documents, size = [], 0
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
            f"{root} holds no text; expected a folder with {', '.join(ENDINGS)} files that are not empty"
        )
    return Corpus(documents, source, size)


# ---- tokens ---------------------------------------------------------------------------------------------------------


def _as_bytes(text):
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"character {text[error.start]!r} at position {error.start} has no UTF-8 form; "
            "expected text without lone surrogates"
        ) from error


def _as_list(tokens, vocab_size):
    tokens = (
        tokens.reshape(-1).tolist()
        if hasattr(tokens, "reshape")
        else [int(token) for token in tokens]
    )
    for position, token in enumerate(tokens):
        if not 0 <= token < vocab_size:
            raise DataError(
                f"token {token} at position {position} is not in the vocabulary; "
                f"expected 0 to {vocab_size - 1}"
            )
    return tokens


class ByteTokenizer:
    """One token per byte of UTF-8; nothing to train."""

    vocab_size = 256

    def encode(self, text: str) -> np.ndarray:
        """(N,) uint16, N the length of the text as UTF-8."""
        return np.frombuffer(_as_bytes(text), np.uint8).astype(np.uint16)

    def decode(self, tokens) -> str:
        """Text of an array, tensor or iterable of tokens; bytes that are not UTF-8 become U+FFFD."""
        return bytes(_as_list(tokens, 256)).decode("utf-8", errors="replace")


class BPETokenizer:
    """Byte-level BPE of the `tokenizers` library: any text has tokens, and they decode to the same text.

    `to_json()` is the whole tokenizer as text, and `BPETokenizer(text)` is that tokenizer again."""

    def __init__(self, description: str):
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_str(description)
        self.vocab_size = self._tokenizer.get_vocab_size()

    def to_json(self) -> str:
        return self._tokenizer.to_str()

    def encode(self, text: str) -> np.ndarray:
        """(N,) uint16. Text is encoded in pieces of 262,144 characters; no token crosses their borders."""
        _as_bytes(text)
        return self._encode_all([text])[0]

    def _encode_all(self, texts) -> "list[np.ndarray]":
        """One array per text, several texts at a time on all cores."""
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
        """Text of an array, tensor or iterable of tokens; bytes that are not UTF-8 become U+FFFD."""
        return self._tokenizer.decode(_as_list(tokens, self.vocab_size), skip_special_tokens=False)


def _cached(name, make):
    """The bytes that `make()` gives, kept as <cache>/bpe/<name> behind their sha256; a damaged entry is made again."""
    folder = cache_dir()
    if folder is None:
        return make()
    path = folder / "bpe" / name
    try:
        entry = path.read_bytes()
        if hashlib.sha256(entry[32:]).digest() == entry[:32]:
            return entry[32:]
    except OSError:
        pass  # not there yet
    content = make()
    try:
        path.parent.mkdir(exist_ok=True)
        with written_aside(path) as file:
            file.write(hashlib.sha256(content).digest())
            file.write(content)
    except OSError as error:
        warnings.warn(
            f"{path} cannot be written ({error.strerror}); the work will be repeated next time",
            stacklevel=3,
        )
    return content


def train_bpe(corpus: Corpus, vocab_size=32768, cache=True) -> BPETokenizer:
    """Byte-level BPE of up to `vocab_size` entries (256 to 65,536; fewer if the text has too few repeated pairs).

    Trained once per text and size (about 7 s for the standard library on two cores), then read from the cache."""
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

    return BPETokenizer(
        (_cached(f"{corpus.digest()}-{vocab_size}.json", train) if cache else train()).decode()
    )


# ---- datasets -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class TokenDataset:
    """A corpus as tokens. `train` and `val` share no text."""

    train: torch.Tensor  # (N,) int32, documents one after another
    val: torch.Tensor  # (M,) int32
    vocab_size: int
    tokenizer: "ByteTokenizer | BPETokenizer"
    source: str  # where the text came from, in words


def _split(documents):
    """(train, val) of a list of token arrays: every twentieth document is for validation, if that gives at least a
    fiftieth of the tokens; otherwise the last tenth of all tokens is."""
    val = documents[VALIDATION_EVERY - 1 :: VALIDATION_EVERY]
    if sum(map(len, val)) * 50 >= sum(map(len, documents)):
        train = [
            document for index, document in enumerate(documents) if (index + 1) % VALIDATION_EVERY
        ]
        return np.concatenate(train), np.concatenate(val)
    tokens = np.concatenate(documents)
    cut = len(tokens) * 9 // 10
    return tokens[:cut], tokens[cut:]


def make_dataset(path=None, tokenizer="byte", max_bytes=None, vocab_size=32768) -> TokenDataset:
    """Text (as `load_text` reads it) as tokens, split into training and validation.

    tokenizer: "byte" (256 tokens), "bpe" (trained on this text, up to `vocab_size` tokens), or a tokenizer you have.
    BPE tokenizer and tokens are kept in the cache, so that only the first call for a text takes time."""
    if isinstance(tokenizer, str) and tokenizer not in ("byte", "bpe"):
        raise ArgumentError(
            f"tokenizer is {tokenizer!r}; expected 'byte', 'bpe', or an object with encode and decode"
        )
    corpus = load_text(path, max_bytes=max_bytes)
    if isinstance(tokenizer, str):
        tokenizer = ByteTokenizer() if tokenizer == "byte" else train_bpe(corpus, vocab_size)
    if isinstance(tokenizer, BPETokenizer):
        key = hashlib.sha256((corpus.digest() + tokenizer.to_json()).encode()).hexdigest()

        def encode():
            arrays = tokenizer._encode_all(corpus.documents)
            lengths = np.array([len(arrays), *map(len, arrays)], "<i8")
            return lengths.tobytes() + np.concatenate(arrays).astype("<u2").tobytes()

        content = _cached(f"{key}.tokens", encode)
        count = int(np.frombuffer(content, "<i8", 1)[0])
        ends = np.cumsum(np.frombuffer(content, "<i8", count, offset=8))
        documents = np.split(np.frombuffer(content, "<u2", offset=8 * (count + 1)), ends[:-1])
    else:
        documents = [tokenizer.encode(document) for document in corpus.documents]
    train, val = (torch.from_numpy(tokens.astype(np.int32)) for tokens in _split(documents))
    return TokenDataset(train, val, tokenizer.vocab_size, tokenizer, corpus.source)


# ---- batches --------------------------------------------------------------------------------------------------------


def _window_count(tokens, T):
    """How many windows of T inputs there are; window i has inputs [i*T, (i+1)*T) and targets one further."""
    if tokens.dim() != 1 or tokens.is_floating_point() or tokens.device.type != "cpu":
        raise ArgumentError(
            f"tokens are {tokens.dtype} {list(tokens.shape)} on {tokens.device}; "
            "expected a 1-D integer tensor on the CPU"
        )
    if T < 1:
        raise ArgumentError(f"T is {T}; expected at least 1")
    if len(tokens) < T + 1:
        raise DataError(
            f"too little text: {len(tokens)} tokens, but one window of T={T} needs {T + 1}"
        )
    return (len(tokens) - 1) // T


def _gather(tokens, windows, T, device, pin=False):
    """(inputs, targets) of some windows, each (len(windows), T) int64, in one copy; to a GPU from pinned memory."""
    device = torch.device(device)
    positions = windows.view(1, -1, 1) * T + torch.arange(T) + torch.tensor([0, 1]).view(2, 1, 1)
    both = tokens[positions].long()
    if pin or device.type == "cuda":
        both = both.pin_memory()
    inputs, targets = both.to(device, non_blocking=True)
    return inputs, targets


def _check_rank(rank, ranks):
    if ranks < 1 or not 0 <= rank < ranks:
        raise ArgumentError(f"rank is {rank} of {ranks}; expected 0 to {max(ranks, 1) - 1}")


def shard(batches, rank, ranks, *, seed=None, epoch=0) -> list:
    """Rank `rank`'s share of a list of batches (or files, or anything): numbers rank, rank + ranks, ... of them.

    seed: shuffle them first, anew in each epoch (seed + epoch). The shares are disjoint and complete, and all as long as the
    longest: at its end a rank that has none left has None there, with which it takes part in a step without a batch.
    DataError when there are fewer batches than ranks."""
    _check_rank(rank, ranks)
    batches = list(batches)
    if len(batches) < ranks:
        raise DataError(f"{len(batches)} batches for {ranks} ranks; expected at least one for each")
    if seed is not None:
        batches = [
            batches[i]
            for i in torch.randperm(
                len(batches), generator=torch.Generator().manual_seed(seed + epoch)
            ).tolist()
        ]
    mine = batches[rank::ranks]
    return mine + [None] * (-(-len(batches) // ranks) - len(mine))


class Batches:
    """Endless, deterministic batches of windows of T tokens, shuffled anew in every epoch.

    Inputs of different windows share no token, and an epoch visits each window once (only the last, incomplete one is
    left out), so that each token is a target once. A batch that begins at the end of an epoch goes on into the next.

    tokens: (N,) integer tensor on the CPU; batch: windows per batch; T: tokens per window; seed: seed + epoch seeds the
    shuffle; device: where batches go, without waiting; pin: leave CPU batches in pinned memory, for copies of your own.
    rank, ranks: this rank's share, a batch each; all windows are still visited once. Micro-batches (batch / micro_batches
    windows) go to the ranks in turn, so that what all ranks take together in a step depends on ranks * micro_batches only:
    a run can be continued with another number of ranks. The position is the same on every rank.
    DataError when there is not one whole window (T + 1 tokens), or an epoch has fewer batches than there are ranks."""

    def __init__(
        self, tokens, batch, T, seed=0, device="cpu", pin=False, rank=0, ranks=1, micro_batches=1
    ):
        if batch < 1:
            raise ArgumentError(f"batch is {batch}; expected at least 1")
        _check_rank(rank, ranks)
        if micro_batches < 1 or batch % micro_batches and ranks > 1:
            raise ArgumentError(
                f"a batch of {batch} windows in {micro_batches} micro-batches; expected equal ones on {ranks} ranks"
            )
        self.tokens, self.batch, self.T, self.seed, self.device, self.pin = (
            tokens,
            batch,
            T,
            seed,
            device,
            pin,
        )
        self.rank, self.ranks, self.micro_batches = rank, ranks, micro_batches
        self.windows = _window_count(tokens, T)  # per epoch
        if self.windows < ranks * batch and ranks > 1:
            raise DataError(
                f"too little text: an epoch has {self.windows} windows of T={T}, {self.windows // batch} batches of {batch}, for "
                f"{ranks} ranks; expected at least one batch for each"
            )
        self.tokens_per_batch = batch * T
        self._go_to(epoch=0, index=0)

    def _go_to(self, epoch, index):
        generator = torch.Generator().manual_seed(self.seed + epoch)
        self.epoch, self.index = epoch, index  # `index` windows of this epoch are done
        self._order = torch.randperm(self.windows, generator=generator)

    def __iter__(self):
        return self

    def __next__(self):
        """(inputs, targets), each (batch, T) int64 on `device`."""
        parts, missing = [], self.batch * self.ranks
        while missing:
            if self.index == self.windows:
                self._go_to(self.epoch + 1, 0)
            parts.append(self._order[self.index : self.index + missing])
            self.index += len(parts[-1])
            missing -= len(parts[-1])
        windows = torch.cat(parts)
        if self.ranks > 1:
            windows = windows.view(self.micro_batches, self.ranks, -1)[:, self.rank].flatten()
        return _gather(self.tokens, windows, self.T, self.device, self.pin)

    def state_dict(self) -> dict:
        """The position: epoch, windows done in it by all ranks, and what they depend on. Batch size and ranks may change at a resume."""
        return {
            "epoch": self.epoch,
            "index": self.index,
            "seed": self.seed,
            "windows": self.windows,
            "T": self.T,
        }

    def load_state_dict(self, state: dict):
        """Continue where `state_dict()` was taken. DataError, and no change, if the text or T was another."""
        for key in ("windows", "T"):
            if state[key] != getattr(self, key):
                raise DataError(
                    f"the data position has {key}={state[key]}, expected {key}={getattr(self, key)}: "
                    "it was taken on another text or with another T"
                )
        if not (state["epoch"] >= 0 and 0 <= state["index"] <= self.windows):
            raise DataError(
                f"the data position is epoch {state['epoch']}, index {state['index']}; "
                f"expected an epoch of at least 0 and an index of 0 to {self.windows}"
            )
        self.seed = state["seed"]
        self._go_to(state["epoch"], state["index"])


def val_batches(tokens, batch, T, limit=None, device="cpu"):
    """The first `limit` batches of a text in order (None: all), as a list of (inputs, targets), each (batch, T) int64.

    All have `batch` windows, and what is left at the end is not used; a text of fewer windows gives one smaller batch.
    DataError when there is not one whole window (T + 1 tokens)."""
    if batch < 1:
        raise ArgumentError(f"batch is {batch}; expected at least 1")
    windows = torch.arange(_window_count(tokens, T))
    whole = len(windows) // batch * batch or len(windows)
    chunks = windows[:whole].split(batch)[:limit]
    return [_gather(tokens, chunk, T, device) for chunk in chunks]
