"""CUDA C in, a shared library for the CPU out: the host compiler's command line, its messages, and the cache.

    >>> program = build.program(source, "x.cu", ["add"], {"GRAD_T": "float"}, checked=False)
    >>> program.library.simt_run_add          # loaded; simt/driver.py launches it

The source is not changed, but for `extern __shared__` (a host compiler knows no such thing). simt.h gives its words a meaning. A
*checked* build also asks the compiler for the instrumentation of its sanitizers (thread, bounds, alignment, ...), but is linked
with our own callbacks (checks.cpp), not with theirs. Compiled objects are kept by content; a damaged one is compiled again.
"""

import ctypes
import functools
import hashlib
import json
import os
import pathlib
import platform
import re
import subprocess
import tempfile
import threading
from dataclasses import dataclass

from ..backends import Compiler, cache_dir, find_compiler
from ..errors import BackendError, CompileError
from ..files import read_entry, write_entry
from ..notebook import notice
from ..source import without_comments

HERE = pathlib.Path(__file__).parent
COMMON = (
    "-std=c++17",
    "-nostdinc++",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-math-errno",
    "-fno-finite-loops",
    "-fno-optimize-sibling-calls",
    "-fstack-clash-protection",
    "-fwrapv",
    "-w",
)
FAST = ("-O2", "-g1")
# -O1, but without the passes that would drop or move the very accesses that are to be seen (or make vectors of them, of which clang
# tells nothing: zig compiles for the machine's own instructions).
CHECKED = (
    "-O1",
    "-g",
    "-DSIMT_CHECKED",
    "-fsanitize=thread",
    "-fsanitize=alignment,object-size,integer-divide-by-zero,shift-exponent",
)
CHECKED_BY = {
    "g++": (
        "-fsanitize=bounds",
        "-fno-tree-fre",
        "-fno-tree-dse",
        "-fno-tree-loop-im",
        "-fno-tree-pta",
        "-fno-tree-dce",
        "--param=tsan-instrument-func-entry-exit=0",
        "--param=tsan-distinguish-volatile=1",
    ),
    "clang": (
        "-gdwarf-4",
        "-fsanitize=array-bounds",
        "-fno-vectorize",
        "-fno-slp-vectorize",
        *("-mllvm", "-tsan-instrument-func-entry-exit=0"),
        *("-mllvm", "-tsan-instrument-read-before-write=1"),
        *("-mllvm", "-tsan-distinguish-volatile=1"),
    ),
}
# What only a GPU has, as it shows in source or in the compiler's message -> how it is called.
GPU_ONLY = {
    r"simt_inline_PTX\w*|\b(?:__)?asm(?:__)?\b": "inline PTX (asm)",
    r"\bwmma\b|\bnvcuda\b|\bmma\.h": "tensor cores (wmma)",
    r"\bcooperative_groups(?:\.h)?\b|\bcg::": "cooperative groups",
    r"\btex[123]D\w*|\bsurf[123]D\w*|cudaTextureObject_t|cudaSurfaceObject_t": "textures",
    r"\b__pipeline_\w+|\bcuda_pipeline\.h|\bmemcpy_async\b|\bcuda/\w+": "asynchronous copies",
    r"\b__cluster_\w+|\bcluster_group\b": "thread block clusters",
    r"<<<": "a launch inside a kernel",
    r"\bcudaLaunch\w+|\bcudaMalloc\w*|\bcudaMemcpy\w*": "calls of the CUDA runtime",
}


class Program:
    """A compiled source: its text, `library` and `runtime` (ctypes), and the library's bytes, for symbols and lines."""

    def __init__(self, text, runtime, image):
        self.text, self.runtime, self.image = text, runtime, image
        self.library = ctypes.CDLL(_place(image))

    def parameters(self, name: str) -> "list[tuple[str, int]]":
        """(letter, bytes) of each parameter of a kernel, as the compiler sees it: p pointer, s struct, n number."""
        letters, sizes = ctypes.create_string_buffer(4096), (ctypes.c_int * 4096)()
        count = getattr(self.library, f"simt_parameters_{name}")(letters, sizes)
        return [(letters.raw[i : i + 1].decode(), sizes[i]) for i in range(count)]


