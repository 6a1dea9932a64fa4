"""Text, tokens and batches: bad text is refused with a reason, each sequence is visited once."""

import os

import pytest
import torch
from helpers import no_waiting
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuaccel import files
from gpuaccel.errors import ArgumentError, DataError
from gpuaccel.training import data
from gpuaccel.training.data import (
    Batches,
    BPETokenizer,
    ByteTokenizer,
    load_text,
    make_dataset,
    train_bpe,
    val_batches,
)

STORY = [
    "the cat sat on the mat and the dog sat on the log\n" * 3,
    "naïve façade, 東京, 🙂 \t\r\n  x\n" * 2,
    "def f(x):\n    return x\n",
]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder of the test's own."""
    monkeypatch.setattr(files, "cache_dir", lambda: tmp_path / "cache")
    (tmp_path / "cache").mkdir()
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def bpe():
    return train_bpe(STORY, 300)


# ---- text ----------------------------------------------------------------------------------------


def test_the_standard_library_is_the_default_and_enough_for_a_model():
    documents, source = load_text(None)
    assert source == "the sources of Python's standard library"
    assert sum(map(len, documents)) > 5_000_000 and "import" in documents[0]
    paths = data._files_below(os.path.dirname(os.__file__), (".py",), data.NOT_LIBRARY)
    assert not any({"site-packages", "test", "tests"} & set(path.parts[-4:-1]) for path in paths)


def test_a_folder_in_a_fixed_order(tmp_path):
    for name, text in {
        "b.txt": "two",
        "a/z.md": "one",
        "b/a.py": "three",
        "c.TXT": "no",
        "d.bin": "no",
        ".git/x.txt": "no",
        "b/__pycache__/x.py": "no",
        "empty.txt": "",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(text)
    assert load_text(tmp_path) == (["one", "three", "two"], str(tmp_path))
    assert load_text(str(tmp_path), max_bytes=5)[0] == ["one", "th"]
    assert load_text(tmp_path / "d.bin")[0] == ["no"]  # a file may have any name


def test_max_bytes_cuts_at_a_character(tmp_path):
    (tmp_path / "a.txt").write_bytes("a東京".encode())
    cut = {1: "a", 2: "a", 3: "a", 4: "a東", 5: "a東", 7: "a東京", 99: "a東京"}
    for n, text in cut.items():
        assert load_text(tmp_path, max_bytes=n)[0] == [text]
    with pytest.raises(ArgumentError, match="max_bytes is 0"):
        load_text(tmp_path, max_bytes=0)


def test_text_that_cannot_be_used_is_refused_with_the_reason(tmp_path):
    bad = tmp_path / "bad.txt"
    cases = ((b"\xff\xfea\0", 0), (b"ab\xe9cd", 2), (b"good " * 1000 + b"\xc3", 5000))
    for content, offset in cases:
        bad.write_bytes(content)
        message = f"bad.txt is not UTF-8 text: byte 0x.. at offset {offset} "
        for path in (bad, tmp_path):
            with pytest.raises(DataError, match=message):
                load_text(path)
    bad.write_bytes(b"")
    with pytest.raises(DataError, match="bad.txt is empty"):
        load_text(bad)
    with pytest.raises(
        DataError, match="holds no text; expected a folder with .txt, .md, .py files"
    ):
        load_text(tmp_path)
    with pytest.raises(DataError, match="nowhere does not exist"):
        load_text(tmp_path / "nowhere")
    (tmp_path / "link.txt").symlink_to(tmp_path / "gone")
    with pytest.raises(DataError, match="link.txt cannot be read: No such file"):
        load_text(tmp_path)


# ---- tokenizers ----------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(
    text=st.text()
    | st.lists(st.sampled_from(["the ", "cat", "\n", "  ", "東", "é", "\0", "'s"])).map("".join)
)
def test_any_text_comes_back(text, bpe):
    for tokenizer in (ByteTokenizer(), bpe):
        tokens = tokenizer.encode(text)
        assert not len(tokens) or tokens.max() < tokenizer.vocab_size
        assert tokenizer.decode(tokens) == tokenizer.decode(tokens.tolist()) == text
    assert len(ByteTokenizer().encode(text)) == len(text.encode())


def test_bpe_comes_back_over_pieces(bpe, monkeypatch):
    monkeypatch.setattr(data, "PIECE", 7)
    text = "".join(STORY) * 9  # more than one group of pieces
    assert bpe.decode(bpe.encode(text)) == text


def test_bpe_is_shorter_than_bytes_and_survives_as_json(bpe):
    tokens = bpe.encode(STORY[0])
    assert len(tokens) < len(STORY[0]) / 2 and 256 <= bpe.vocab_size <= 300
    again = BPETokenizer(bpe.to_json())
    assert again.vocab_size == bpe.vocab_size and (again.encode(STORY[0]) == tokens).all()


