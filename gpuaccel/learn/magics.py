"""`%%cuda`: a notebook cell of CUDA C becomes a kernel that Python can call.

    %load_ext gpuaccel

    %%cuda
    __global__ void twice(float* x, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < n) x[i] *= 2;
    }

    twice[4, 256](x, 1000)                   # in the next cell

A cell may be a whole .cu file: its host code is left out (see ga.compile). `%%cuda scale<float>`
makes `scale` an instance of a kernel template. `%%cuda accumulate
-D GRAD_T=bf16` takes one kernel of the cell and sets macros as the compiler's -D
does. The helpers of kernels_cu/common.cuh (bf16, as_float, as_bf16) are available. An error is
shown as the compiler shows it, with line and caret; line numbers are those of the cell.

`%%cuda --check saxpy` also tries the cell's kernel as the answer to an exercise, and shows how it
did, also where it does not compile. Until it is right, the name is the solution's kernel, so that
later cells run.

`%%cuda --replace settings_write` puts the cell's kernel in the place of the package's, for all that
launches it, once it was found right (replacement.py). `%cuda --restore` puts ours back.
"""

import argparse
import dataclasses
import re
import shlex
import time
from html import escape
from typing import TYPE_CHECKING, Any

from ..backends import backend
from ..compiler import Kernel, Module, compile, kernel_names
from ..errors import ArgumentError, CompileError, GpuaccelError, suggestion
from ..source import base_name, without_comments
from .replacement import Verdict, install, restore

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from .exercises import Result

