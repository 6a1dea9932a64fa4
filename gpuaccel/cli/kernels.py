"""`gpuaccel kernels`: compile kernels and show what each costs. It needs no GPU."""

import pathlib

from ..backends import backend
from ..compiler import Kernel, compile, kernel_files, kernel_names, kernel_root, nvrtc
from ..errors import ArgumentError
from .arguments import add_command, path

HEADER = ("file", "kernel", "registers", "shared", "stack", "spill st", "spill ld", "cubin")


def add_parser(commands):
    """Add `gpuaccel kernels`."""
    parser = add_command(
        commands, "kernels", run, "compile every kernel and show what it costs; needs no GPU"
    )
    parser.add_argument(
        "file",
        type=path,
        nargs="?",
        help="a topic of kernels_cu such as accumulate, or a .cu file (default: all of kernels_cu)",
    )
    parser.add_argument(
        "--arch", help="architecture such as sm_90 (default: this GPU's, else sm_90)"
    )


def run(args) -> int:
    arch = nvrtc.check_arch(args.arch or backend().arch or "sm_90")
    files = [args.file] if args.file else [path.stem for path in kernel_files()]
    rows = []
    for file in files:
        for kernel in _kernels_of(file):
            cost = kernel.resources(arch)
            rows.append(
                (
                    kernel.filename,
                    kernel.name,
                    cost.registers,
                    cost.shared_bytes,
                    cost.stack_bytes,
                    cost.spill_store_bytes,
                    cost.spill_load_bytes,
                    cost.cubin_bytes,
                )
            )
    print(f"{arch}, {nvrtc.library()}; registers per thread, the rest in bytes")
    widths = [max(len(str(row[i])) for row in [HEADER, *rows]) for i in range(len(HEADER))]
    for row in [HEADER, *rows]:
        names = [f"{cell:<{width}}" for cell, width in zip(row[:2], widths[:2])]
        numbers = [f"{cell:>{width}}" for cell, width in zip(row[2:], widths[2:])]
        print("  ".join(names + numbers))
    return 0


def _kernels_of(file):
    """Every kernel of a topic of kernels_cu ("accumulate"), or of a .cu file anywhere."""
    path = pathlib.Path(file)
    topic = path.name.removesuffix(".cu")
    in_package = kernel_root() / f"{topic}.cu"
    if not path.is_file() or path.resolve() == in_package.resolve():
        # without such a file, Kernel raises and says which there are
        names = kernel_names(in_package.read_text()) if in_package.is_file() else [topic]
        return [Kernel(topic, name) for name in names]
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"{path} cannot be read as text: {error}") from None
    names = kernel_names(text)
    if not names:
        raise ArgumentError(f"{path} has no kernel; expected a function declared __global__ void")
    return [compile(text, name, filename=path.name) for name in names]
