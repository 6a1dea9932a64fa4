"""Models of others against plain torch: python benchmarks/models.py [--models gpt2 llama]

Needs a C++ compiler and transformers, a GPU for the columns that run there, and a few minutes.
Nothing is downloaded: models are made from small configs, with weights drawn from a seed.

Eight models are trained for some steps of several micro-batches with clipping and AdamW: on each
backend, eager and replayed. The same steps in plain torch
(`torch.nn.utils.clip_grad_norm_`, `torch.optim.AdamW`) begin with the same weights and see the same
batches on the same device. Compared are the loss of each step, and weights and buffers at the end.

The columns, and where each runs:
  torch eager      CPU, torch's operations
  simt eager       CPU, our kernels
  simt replayed    CPU, our kernels and torch's operations on a tape
  cuda eager       GPU, our kernels
  cuda replayed    GPU, our kernels in a CUDA graph

Cells that do not run here keep what an earlier run has written to the result file.
"""

import argparse
import contextlib
import copy
import functools
import importlib.metadata
import json
import os
import pathlib
import traceback
import warnings

import torch
import torch.nn.functional as F
from common import RESULTS, Clock, environment, save
from tables import Column, Table, show
from torch import nn

import gpuaccel as ga
from gpuaccel.backends import find_compiler

ROWS, T, VOCAB, CHANNELS = 4, 12, 67, 32
MICRO_BATCHES, STEPS = 2, 4
LR, MAX_NORM = 1e-2, 0.5
# Larger than torch's default: a gradient that is zero but for rounding (that of an attention key's
# bias) shall not move its weight by a whole learning rate.
EPS = 1e-4
# Of a loss, relative; of a weight, in learning rates.
LOSS_TOLERANCE, WEIGHT_TOLERANCE = 1e-5, 1e-3
COLUMNS = {
    "torch, eager": ("torch", "cpu", "eager"),
    "simt, eager": ("simt", "cpu", "eager"),
    "simt, replayed": ("simt", "cpu", "graph"),
    "cuda, eager": ("cuda", "cuda", "eager"),
    "cuda, replayed": ("cuda", "cuda", "graph"),
}


def unavailable(column: str) -> str | None:
    """What this machine lacks for a column; None: nothing."""
    backend, device, _ = COLUMNS[column]
    if device == "cuda" and not torch.cuda.is_available():
        return "needs a GPU"
    if backend == "simt" and find_compiler()[0] is None:
        return "needs a C++ compiler"
    return None


# ---- the models ---------------------------------------------------------------------------------