@pytest.mark.parametrize("kind", ["byte", "bpe"])
def test_decode_takes_any_bytes_and_refuses_other_tokens(kind, bpe):
    tokenizer = bpe if kind == "bpe" else ByteTokenizer()
    first_token = tokenizer.encode("é" if kind == "byte" else "\U000e0001")[:1]
    assert tokenizer.decode(first_token) == "\N{REPLACEMENT CHARACTER}"
    assert tokenizer.decode([]) == ""
    for token in (-1, tokenizer.vocab_size):
        with pytest.raises(DataError, match=f"token {token} is not in the vocabulary; expected 0 "):
            tokenizer.decode([3, token])


# ---- datasets ------------------------------------------------------------------------------------


def write_documents(folder, count, length=100):
    for index in range(count):
        (folder / f"{index:03d}.txt").write_text(chr(33 + index) * length)


def test_validation_is_every_twentieth_document(tmp_path):
    write_documents(tmp_path, 45)
    dataset = make_dataset(tmp_path)
    assert dataset.train.dtype == dataset.val.dtype == torch.int32 and dataset.vocab_size == 256
    assert dataset.val.tolist() == [33 + 19] * 100 + [33 + 39] * 100
    assert len(dataset.train) == 4300
    assert set(dataset.train.tolist()).isdisjoint(dataset.val.tolist())
    assert dataset.source == str(tmp_path)


def test_few_or_uneven_documents_are_split_by_position(tmp_path):
    text = "".join(chr(32 + i % 90) for i in range(1000))
    (tmp_path / "a.txt").write_text(text)
    dataset = make_dataset(tmp_path / "a.txt", max_bytes=900)
    assert ByteTokenizer().decode(dataset.train) == text[:810]
    assert ByteTokenizer().decode(dataset.val) == text[810:900]
    (tmp_path / "a.txt").unlink()
    write_documents(tmp_path, 20)
    # The twentieth alone would be too short for validation, or too long.
    for twentieth, total in (("x", 1901), ("b" * 50_000, 51_900)):
        (tmp_path / "019.txt").write_text(twentieth)
        assert len(make_dataset(tmp_path).val) == total - total * 9 // 10


def test_bpe_is_trained_once_and_the_same(tmp_path, cache, monkeypatch):
    folder = tmp_path / "text"
    folder.mkdir()
    for index in range(21):
        (folder / f"{index:02d}.txt").write_text(STORY[index % 3] + str(index))
    first = make_dataset(folder, "bpe", vocab_size=300)
    texts = load_text(folder)[0]
    assert first.tokenizer.decode(first.val) == texts.pop(19)
    assert first.tokenizer.decode(first.train) == "".join(texts)

    made = []
    monkeypatch.setattr(data, "train_bpe", lambda *args: made.append(1) or train_bpe(*args))
    (entry,) = (cache / "bpe").iterdir()
    content = entry.read_bytes()
    for damaged, times in ((content, 0), (content[:-1], 1), (content.replace(b"m", b"n"), 1)):
        entry.write_bytes(damaged)
        made.clear()
        again = make_dataset(folder, "bpe", vocab_size=300)
        assert len(made) == times and again.tokenizer.to_json() == first.tokenizer.to_json()
        assert torch.equal(first.train, again.train) and torch.equal(first.val, again.val)
        assert entry.read_bytes() == content
    make_dataset(folder, "bpe", vocab_size=299)
    (folder / "00.txt").write_text("another text")
    make_dataset(folder, "bpe", vocab_size=300)
    assert len(made) == 3, "another size and another text are trained anew"
    monkeypatch.setattr(files, "cache_dir", lambda: None)
    assert make_dataset(folder, "bpe", vocab_size=260).vocab_size == 260


@pytest.mark.parametrize(
    "options, message",
    [
        ({"tokenizer": "char"}, "tokenizer is 'char'; expected one of byte, bpe"),
        ({"vocab_size": 255}, "vocab_size is 255; expected 256"),
        ({"vocab_size": 65537}, "vocab_size is 65537"),
    ],
)
def test_a_dataset_of_another_kind_is_refused(options, message):
    with pytest.raises(ArgumentError, match=message):
        make_dataset(**options)


# ---- batches -------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(n=st.integers(3, 200), T=st.integers(1, 12), batch=st.integers(1, 9), seed=st.integers(0, 5))
def test_an_epoch_visits_each_sequence_once(n, T, batch, seed):
    tokens = torch.arange(n)
    if n < T + 1:
        return
    batches = Batches(tokens, batch, T, seed)
    count = (n - 1) // T
    seen = []
    while len(seen) < 2 * count:
        inputs, targets = next(batches)
        assert inputs.shape == targets.shape == (batch, T)
        assert inputs.dtype == targets.dtype == torch.int64
        assert inputs.is_contiguous() and targets.is_contiguous()
        assert torch.equal(targets, inputs + 1)
        seen += inputs.tolist()
    for epoch in (seen[:count], seen[count : 2 * count]):
        assert sorted(token for sequence in epoch for token in sequence) == list(range(count * T))


