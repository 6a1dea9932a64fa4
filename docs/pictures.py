"""Draw the pictures of the README from real runs:  python docs/pictures.py [show] [meter]

pictures/meter-*.svg: the live meter after several short training runs; the title names the device.
A GPU trains 122 M parameters in bf16: launched and as one CUDA graph, compiled and not. A CPU
trains a small transformer in fp32, launched.
pictures/show-*.svg: what ga.show draws for a kernel that reads every second element.
"""

import pathlib
import sys

import torch

import gpuaccel as ga
from gpuaccel.learn.figures.drawing import IMAGE_STYLE

FOLDER = pathlib.Path(__file__).resolve().parent / "pictures"
STEPS = 40
# The package draws words and lines in variables, which its style element defines. A README can show
# one picture per colour scheme, with more contrast and without a style.
SCHEMES = {
    scheme: {
        IMAGE_STYLE: "",
        "var(--ink-strong)": strong,
        "var(--ink-soft)": soft,
        "var(--ink-hair)": "rgb(140,146,155)",
    }
    for scheme, strong, soft in (
        ("light", "#1f2328", "#59636e"),
        ("dark", "#e6edf3", "#9ea7b3"),
    )
}
EVERY_SECOND = """
extern "C" __global__ void every_second(float* y, const float* x, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[2 * i];
}
"""


def show() -> str:
    """ga.show of one block of 32 threads."""
    kernel = ga.compile(EVERY_SECOND)
    return ga.show(kernel[1, 32], torch.zeros(32), torch.arange(64.0), 32).picture()


def live_meter() -> str:
    """The live meter of several variants of a training step, with the same seed and text."""
    gpu = ga.backend().name == "cuda"
    device = ga.default_device()
    config = ga.preset("llama-350m", vocab=256, layers=8) if gpu else ga.preset("tiny")
    text = ga.make_dataset(max_bytes=2_000_000)
    name = torch.cuda.get_device_name() if gpu else "a CPU"
    live = ga.LiveThroughput(f"The same training step, done differently, on {name}")
    variants = {"launched": {}}
    if gpu:
        variants["launched, compiled"] = {"compile": True}
        variants["replayed"] = {"replay": "graph"}
        variants["replayed, compiled"] = {"compile": True, "replay": "graph"}
    for name, options in variants.items():
        torch.manual_seed(0)
        model = ga.Transformer(config).to(device, ga.default_dtype())
        optimizer = ga.AdamW(ga.Arena(model), lr=1e-4 if gpu else 3e-3, max_norm=1.0)
        batches = ga.Batches(text.train, 16 if gpu else 8, config.T if gpu else 128, device=device)
        step = ga.TrainStep(model, optimizer, micro_batches=4, **options)
        step.meter = ga.Meter(device, window=5)
        with step:
            live.run(ga.train(step, batches, steps=STEPS), name=name, steps=STEPS)
    return live._repr_mimebundle_()["image/svg+xml"]


def coloured(svg: str, colours: "dict[str, str]") -> str:
    """The picture with these colours replaced.

    Raises ValueError where the picture does not have one of them."""
    for old, new in colours.items():
        if old not in svg:
            raise ValueError(
                f"the picture has no {old}; expected the colours of "
                "gpuaccel/learn/figures/drawing.py, which has others now"
            )
        svg = svg.replace(old, new)
    return svg


def write(name: str, svg: str, folder: pathlib.Path = FOLDER):
    """<name>-light.svg and <name>-dark.svg."""
    for scheme, colours in SCHEMES.items():
        (folder / f"{name}-{scheme}.svg").write_text(coloured(svg, colours) + "\n")


if __name__ == "__main__":
    wanted = sys.argv[1:] or ["show", "meter"]
    FOLDER.mkdir(exist_ok=True)
    for name, draw in {"show": show, "meter": live_meter}.items():
        if name in wanted:
            write(name, draw())