@functools.cache
def _own_folder() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="gpuaccel-simt-")


def _place(image: bytes) -> str:
    """The path of a file of this process with these bytes; the loader wants a file."""
    path = pathlib.Path(_own_folder().name) / f"{hashlib.sha256(image).hexdigest()[:32]}.so"
    if not path.exists():
        path.write_bytes(image)
    return str(path)


def compiler() -> Compiler:
    """The host compiler; BackendError that says how to get one when there is none."""
    found, reason = find_compiler()
    if found is None:
        raise BackendError(
            f"running a kernel on the CPU (simt) needs a C++ compiler: {reason}. Install g++ or clang++ "
            "(Debian, Ubuntu: apt install g++), or pip install ziglang, or name one in GPUACCEL_CXX"
        )
    return found


def _commands(made: Compiler, checked: bool, source, output, headers) -> "list[tuple[str, ...]]":
    """Compile, then link: the sanitizers' own libraries must not come along.

    zig compiles a support library for each set of optimization options that it links with, for seconds: all links have FAST."""
    few = "-fmax-errors=5" if made.kind == "g++" else "-ferror-limit=5"
    flags = (
        (*CHECKED, *CHECKED_BY["clang" if made.kind == "zig" else made.kind]) if checked else FAST
    )
    middle = str(output) + ".o"
    return [
        (
            *made.command,
            *_ours(made),
            *COMMON,
            few,
            *flags,
            *headers,
            "-c",
            str(source),
            "-o",
            middle,
        ),
        (*made.command, *_ours(made), *FAST, "-shared", middle, "-o", str(output)),
    ]


def _ours(made: Compiler) -> "tuple[str, ...]":
    """zig brings callbacks of its own, unless it is told not to, in front of all other options and at each step."""
    return ("-fno-sanitize=undefined",) if made.kind == "zig" else ()


QUIET = 2.0  # seconds of compiling after which people are told
LIMIT = 900.0  # seconds after which a compiler counts as hanging


def _environment() -> "dict[str, str]":
    """The environment of a compiler: messages in English, and zig keeps what it made of its own libraries in our cache folder."""
    kept = (cache_dir() or pathlib.Path(_own_folder().name)) / "zig"
    return {"ZIG_GLOBAL_CACHE_DIR": str(kept), **os.environ, "LC_ALL": "C"}


def _run(command, subject: str, what) -> None:
    """Run a compiler. subject: what is compiled; what: its messages -> the error's text."""
    try:
        with subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=_environment(),
        ) as process:
            try:
                log = _messages(process, subject, command).strip()
            except BaseException:
                process.kill()
                raise
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BackendError(f"the host compiler {command[0]} could not be run: {error}") from None
    if process.returncode == 0 and not os.path.exists(command[command.index("-o") + 1]):
        raise BackendError(
            f"the host compiler {command[0]} ended without an error, but wrote nothing: is it a compiler?"
        )
    if process.returncode:
        raise CompileError(what(log), log)


def _messages(process, subject, command) -> str:
    """What a compiler says until it ends; people are told that it is at work if that takes longer than they expect."""
    try:
        return process.communicate(timeout=QUIET)[1]
    except subprocess.TimeoutExpired:
        name = "zig" if "ziglang" in command else os.path.basename(command[0])
        with notice(
            f"{name} is compiling {subject} for the CPU; the result is kept for the next time"
        ):
            return process.communicate(timeout=LIMIT)[1]


@dataclass(frozen=True)
class Runtime:
    """The loaded runtime: library, path, bytes, and the macro that says how it keeps thread-local variables."""

    library: ctypes.CDLL
    path: str
    image: bytes
    tls: "tuple[str, ...]"


SLOWER_TLS = ('-DSIMT_TLS=__attribute__((tls_model("global-dynamic")))',)


