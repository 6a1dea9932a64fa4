"""Draw the picture of the README from a real run:  python docs/pictures.py

pictures/show-*.svg: what ga.show draws for a kernel that reads every second element.
"""

import pathlib

import torch

import gpuaccel as ga
from gpuaccel.learn.figures.drawing import IMAGE_STYLE

FOLDER = pathlib.Path(__file__).resolve().parent / "pictures"
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
__global__ void every_second(float* y, const float* x, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[2 * i];
}
"""


def show() -> str:
    """ga.show of one block of 32 threads."""
    kernel = ga.compile(EVERY_SECOND)
    return ga.show(kernel[1, 32], torch.zeros(32), torch.arange(64.0), 32).picture()


def coloured(svg: str, colours: dict[str, str]) -> str:
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
    FOLDER.mkdir(exist_ok=True)
    write("show", show())
