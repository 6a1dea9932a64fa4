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
did. Until it is right, the name is the solution's kernel, so that later cells run.

`%%cuda --replace settings_write` puts the cell's kernel in the place of the package's, for all that
launches it, once it was found right (replacement.py). `%cuda --restore` puts ours back.
"""

import dataclasses
import re
import shlex
import time
import weakref
from html import escape
from typing import TYPE_CHECKING, Any

from ..backends import backend
from ..compiler import Kernel, Module, compile, kernel_names
from ..errors import ArgumentError, CompileError, GpuaccelError, suggestion
from ..source import base_name, without_comments
from .replacement import Verdict, install, kernel_in_steps, restore

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from .exercises import Result

USAGE = (
    "usage: %%cuda [kernel] [-D MACRO=VALUE ...], %%cuda --check exercise, or "
    "%%cuda --replace kernel"
)
RESTORE_USAGE = "usage: %cuda --restore [kernel ...]"

# Kernel of an earlier run of a cell -> what has become of that cell, in words.
_outdated: weakref.WeakKeyDictionary[Kernel, str] = weakref.WeakKeyDictionary()


def why_outdated(kernel: Kernel) -> str | None:
    """Why a kernel is not the one that its cell was to make last, in words."""
    return _outdated.get(kernel)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What a %%cuda cell displays: one line per kernel, and one on what was left out.

    Attributes:
        kernels: name -> Kernel.
        milliseconds: name -> time until it was ready.
        left_out: in words.
        still_there: kernels of the cell's run before that it no longer defines, in words.
    """

    kernels: dict[str, Kernel]
    milliseconds: dict[str, float]
    left_out: str = ""
    still_there: str = ""

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
        if self.still_there:
            yield "another name:", self.still_there

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


def parse_line(line: str) -> tuple[str | None, dict[str, str]]:
    """(kernel or None, macros) of what is behind %%cuda.

    Raises:
        CompileError: which shows the usage.
    """
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise CompileError(f"%%cuda {line}: {error}; {USAGE}") from None
    name = None
    macros = {}
    while words:
        word = words.pop(0)
        if word.startswith("-D"):
            macro = word[2:] or (words.pop(0) if words else "")
            match = re.fullmatch(r"([A-Za-z_]\w*)(?:=(.*))?", macro)
            if not match:
                raise CompileError(f"%%cuda -D {macro!r}: expected MACRO or MACRO=VALUE; {USAGE}")
            macros[match[1]] = "1" if match[2] is None else match[2]
        elif name is None and re.fullmatch(r"[A-Za-z_]\w*(<.*>)?", word):
            name = word
        else:
            raise CompileError(f"%%cuda does not know {word!r}; {USAGE}")
    return name, macros


def compile_cell(line: str, cell: str) -> Compiled:
    """Compile the kernels of a cell.

    Args:
        line: what is behind %%cuda. It is line 1, so that messages count lines as the editor does.
    """
    only, macros = parse_line(line)
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
    from .exercises import check, exercise

    task = exercise(name)
    if not task.params:
        raise ArgumentError(f"{name} is a Python function: expected ga.check({name!r}, function)")
    namespace[name] = compile(task.solution, name)
    try:
        kernel = compile_cell(name, cell).kernels[name]
    except CompileError as error:
        error.__notes__ = [UNTIL_RIGHT.format(name)]
        raise
    result = check(name, kernel)
    if result.passed is False:
        return dataclasses.replace(result, summary=f"{result.summary} {UNTIL_RIGHT.format(name)}")
    namespace[name] = kernel
    return result


UNTIL_RIGHT = "Until yours is right, {0} is our kernel, so that the notebook goes on."


def replace_kernel(name: str, cell: str) -> Verdict:
    """Check the kernel of a cell, and put it in the place of the package's `name`.

    Prints what is being done, since it takes some seconds."""
    if name not in kernel_names(cell):
        there = ", ".join(kernel_names(cell)) or "none"
        raise CompileError(
            f"%%cuda --replace {name}: expected a kernel of that name in this cell; "
            f"kernels found: {there}"
        )
    kernel_in_steps(name)
    print(f"checking your {name}:")
    return install(name, "\n" + cell, say=print)


def restore_kernels(line: str) -> str:
    """What `%cuda --restore` does: our kernels are back.

    Returns:
        What it did, in words.
    """
    words = line.split()
    if not words or words[0] != "--restore":
        raise CompileError(f"%cuda {line}: {RESTORE_USAGE}")
    names = restore(*words[1:])
    return f"ours again: {', '.join(names)}" if names else "no kernel was replaced"


def _before(cell: str, namespace: dict) -> dict[str, Kernel]:
    """Kernels in the namespace whose name a cell that does not compile defines, or was to."""
    words = set(re.findall(r"(\w+)\s*\(", without_comments(cell)))
    return {n: v for n, v in namespace.items() if n in words and isinstance(v, Kernel)}


def _outdate(kernels: dict[str, Kernel], why: str) -> list[str]:
    """Remember that these kernels are outdated, and why.

    Returns:
        A line for each of them.
    """
    for name, kernel in kernels.items():
        _outdated[kernel] = f"{why.format(name)}, and `{name}` is still the kernel of before"
    return [f"{name} is still the kernel that it was before this cell" for name in kernels]


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

    # id of a cell -> the kernels of its last run
    made: dict[str | None, dict[str, Kernel]] = {}

    def cuda(line, cell=None):
        """A cell of CUDA C: %%cuda [kernel] [-D MACRO=VALUE ...]

        %%cuda --check exercise: try it as the answer to an exercise.
        %%cuda --replace kernel: use it in the place of the package's.
        %cuda --restore: use the package's again."""
        try:
            if cell is None:
                print(restore_kernels(line))
                return None
            words = line.split()
            if words[:1] in (["--check"], ["--replace"]):
                if len(words) != 2:
                    raise CompileError(f"%%cuda {line}: {USAGE}")
                if words[0] == "--replace":
                    return replace_kernel(words[1], cell)
                return check_cell(words[1], cell, shell.user_ns)
            compiled = compile_cell(line, cell)
        except GpuaccelError as error:
            # the failed cell shows the message, and no Python traceback
            message = [ln for ln in str(error).splitlines() if not ln.startswith("Remark:")]
            message += getattr(error, "__notes__", [])
            if cell is not None and not line.strip().startswith("--"):
                why = "the last cell that defines `{}` did not compile"
                message += _outdate(_before(cell, shell.user_ns), why)
            error._render_traceback_ = lambda *_, **__: message
            raise
        for kernel in compiled.kernels.values():
            _outdated.pop(kernel, None)
        # JupyterLab tells which cell it is.
        cell_id = getattr(shell, "get_parent", dict)().get("metadata", {}).get("cellId")
        before = made.get(cell_id, {}).items()
        kept = {n: k for n, k in before if n not in compiled.kernels and shell.user_ns.get(n) is k}
        names = ", ".join(f"`{name}`" for name in compiled.kernels)
        lines = _outdate(kept, f"its cell now defines {names} in the place of `{{}}`")
        if cell_id:
            made[cell_id] = compiled.kernels
        shell.user_ns.update(compiled.kernels)
        return dataclasses.replace(compiled, still_there="; ".join(lines))

    # Its type is that of the decorator in IPython which it is not called through.
    register: Any = shell.register_magic_function
    register(cuda, "line_cell", "cuda")