@functools.cache
def runtime(checked: bool, tls: "tuple[str, ...]" = ()) -> Runtime:
    """The executor, with or without the checks. Compiled once per machine, loaded once per process."""
    made = compiler()
    files = [HERE / name for name in ("runtime.h", "executor.h", "executor.cpp", "checks.cpp")]
    sources = [HERE / "executor.cpp", *([HERE / "checks.cpp"] if checked else [])]
    options = (*FAST, *(("-DSIMT_CHECKED",) if checked else ()), *tls)
    facts = [
        str(made),
        platform.machine(),
        checked,
        COMMON,
        options,
        [f.read_text() for f in files],
    ]
    key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    image = read_entry("simt", key)
    for attempt in (0, 1):
        if image is None or attempt:
            with tempfile.TemporaryDirectory() as folder:
                output = pathlib.Path(folder) / "runtime.so"
                _run(
                    (
                        *made.command,
                        *_ours(made),
                        *COMMON,
                        *options,
                        *map(str, sources),
                        "-shared",
                        f"-Wl,-soname,libsimt-{key[:16]}.so",
                        "-lpthread",
                        "-o",
                        str(output),
                    ),
                    "gpuaccel's runtime",
                    lambda log: f"gpuaccel's CPU runtime does not compile with {made}:\n{log}",
                )
                image = output.read_bytes()
            write_entry("simt", key, image)
        path = _place(image)
        try:
            return Runtime(ctypes.CDLL(path), path, image, tls)
        except OSError as error:
            if (
                "static TLS" in str(error) and not tls
            ):  # no room left for the fast kind of thread-local variables
                return runtime(checked, SLOWER_TLS)
            if attempt:
                raise BackendError(f"gpuaccel's CPU runtime cannot be loaded: {error}") from None


_lock = threading.Lock()
_programs: "dict[str, Program]" = {}


def program(
    source: str, filename: str, names: "list[str]", defines: "dict[str, str]", checked: bool
) -> Program:
    """The library of a whole source (common.cuh included), from this process, the cache, or the compiler.

    names: its kernels. Raises CompileError with the compiler's message; a construct that only a GPU has is named first."""
    with _lock:
        made = compiler()
        loaded = runtime(checked)
        headers = [(HERE / name).read_text() for name in ("simt.h", "runtime.h")]
        facts = [
            source,
            filename,
            names,
            sorted(defines.items()),
            checked,
            str(made),
            platform.machine(),
            headers,
            hashlib.sha256(loaded.image).hexdigest(),
            COMMON,
            CHECKED,
            CHECKED_BY,
            FAST,
        ]
        key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
        if key not in _programs:
            image, text = read_entry("simt", key), translated(source, names)
            for attempt in (0, 1):
                if image is None or attempt:
                    image = _compile(text, filename, defines, checked, made, loaded)
                    write_entry("simt", key, image)
                try:
                    _programs[key] = Program(source, loaded.library, image)
                    break
                except OSError as error:
                    if attempt:
                        raise BackendError(
                            f"{filename}: the compiled kernel cannot be loaded: {error}"
                        ) from None
        return _programs[key]


def _compile(text, filename, defines, checked, made, loaded) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        source, output = pathlib.Path(folder) / "kernel.cpp", pathlib.Path(folder) / "kernel.so"
        source.write_text(text)
        macros = [f"-D{name}={value}" for name, value in sorted(defines.items())]

        def words(log):
            log = "\n".join(
                part
                for line in log.replace(f"{source}:", "").splitlines()
                if "In file included" not in line
                for part in (line, *_shown(line, text))
            )
            return f"{explain(text, log, filename)}{filename} does not compile for the CPU ({made}):\n{log}"

        compiling, linking = _commands(
            made, checked, source, output, [*loaded.tls, "-include", str(HERE / "simt.h"), *macros]
        )
        _run(compiling, filename, words)
        _run((*linking, loaded.path), filename, words)
        return output.read_bytes()


def _shown(message: str, text: str) -> "list[str]":
    """The source line that a compiler's message is about, and a caret, as NVRTC shows them (the compiler has no file to read)."""
    at = re.match(r"([^:\n]+):(\d+):(\d+): (?:fatal )?error", message)
    line = at and text_line(text, at[1], int(at[2]))
    return [] if not line else [f"    {line}", f"    {' ' * (int(at[3]) - 1)}^"]