def test_order_depends_on_seed_and_epoch_only():
    def first(seed, count=6):
        batches = Batches(torch.arange(200, dtype=torch.int32), 5, 7, seed)
        return [next(batches)[0].tolist() for _ in range(count)]

    state = torch.get_rng_state()
    assert first(0) == first(0) != first(1)
    flat = [sequence for batch in first(0, 28) for sequence in batch]  # 5 epochs of 28 sequences
    assert flat[:28] != flat[28:56] and sorted(flat[:28]) == sorted(flat[28:56])
    assert torch.equal(torch.get_rng_state(), state)


@settings(deadline=None, max_examples=40)
@given(done=st.integers(0, 40), batch=st.integers(1, 30))
def test_resume_at_any_batch(done, batch):
    def fresh(seed=3):
        return Batches(torch.arange(130), batch, 9, seed)

    batches = fresh()
    for _ in range(done):
        next(batches)
    state = batches.state_dict()
    assert {"epoch", "index", "seed"} <= state.keys()
    other = fresh(seed=8)
    other.load_state_dict(dict(state))
    for _ in range(7):
        assert torch.equal(torch.stack(next(batches)), torch.stack(next(other)))
    assert batches.state_dict() == other.state_dict()


def test_a_position_on_another_text_is_refused():
    batches = Batches(torch.arange(100), 2, 9)
    before = batches.state_dict()
    cases = (
        (Batches(torch.arange(300), 2, 9).state_dict(), "sequences=33, expected sequences=11"),
        (Batches(torch.arange(89), 2, 8).state_dict(), "T=8, expected T=9"),
        ({"epoch": 0}, "sequences=None, expected sequences=11"),
        (
            Batches(torch.arange(100).flip(0), 2, 9).state_dict(),
            f"sha256=[0-9a-f]{{64}}, expected sha256={before['sha256']}: it was taken on another",
        ),
    )
    for state, message in cases:
        with pytest.raises(DataError, match=message):
            batches.load_state_dict(state)
    assert batches.state_dict() == before


def test_the_hash_of_a_text_is_that_of_its_tokens_in_any_dtype():
    tokens = torch.arange(3 << 20) % 251
    dtypes = (torch.int64, torch.int32, torch.uint8)
    assert len({Batches(tokens.to(dtype), 2, 9).sha256 for dtype in dtypes}) == 1


@pytest.mark.parametrize(
    "make", [lambda tokens, T: Batches(tokens, 2, T), lambda tokens, T: val_batches(tokens, 2, T)]
)
def test_too_little_text(make):
    with pytest.raises(
        DataError, match="too little text: 8 tokens, but one sequence of T=8 needs 9"
    ):
        make(torch.arange(8), 8)
    make(torch.arange(9), 8)
    for tokens in (torch.ones(50), torch.ones(5, 10, dtype=torch.int32)):
        with pytest.raises(ArgumentError, match="expected a 1-D integer tensor on the CPU"):
            make(tokens, 8)
    with pytest.raises(ArgumentError, match="T is 0"):
        make(torch.arange(9), 0)


def test_batch_of_zero():
    for make in (Batches, val_batches):
        with pytest.raises(ArgumentError, match="batch is 0; expected at least 1"):
            make(torch.arange(9), 0, 2)


def test_val_batches_in_order():
    batches = val_batches(torch.arange(100, dtype=torch.int32), 3, 9, 2)
    assert [inputs[:, 0].tolist() for inputs, _ in batches] == [[0, 9, 18], [27, 36, 45]]
    for inputs, targets in batches:
        assert torch.equal(inputs + 1, targets) and inputs.dtype == torch.int64
    # 11 sequences: the last two are left out.
    assert len(val_batches(torch.arange(100), 3, 9)) == 3
    assert [inputs.shape for inputs, _ in val_batches(torch.arange(100), 64, 9, 5)] == [(11, 9)]


@pytest.mark.gpu
def test_batches_on_a_gpu_are_the_same_and_nothing_waits():
    tokens = torch.arange(5000)
    cuda, cpu = (Batches(tokens, 4, 31, device=device) for device in ("cuda", "cpu"))
    with no_waiting():
        pairs = [(next(cuda), next(cpu)) for _ in range(50)]
    for on_cuda, on_cpu in pairs:
        assert all(torch.equal(a.cpu(), b) for a, b in zip(on_cuda, on_cpu))
    on_cuda, on_cpu = (val_batches(tokens, 4, 31, 2, device)[1][1] for device in ("cuda", "cpu"))
    assert on_cuda.is_cuda and torch.equal(on_cuda.cpu(), on_cpu)