USAGE = (
    "usage: %%cuda [kernel] [-D MACRO=VALUE ...], %%cuda --check exercise, "
    "%%cuda --replace kernel, or %cuda --restore [kernel ...]"
)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What a %%cuda cell displays: one line per kernel, and one on what was left out.

    Attributes:
        kernels: name -> Kernel.
        milliseconds: name -> time until it was ready.
        left_out: in words.
    """

    kernels: dict[str, Kernel]
    milliseconds: dict[str, float]
    left_out: str = ""

    def _rows(self):
        """(signature, what it costs) of each kernel."""
        for name, kernel in self.kernels.items():
            try:
                cost = kernel.resources()
            except CompileError:
                # Without the headers of CUDA only the CPU has compiled it.
                facts = ["compiled for the CPU"]
            else:
                spilled = cost.spill_store_bytes + cost.spill_load_bytes
                facts = [f"{cost.registers} registers"]
                if cost.shared_bytes:
                    facts.append(f"{cost.shared_bytes:,} bytes shared")
                if spilled:
                    facts.append(f"{spilled:,} bytes spilled")
            if backend().name == "cuda":
                facts.append(f"ready in {self.milliseconds[name]:.0f} ms")
            yield f"{kernel.name}({', '.join(map(str, kernel.params))})", "  ·  ".join(facts)
        if self.left_out:
            yield "left out:", self.left_out

    def __str__(self):
        return "\n".join(f"{signature}    {cost}" for signature, cost in self._rows())

    __repr__ = __str__

    def _repr_html_(self):
        row = (
            "display:flex;flex-wrap:wrap;column-gap:18px;align-items:baseline;padding:2px 0;"
            "line-height:1.5"
        )
        soft = (
            "color:var(--jp-ui-font-color2,inherit);font-size:12px;"
            "font-variant-numeric:tabular-nums;white-space:nowrap"
        )
        code = "font-size:13px;background:transparent;padding:0"
        rows = "".join(
            f'<div style="{row}"><code style="{code}">{escape(signature)}</code>'
            f'<span style="{soft}">{escape(cost)}</span></div>'
            for signature, cost in self._rows()
        )
        return f"<div>{rows}</div>"


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        raise CompileError(f"{message}; {USAGE}")


def parse_line(line: str, has_cell: bool = True) -> argparse.Namespace:
    """What is behind %%cuda, or behind %cuda without a cell.

    Raises:
        CompileError: which shows the usage.
    """
    parser = _Parser(add_help=False, allow_abbrev=False)
    if has_cell:
        group = parser.add_mutually_exclusive_group()
        group.add_argument("kernel", nargs="?")
        group.add_argument("--check")
        group.add_argument("--replace")
        parser.add_argument("-D", dest="macros", action="append", default=[])
    else:
        parser.add_argument("--restore", nargs="*", required=True)
    try:
        return parser.parse_args(shlex.split(line))
    except ValueError as error:
        raise CompileError(f"{line}: {error}; {USAGE}") from None


def compile_cell(line: str, cell: str) -> Compiled:
    """Compile the kernels of a cell.

    Args:
        line: what is behind %%cuda. It is line 1, so that messages count lines as the editor does.
    """
    options = parse_line(line)
    only = options.kernel
    macros = {
        name: value if is_set else "1"
        for name, is_set, value in (macro.partition("=") for macro in options.macros)
    }
    module = Module("\n" + cell, "cell", (), macros)
    if not module.names and not module.templates:
        raise CompileError(
            "there is no kernel in this cell; expected at least one\n"
            "    __global__ void name(...) { ... }"
        )
    if only is None and not module.names:
        raise CompileError(
            f"{module.templates[0]} is a template; expected its arguments, as in "
            f"%%cuda {module.templates[0]}<float>"
        )
    if only is not None and base_name(only) not in (*module.names, *module.templates):
        raise CompileError(
            f"there is no kernel {only!r} in this cell; kernels found: {', '.join(module.names)}"
            f"{suggestion(only, module.names)}"
        )
    kernels, milliseconds = {}, {}
    for name in [only] if only else module.names:
        start = time.perf_counter()
        kernels[base_name(name)] = module[name]
        milliseconds[base_name(name)] = (time.perf_counter() - start) * 1e3
    return Compiled(kernels, milliseconds, str(module.left_out))


def check_cell(name: str, cell: str, namespace: dict) -> "Result":
    """Try the kernel of a cell as the answer to the exercise `name`, and show how it did.

    The namespace gets the kernel; while it is wrong, or does not compile, the solution's.
    """
    from .exercises import check, does_not_compile, exercise

    task = exercise(name)
    if not task.params:
        raise ArgumentError(f"{name} is a Python function: expected ga.check({name!r}, function)")
    # Its lines are counted as those of the cell.
    namespace[name] = compile(f"\n{task.solution}", name)
    try:
        kernel = compile_cell(name, cell).kernels[name]
    except CompileError as error:
        result = does_not_compile(task, error, f"\n{cell}")
    else:
        result = check(name, kernel)
    if result.passed is False:
        return dataclasses.replace(result, summary=f"{result.summary} {UNTIL_RIGHT.format(name)}")
    namespace[name] = kernel
    return result


UNTIL_RIGHT = "Until yours is right, {0} is our kernel, so that later cells work."


def replace_kernel(name: str, cell: str) -> Verdict:
    """Check the kernel of a cell, and put it in the place of the package's `name`.

    Prints what is being done, since it takes some seconds."""
    if name not in kernel_names(cell):
        there = ", ".join(kernel_names(cell)) or "none"
        raise CompileError(
            f"%%cuda --replace {name}: expected a kernel of that name in this cell; "
            f"kernels found: {there}"
        )
    return install(name, "\n" + cell, say=print)


def _still_there(cell: str, namespace: dict) -> list[str]:
    """A line for each kernel in the namespace that a cell which does not compile defines."""
    words = set(re.findall(r"(\w+)\s*\(", without_comments(cell)))
    names = [n for n, value in namespace.items() if n in words and isinstance(value, Kernel)]
    return [f"{name} is still the kernel that it was before this cell" for name in names]


def load_ipython_extension(shell: "InteractiveShell") -> None:
    """Register `%%cuda` and `%cuda`; `%load_ext gpuaccel` calls this.

    Args:
        shell: the IPython shell of the notebook.

    Raises:
        CompileError: of a `%%cuda` cell that does not compile, or whose first line cannot be read.

    Example:
        >>> from IPython.core.interactiveshell import InteractiveShell
        >>> shell = InteractiveShell()
        >>> ga.load_ipython_extension(shell)  # in a notebook: %load_ext gpuaccel
        >>> "cuda" in shell.magics_manager.lsmagic()["cell"]
        True
    """

    def cuda(line, cell=None):
        """A cell of CUDA C: %%cuda [kernel] [-D MACRO=VALUE ...]

        %%cuda --check exercise: try it as the answer to an exercise.
        %%cuda --replace kernel: use it in the place of the package's.
        %cuda --restore: use the package's again."""
        in_place = True
        try:
            options = parse_line(line, cell is not None)
            if cell is None:
                names = restore(*options.restore)
                print(f"ours again: {', '.join(names)}" if names else "no kernel was replaced")
                return None
            if options.replace:
                return replace_kernel(options.replace, cell)
            if options.check:
                return check_cell(options.check, cell, shell.user_ns)
            in_place = False
            compiled = compile_cell(line, cell)
        except GpuaccelError as error:
            # the failed cell shows the message, and no Python traceback
            message = [ln for ln in str(error).splitlines() if not ln.startswith("Remark:")]
            if isinstance(error, CompileError) and cell is not None:
                from .exercises import find_slip

                slip = find_slip(error, f"\n{cell}")
                place = f"line {slip.line}: " if slip.line else ""
                message[:0] = [place + slip.sentence] if slip.sentence else []
            message += [] if in_place else _still_there(cell, shell.user_ns)
            error._render_traceback_ = lambda *_, **__: message
            raise
        shell.user_ns.update(compiled.kernels)
        return compiled

    # Its type is that of the decorator in IPython which it is not called through.
    register: Any = shell.register_magic_function
    register(cuda, "line_cell", "cuda")
