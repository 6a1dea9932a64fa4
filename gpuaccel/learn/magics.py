"""`%%cuda`: a notebook cell of CUDA C becomes a kernel that Python can call.

    %load_ext gpuaccel

    %%cuda
    extern "C" __global__ void twice(float* x, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < n) x[i] *= 2;
    }

    twice[4, 256](x, 1000)                   # in the next cell

`%%cuda accumulate -D GRAD_T=bf16` takes one kernel of the cell, and sets macros as the compiler's -D does. The helpers
of kernels_cu/common.cuh (bf16, as_float, as_bf16) are at hand. A mistake is shown as the compiler shows it, with line
and caret; line numbers are those of the cell.
"""

import re
import shlex
import time
from dataclasses import dataclass
from html import escape

from ..backends import backend
from ..compiler.kernel import Kernel, compile, kernel_names
from ..errors import CompileError, GpuaccelError

USAGE = "usage: %%cuda [kernel] [-D MACRO=VALUE ...]"


@dataclass(frozen=True)
class Compiled:
    """What a %%cuda cell leaves: one line per kernel. `kernels`: name -> Kernel; `milliseconds`: name -> time."""

    kernels: "dict[str, Kernel]"
    milliseconds: "dict[str, float]"

    def _rows(self):
        """(signature, what it costs) of each kernel."""
        known = None if backend().name == "cuda" else "no GPU here, so for sm_90"
        for name, kernel in self.kernels.items():
            cost = kernel.resources()
            parts = [
                f"{cost.registers} registers",
                f"{cost.shared_bytes:,} bytes shared" if cost.shared_bytes else "",
                (
                    f"{cost.spill_store_bytes + cost.spill_load_bytes:,} bytes spilled"
                    if cost.spill_store_bytes
                    else "no spills"
                ),
                known or cost.arch,
                f"ready in {self.milliseconds[name]:.0f} ms",
            ]
            yield f"{name}({', '.join(map(str, kernel.params))})", "  ·  ".join(filter(None, parts))

    def __str__(self):
        return "\n".join(f"{head}    {cost}" for head, cost in self._rows())

    __repr__ = __str__

    def _repr_html_(self):
        soft = "color:var(--jp-ui-font-color2,inherit);font-size:12px;font-variant-numeric:tabular-nums"
        lines = "".join(
            '<div style="display:flex;flex-wrap:wrap;column-gap:18px;align-items:baseline;padding:2px'
            ' 0;line-height:1.5"><code'
            f' style="font-size:13px;background:transparent;padding:0">{escape(head)}</code><span'
            f' style="{soft};white-space:nowrap">{escape(cost)}</span></div>'
            for head, cost in self._rows()
        )
        return f"<div>{lines}</div>"


def parse_line(line: str) -> "tuple[str | None, dict[str, str]]":
    """(kernel or None, macros) of what stands behind %%cuda. Raises CompileError that shows the usage."""
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise CompileError(f"%%cuda {line}: {error}; {USAGE}") from None
    name, macros = None, {}
    while words:
        word = words.pop(0)
        if word.startswith("-D"):
            macro = word[2:] or (words.pop(0) if words else "")
            found = re.fullmatch(r"([A-Za-z_]\w*)(?:=(.*))?", macro)
            if not found:
                raise CompileError(f"%%cuda -D {macro!r}: expected MACRO or MACRO=VALUE; {USAGE}")
            macros[found[1]] = "1" if found[2] is None else found[2]
        elif name is None and word.isidentifier():
            name = word
        else:
            raise CompileError(f"%%cuda does not know {word!r}; {USAGE}")
    return name, macros


def compile_cell(line: str, cell: str) -> Compiled:
    """Compile the kernels of a cell. Line 1 is the cell's %%cuda line, so that messages count as the editor does."""
    wanted, macros = parse_line(line)
    names = kernel_names(cell)
    if not names:
        raise CompileError(
            'there is no kernel in this cell; expected at least one\n    extern "C" __global__ void name(...) { ... }'
        )
    if wanted is not None and wanted not in names:
        raise CompileError(
            f"there is no kernel {wanted!r} in this cell; kernels found: {', '.join(names)}"
        )
    kernels, milliseconds = {}, {}
    for name in [wanted] if wanted else names:
        began = time.perf_counter()
        kernels[name] = compile("\n" + cell, name, filename="cell", **macros)
        milliseconds[name] = (time.perf_counter() - began) * 1e3
    return Compiled(kernels, milliseconds)


def load_ipython_extension(shell):
    """`%load_ext gpuaccel` calls this; it registers %%cuda."""

    def cuda(line, cell):
        """A cell of CUDA C. %%cuda [kernel] [-D MACRO=VALUE ...]"""
        try:
            made = compile_cell(line, cell)
        except GpuaccelError as error:
            shown = [line for line in str(error).splitlines() if not line.startswith("Remark:")]
            error._render_traceback_ = lambda *_, **__: (
                shown
            )  # the failed cell shows this, and no Python traceback
            raise
        shell.user_ns.update(made.kernels)
        return made

    shell.register_magic_function(cuda, "cell", "cuda")