class Lstm(nn.Module):
    """Tokens (B, T) -> logits (B, T, VOCAB), by torch's nn.LSTM."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, CHANNELS)
        self.lstm = nn.LSTM(CHANNELS, CHANNELS, num_layers=2, batch_first=True)
        self.head = nn.Linear(CHANNELS, VOCAB)

    def forward(self, tokens):
        return self.head(self.lstm(self.embedding(tokens))[0])


def of_transformers(task: str, kind: str, options: dict, **sizes):
    """A model of transformers for a task ("CausalLM", ...), with random weights.

    options: of from_config"""
    import transformers

    config = transformers.AutoConfig.for_model(kind, **sizes)
    return getattr(transformers, f"AutoModelFor{task}").from_config(config, **options)


def own_loss(model, micro):
    """The mean loss that a model of transformers computes itself. micro: its arguments."""
    return model(**micro).loss


def lstm_loss(model, micro):
    return F.cross_entropy(model(micro["input_ids"]).flatten(0, 1), micro["labels"].flatten())


def texts(generator) -> dict:
    return {
        "input_ids": torch.randint(0, VOCAB, (ROWS, T), generator=generator),
        "labels": torch.randint(0, VOCAB, (ROWS, T), generator=generator),
    }


def images(generator) -> dict:
    return {
        "pixel_values": torch.randn(ROWS, 3, 16, 16, generator=generator),
        "labels": torch.randint(0, 5, (ROWS,), generator=generator),
    }


WIDTHS = dict(hidden_size=CHANNELS, intermediate_size=48, num_hidden_layers=2)
LLAMA = dict(
    vocab_size=VOCAB,
    **WIDTHS,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=T,
)
NO_DROPOUT = dict(hidden_dropout_prob=0, attention_probs_dropout_prob=0)
GPT2 = dict(vocab_size=VOCAB, n_positions=T, n_embd=CHANNELS, n_layer=2, n_head=2)
GPT2 |= dict(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=0, eos_token_id=1)
BERT = dict(vocab_size=VOCAB, **WIDTHS, num_attention_heads=2, max_position_embeddings=T)
T5 = dict(vocab_size=VOCAB, d_model=CHANNELS, d_kv=16, d_ff=48, num_layers=2, num_heads=2)
T5 |= dict(dropout_rate=0, decoder_start_token_id=0)
VIT = dict(**WIDTHS, num_attention_heads=2, image_size=16, patch_size=4, num_labels=5)
RESNET = dict(embedding_size=8, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic")


def transformer(*args, **sizes):
    return functools.partial(of_transformers, *args, {}, **sizes)


# name -> (what makes the model, loss_fn, what makes a batch).
MODELS = {
    "gpt2": (transformer("CausalLM", "gpt2", **GPT2), own_loss, texts),
    "llama": (transformer("CausalLM", "llama", **LLAMA), own_loss, texts),
    "mixtral": (transformer("CausalLM", "mixtral", **LLAMA, num_local_experts=4), own_loss, texts),
    "bert": (transformer("MaskedLM", "bert", **BERT, **NO_DROPOUT), own_loss, texts),
    "t5": (transformer("Seq2SeqLM", "t5", **T5), own_loss, texts),
    "vit": (transformer("ImageClassification", "vit", **VIT, **NO_DROPOUT), own_loss, images),
    "resnet": (
        transformer("ImageClassification", "resnet", **RESNET, num_labels=5),
        own_loss,
        images,
    ),
    "lstm": (Lstm, lstm_loss, texts),
}


class Task:
    """A model with its first weights, its loss and its batches."""

    def __init__(self, name: str, steps: int = STEPS):
        build, self.loss_fn, make_batch = MODELS[name]
        torch.manual_seed(0)
        self.first = build().train()
        generator = torch.Generator().manual_seed(1)
        self.batches = [make_batch(generator) for _ in range(steps)]

    def on(self, device: str):
        """(a new copy of the model, the batches), both on the device."""
        batches = [{key: t.to(device) for key, t in batch.items()} for batch in self.batches]
        return copy.deepcopy(self.first).to(device), batches


# ---- training -----------------------------------------------------------------------------------


def values(model) -> dict:
    """name -> a copy of each parameter and floating-point buffer, on the CPU."""
    state = model.state_dict()
    return {name: t.detach().cpu().clone() for name, t in state.items() if t.is_floating_point()}


def plain(task: Task, device: str):
    """(losses, values) of the steps in plain torch."""
    model, batches = task.on(device)
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    opt = torch.optim.AdamW(groups, lr=LR, eps=EPS)
    losses = []
    for batch in batches:
        parts = {key: t.chunk(MICRO_BATCHES) for key, t in batch.items()}
        total = 0.0
        for k in range(MICRO_BATCHES):
            micro = {key: part[k] for key, part in parts.items()}
            loss = task.loss_fn(model, micro) / MICRO_BATCHES
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        opt.step()
        opt.zero_grad()
        losses.append(total)
    return losses, values(model)


def ours(task: Task, device: str, replay: str, deterministic: bool = False):
    """(losses, values, how the steps ran, why) of the same steps in a ga.TrainStep."""
    model, batches = task.on(device)
    arena = ga.Arena(model)
    opt = ga.AdamW(arena, lr=LR, eps=EPS, weight_decay=0.1, max_norm=MAX_NORM)
    with (
        warnings.catch_warnings(),
        ga.TrainStep(
            model,
            opt,
            task.loss_fn,
            micro_batches=MICRO_BATCHES,
            replay=replay,
            deterministic=deterministic,
        ) as step,
    ):
        # A step that cannot be captured warns; its reason goes into the table.
        warnings.simplefilter("ignore")
        losses = [float(step(batch).loss) for batch in batches]
        return losses, values(model), step.replays, step.reason


def compared(got, wanted) -> dict:
    """How far losses and values are from those of plain torch, and whether that is equal."""
    losses, state = got
    wanted_losses, wanted_state = wanted
    loss = max(abs(a - b) / abs(b) for a, b in zip(losses, wanted_losses, strict=True))
    weight = max(float((state[name] - t).abs().max()) for name, t in wanted_state.items()) / LR
    equal = loss <= LOSS_TOLERANCE and weight <= WEIGHT_TOLERANCE
    return {"loss": loss, "weight": weight, "equal": equal and state.keys() == wanted_state.keys()}


def same_bits(got, wanted) -> bool:
    losses, state = got
    return losses == wanted[0] and all(torch.equal(t, wanted[1][name]) for name, t in state.items())


def cell(task: Task, column: str, references: dict) -> dict:
    """One cell of the table. Bits are those of deterministic steps.

    references: device -> plain()'s result, filled here."""
    backend, device, replay = COLUMNS[column]
    if unavailable(column):
        return {"ran": None, "reason": unavailable(column)}
    if device not in references:
        references[device] = plain(task, device)
    with ga.use_backend(backend):
        try:
            *got, ran, reason = ours(task, device, replay)
            bits = [
                ours(task, device, kind, deterministic=True)[:2]
                for kind in ("eager", "graph")
                if ran == "graph"
            ]
        except Exception as error:
            traceback.print_exc(limit=-3)
            return {"ran": None, "reason": f"{type(error).__name__}: {error}".split("\n")[0]}
    result = {"ran": ran, **compared(got, references[device])}
    if bits:
        result["equals_eager"] = same_bits(*bits)
    elif replay == "graph":
        result["reason"] = reason
    return result