_ALIGN = r"(?:__align__\s*\([^)]*\)\s*)?"
_DYNAMIC = re.compile(
    rf"extern\s+__shared__\s+{_ALIGN}([\w:]+(?:\s+\w+)*?)\s+{_ALIGN}(\w+)\s*\[\s*\]\s*;"
)


def _chosen_once(source: str) -> str:
    """(c ? a : b)[i] as simt_same(c ? a : b)[i]: g++ makes c ? a[i] : b[i] of it, in which its sanitizers compute a part of i in the first half only."""
    blank = without_comments(source)
    for m in reversed(list(re.finditer(r"\)\s*\[", blank))):
        depth, at, chooses = 1, m.start(), False
        while depth and at:
            at -= 1
            depth += {")": 1, "(": -1}.get(blank[at], 0)
            chooses |= depth == 1 and blank[at] == "?"
        before = re.search(r"(\w+|[\])])\s*$", blank[max(0, at - 200) : at])
        if chooses and (
            before is None or before[1] in ("return", "else", "do", "case")
        ):  # else it is a call, an if, ..
            source = source[:at] + "simt_same" + source[at:]
    return source


def translated(source: str, names: "list[str]") -> str:
    """The source as the host compiler gets it: in an unnamed namespace, `extern __shared__` replaced, one export per kernel."""
    source = _chosen_once(source)
    blank = without_comments(source)
    for m in reversed(
        list(re.finditer(r"\bstatic(?=\s+__shared__)", blank))
    ):  # __shared__ is static already
        source, blank = (text[: m.start()] + " " * 6 + text[m.end() :] for text in (source, blank))
    pieces, at, macros = [], 0, []
    for m in _DYNAMIC.finditer(blank):
        outside = blank.count("{", 0, m.start()) - blank.count("}", 0, m.start()) <= blank.count(
            'extern "C" {', 0, m.start()
        )
        if outside:  # a macro: at this place a pointer would be set once, before any launch
            macros.append(f"#define {m[2]} (({m[1]}*)simt_dynamic())\n")
        pieces += [
            source[at : m.start()],
            "" if outside else f"{m[1]}* {m[2]} = ({m[1]}*)simt_dynamic();",
            "\n" * m[0].count("\n"),
        ]
        at = m.end()
    exports = "".join(f"SIMT_EXPORT({name})\n" for name in names)
    return "".join(
        [
            '#line 1 "namespace"\n',
            *macros,
            "namespace {\n",
            *pieces,
            source[at:],
            '\n}\n#line 1 "exports"\n',
            exports,
        ]
    )


def text_line(text: str, file: str, line: int) -> "str | None":
    """A line of one of the files that a whole source is made of (they are told apart by #line)."""
    parts = re.split(r'^#line 1 "([^"\n]*)"\n', text, flags=re.M)
    for name, part in zip(parts[1::2], parts[2::2]):
        if name.rsplit("/", 1)[-1] == file.rsplit("/", 1)[-1]:
            lines = part.split("\n")
            return lines[line - 1] if 0 < line <= len(lines) else None
    return None


def explain(text: str, log: str, filename: str) -> str:
    """A sentence on each construct of the compiler's message that a CPU cannot run, and what to do; "" when there is none."""
    found = [name for pattern, name in GPU_ONLY.items() if re.search(pattern, log)]
    unknown = dict.fromkeys(
        re.findall(
            r"'(\w+)' was not declared|undeclared identifier '(\w+)'|no member named '(\w+)'", log
        )
    )
    if not found and unknown and "__global__" in text:
        names = ", ".join("".join(one) for one in unknown)
        return (
            f"{filename}: the CPU does not have {names}. Where a GPU has it, put it between #ifdef __CUDA_ARCH__ and #else with a plain "
            "version behind #else (what the CPU has stands in gpuaccel/simt/simt.h).\n"
        )
    if not found:
        return ""
    return (
        f"{filename} uses {' and '.join(found)}, which only a GPU can run. Put it between #ifdef __CUDA_ARCH__ and #else with a plain "
        "version behind #else, or run it on a GPU.\n"
    )