def measure(models=tuple(MODELS), columns=tuple(COLUMNS), steps: int = STEPS) -> dict:
    """model -> column -> cell."""
    clock = Clock()
    results: dict = {}
    for name in models:
        task = Task(name, steps)
        references: dict = {}
        results[name] = {column: cell(task, column, references) for column in columns}
        clock.say(name)
    return results


@contextlib.contextmanager
def exact_products():
    """fp32 products and convolutions in fp32 on a GPU, as on the CPU."""
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


# ---- the result file ----------------------------------------------------------------------------


def write(path: pathlib.Path, results: dict, steps: int) -> dict:
    """Write the results, and return those of the file.

    Cells that could not run here are those that the file had."""
    old = json.loads(path.read_text())["results"] if path.is_file() else {}
    merged, columns = old.get("models", {}), old.get("columns", {})
    here = environment()
    versions = {
        "torch": torch.__version__,
        "transformers": importlib.metadata.version("transformers"),
        "date": here["date"],
    }
    for model, cells in results.items():
        row = merged.setdefault(model, {})
        for column, value in cells.items():
            if unavailable(column):
                row.setdefault(column, value)
            else:
                row[column] = value
                device = COLUMNS[column][1]
                on = here["gpu"] if device == "cuda" else "CPU"
                columns[column] = {"on": on, **versions}
    result = {
        "benchmark": "models",
        **here,
        "steps": steps,
        "micro_batches": MICRO_BATCHES,
        "tolerances": {"loss": LOSS_TOLERANCE, "weight": WEIGHT_TOLERANCE},
        "results": {"models": merged, "columns": columns},
    }
    save(path, result)
    return result["results"]


def tables(results: dict) -> dict[str, Table]:
    """ "models": the largest difference of a weight from plain torch, in learning rates; a number
    in brackets is that of a reason. "reasons": what cannot be captured in a CUDA graph. "columns":
    where each was measured."""
    reasons: list[str] = []
    rows = []
    for model, cells in results["models"].items():
        texts = {name: cell_text(cells[name], reasons) for name in COLUMNS if name in cells}
        rows.append({"model": f"`{model}`", **texts})
    heads = {name: name.replace("eager", "launched") for name in COLUMNS}
    columns = [Column("model", "model"), *(Column(heads[name], name) for name in COLUMNS)]
    numbered = [{"number": f"({i})", "reason": why} for i, why in enumerate(reasons, 1)]
    why = [Column("", "number"), Column("reason", "reason")]
    keys = ("on", "torch", "transformers", "date")
    measured = results["columns"]
    machines = [{"column": heads[name], **measured[name]} for name in heads if name in measured]
    return {
        "models": Table(columns, rows),
        "reasons": Table(why, numbered),
        "columns": Table(
            [Column("column", "column"), *(Column(key, key) for key in keys)], machines
        ),
    }


def cell_text(value: dict, reasons: list[str]) -> str:
    """One cell. Its reason is added to `reasons` unless it is there already."""
    if value["ran"] is None and value["reason"].startswith("needs "):
        return value["reason"]
    mark = ""
    if "reason" in value:
        # Without what to do instead, which is for the author of the model.
        reason = value["reason"].split(" Instead: ")[0]
        if reason not in reasons:
            reasons.append(reason)
        mark = f" ({reasons.index(reason) + 1})"
    if value["ran"] is None:
        return f"does not run{mark}"
    words = f"{value['weight']:.0e}"
    if not value["equal"]:
        words = f"**differs: {words}**"
    if value.get("equals_eager"):
        words += " ="
    return words + (f", launched{mark}" if mark else "")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    # Before transformers is imported.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with exact_products():
        results = measure(parser.parse_args().models)
    show(tables(write(RESULTS / "models.json", results, STEPS)))


if __name__ == "__main__":
    main()
