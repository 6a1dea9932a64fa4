"""CUDA C in, a shared library for the CPU out: the host compiler's options and messages, the cache.

    program = build.program(source, "x.cu", ["add"], checked=False)
    program.library.simt_run_add          # loaded; simt/driver.py launches it

The source is not changed, except for `extern __shared__`, which a host compiler does not know.
simt.h defines the keywords and functions of CUDA C.

A *checked* build also uses the compiler's sanitizers (thread, bounds, alignment, ...). Their
instrumentation calls our functions (checks.cpp) instead of those of the sanitizers' libraries.

The cache keeps compiled objects by their content. An entry that is damaged, or that another user
can have written, is compiled again.
"""

import _ctypes
import contextlib
import ctypes
import functools
import gc
import hashlib
import itertools
import json
import operator
import os
import pathlib
import platform
import re
import shutil
import subprocess
import tempfile
import threading
import weakref
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from ..backends import Compiler, cache_dir, find_compiler, may_be_loaded
from ..errors import BackendError, CompileError
from ..files import from_cache
from ..headers import HOST_STUBS, curand_folder
from ..host_code import device_variables
from ..notebook import notice
from ..source import (
    DECLARATOR,
    INCLUDE,
    LINE,
    base_name,
    kernel_positions,
    line_number,
    namespaces,
    scopes,
    split_list,
    without_comments,
)

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
    # A __shared__ array whose elements have a constructor that does nothing needs no lock.
    "-fno-threadsafe-statics",
    # new may return null.
    "-fcheck-new",
    "-fno-math-errno",
    "-fno-finite-loops",
    "-fno-optimize-sibling-calls",
    "-fstack-clash-protection",
    "-fwrapv",
    "-w",
)
FAST = ("-O2", "-g1")
# -O1 without the passes that would drop or move accesses before they are instrumented, or make
# vectors of them: clang does not instrument those, and zig compiles for the machine's own vectors.
CHECKED = (
    "-O1",
    "-g",
    "-DSIMT_CHECKED",
    "-fsanitize=thread",
    "-fsanitize=alignment,object-size,integer-divide-by-zero,shift-exponent,float-cast-overflow",
    # Reports walk the stack.
    "-fno-omit-frame-pointer",
)
# Local variables are filled with a byte that reports recognise. g++ has it since version 12.
FILLED = "-ftrivial-auto-var-init=pattern"
# Variants of a checked build, for a second launch that tells more about a mistake of the first.
ZEROED = ("-ftrivial-auto-var-init=zero",)
OVERFLOWS = ("-fno-wrapv", "-fsanitize=signed-integer-overflow")
# What four bytes hold then.
PATTERNS = {"g++": 0xFEFEFEFE, "clang": 0xAAAAAAAA, "zig": 0xAAAAAAAA}
# A function that uses these registers saves its caller's on the stack, between its local variables
# and its return address. Without them an access behind a local array hits the return address first,
# which the checks detect.
_NO_SAVED_REGISTERS = (
    tuple(f"-ffixed-{register}" for register in ("rbx", "r12", "r13", "r14", "r15"))
    if platform.machine() == "x86_64"
    else ()
)
CHECKED_BY = {
    "g++": (
        "-fsanitize=bounds",
        "-fno-tree-fre",
        "-fno-tree-dse",
        "-fno-tree-loop-im",
        "-fno-tree-pta",
        "-fno-tree-dce",
        # This pass would store a struct such as float4 member by member.
        "-fno-tree-sra",
        "--param=tsan-instrument-func-entry-exit=0",
        "--param=tsan-distinguish-volatile=1",
        *_NO_SAVED_REGISTERS,
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
# Without this a function that ends without its return statement would run into the next function.
RETURNS = ("-fsanitize=return",)
# A pattern in a source or in a compiler's message -> the feature that only a GPU has.
GPU_ONLY = {
    r"simt_inline_PTX\w*|\b(?:__)?asm(?:__)?\b": "inline PTX (asm)",
    r"\bwmma\b|\bnvcuda\b|\bmma\.h": "tensor cores (wmma)",
    r"\btex[123]D\w*|\bsurf[123]D\w*|cuda\w*(?:ture|face)Object_t|CU\w+Object": "textures",
    r"\b__pipeline_\w+|\bcuda_pipeline\.h|\bcuda/pipeline\b": "asynchronous copies",
    r"\bcuda/(?!pipeline\b)[\w/]+": "a header of libcu++",
    r"\b__cluster_\w+|\bcluster_group\b": "thread block clusters",
    r"\bcub\b": "cub",
    r"\bthrust\b": "thrust",
    r"\bcuda_fp8\.h|\b__nv_fp8\w*": "8-bit floating-point numbers (fp8)",
}


class Program:
    """A compiled source.

    Args:
        text, filename, names: as program() got them
        runtime: ctypes library of the executor
        image: the bytes of the kernels' library, for symbols and lines
    """

    def __init__(self, text, filename, names, runtime, image):
        self.text, self.filename, self.names = text, filename, names
        self.runtime = runtime
        self.image = image
        self.library = _loaded(image)
        # Name -> address, and the bytes there, of each variable in device memory. A launch sets
        # them first, and kernels of several modules share a program: one at a time (`lock`).
        self.variables = {v.name: self._variable(v.name) for v in device_variables(text)}
        self.lock = threading.Lock()
        # ctypes itself never unloads a library.
        unload = weakref.finalize(self, _ctypes.dlclose, self.library._handle)
        unload.atexit = False

    def _variable(self, name: str) -> tuple[int, bytes]:
        try:
            variable = getattr(self.library, f"simt_variable_{name}")
        except AttributeError:
            # An #if leaves it out.
            return 0, b""
        variable.restype = ctypes.c_void_p
        size = ctypes.c_size_t()
        address = variable(ctypes.byref(size))
        return address, ctypes.string_at(address, size.value)

    def parameters(self, name: str) -> list[tuple[str, int]]:
        """(letter, bytes) of each parameter of a kernel: p pointer, s struct, n number."""
        letters = ctypes.create_string_buffer(4096)
        sizes = (ctypes.c_int * 4096)()
        try:
            parameters = getattr(self.library, f"simt_parameters_{symbol(name)}")
        except AttributeError:
            raise CompileError(
                f"kernel {name} is not there on the CPU: an #if leaves it out"
            ) from None
        count = parameters(letters, sizes)
        return [(letters.raw[i : i + 1].decode(), sizes[i]) for i in range(count)]


def symbol(name: str) -> str:
    """A kernel's name as a part of C names: `scale<float>` has others than `scale`."""
    if name.isidentifier():
        return name
    return f"{re.sub(r'[^0-9A-Za-z]+', '_', name)}{zlib.crc32(name.encode()):08x}"


# Of our temporary files and folders.
PREFIX = "gpuaccel-simt-"


def _loaded(image: bytes) -> ctypes.CDLL:
    """Load a library. The loader needs a file, but only until it has read it."""
    with tempfile.NamedTemporaryFile(prefix=PREFIX, suffix=".so") as file:
        file.write(image)
        file.flush()
        return ctypes.CDLL(file.name)


# Once per process: a kernel's library finds the executor that is loaded by its name.
_loaded_executor = functools.cache(_loaded)


def compiler() -> Compiler:
    """The host compiler.

    Raises:
        BackendError: it says how to get one when there is none.
    """
    result, reason = find_compiler()
    if result is None:
        raise BackendError(f"running a kernel on the CPU (simt) needs a C++ compiler: {reason}")
    return result


def fill_pattern(host: Compiler) -> int:
    """Four bytes of an uninitialised local variable in a checked build; 0 if undefined."""
    if host.kind == "g++" and int(host.version.split(".")[0]) < 12:
        return 0
    return PATTERNS[host.kind]


def _flags(checked: bool, variant: tuple[str, ...]) -> tuple[str, ...]:
    if not checked:
        return FAST
    host = compiler()
    flags = (*CHECKED, *CHECKED_BY["clang" if host.kind == "zig" else host.kind])
    return (*flags, *((FILLED,) if fill_pattern(host) else ()), *variant)


def _commands(host: Compiler, flags, source, output, headers) -> list[tuple[str, ...]]:
    """The commands that compile and link. Linking leaves out the sanitizers' own libraries.

    All links have the options FAST: zig compiles a support library for each set of optimization
    options that it links with, which takes seconds.
    """
    # A mistake in a macro is at the line that uses it.
    # Source lines are added by _source_lines, for files that do not exist as well.
    messages: tuple[str, ...] = (
        *("-fmax-errors=5", "-ftrack-macro-expansion=0", "-fno-diagnostics-show-caret"),
    )
    if host.kind != "g++":
        messages = ("-ferror-limit=5", "-fno-caret-diagnostics")
    compiled = f"{output}.o"
    return [
        (
            *(*host.command, *COMMON, *messages, *flags, *RETURNS, *headers),
            *("-c", str(source), "-o", compiled),
        ),
        (*host.command, *FAST, "-shared", compiled, "-o", str(output)),
    ]


# Headers of CUDA -> ours with their content.
HEADERS = {
    **dict.fromkeys(("cuda_fp16.h", "cuda_fp16.hpp", "cuda_bf16.h", "cuda_bf16.hpp"), "half.h"),
    **dict.fromkeys(
        (
            "cooperative_groups.h",
            "cooperative_groups/reduce.h",
            "cooperative_groups/scan.h",
            "cooperative_groups/memcpy_async.h",
            "cuda/barrier",
        ),
        "cooperative_groups.h",
    ),
}
SIMT_HEADERS = ("simt.h", "runtime.h", "half.h", "cooperative_groups.h", "<command-line>")
OWN_HEADERS = ("half.h", "cooperative_groups.h")


def _with_headers(source: str) -> tuple[str, list[str]]:
    """The source without #includes of CUDA's headers, and the headers of this package it needs."""
    text = without_comments(source, strings=True)
    needed = {}
    for match in INCLUDE.finditer(text):
        if match[1] in HEADERS:
            needed[HEADERS[match[1]]] = True
            blanks = " " * len(match[0])
            source = source[: match.start()] + blanks + source[match.end() :]
    return source, list(needed)


# Seconds of compiling after which a notice is shown.
QUIET = 2.0
# Seconds after which a compiler is taken to hang.
LIMIT = 900.0


def _environment(folder: pathlib.Path) -> dict[str, str]:
    """English messages, and zig's cache in our cache folder, else in this one."""
    cache = _zig_folder(cache_dir() or folder)
    return {"ZIG_GLOBAL_CACHE_DIR": str(cache), **os.environ, "LC_ALL": "C"}


@functools.cache
def _zig_folder(root: pathlib.Path) -> pathlib.Path:
    """zig's cache in a folder, emptied first if another user can have written a file in it."""
    folder = root / "zig"
    if _has_foreign_files(folder):
        shutil.rmtree(folder)
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _has_foreign_files(folder: pathlib.Path) -> bool:
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            # A zig of another process removes files meanwhile.
            with contextlib.suppress(FileNotFoundError):
                if not may_be_loaded(os.lstat(os.path.join(parent, name))):
                    return True
    return False


def _run(command, subject: str, explain_log) -> None:
    """Run a compiler.

    Args:
        subject: what is compiled, for messages
        explain_log: maps the compiler's messages to the text of the CompileError

    Raises:
        CompileError: when the source does not compile, BackendError when the compiler does not run.
    """
    output = pathlib.Path(command[command.index("-o") + 1])
    try:
        with subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=_environment(output.parent),
            # zig keeps files, and links them into later libraries.
            umask=0o077,
        ) as process:
            try:
                log = _messages(process, subject, command).strip()
            except BaseException:
                process.kill()
                raise
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BackendError(f"the host compiler {command[0]} could not be run: {error}") from None
    if process.returncode:
        raise CompileError(explain_log(log), log)
    if not output.exists():
        raise BackendError(
            f"the host compiler {command[0]} ended without an error, but wrote nothing: "
            "is it a compiler?"
        )


def _messages(process, subject, command) -> str:
    """The compiler's messages. A slow compilation shows a notice."""
    try:
        return process.communicate(timeout=QUIET)[1]
    except subprocess.TimeoutExpired:
        name = "zig" if "ziglang" in command else os.path.basename(command[0])
        text = f"{name} is compiling {subject} for the CPU; the result is kept for the next time"
        with notice(text):
            return process.communicate(timeout=LIMIT)[1]


@dataclass(frozen=True)
class Runtime:
    """The loaded executor.

    Attributes:
        name: by which the libraries of kernels find it; other sources and options have another.
        tls: the macro that says how it stores thread-local variables.
    """

    name: str
    library: ctypes.CDLL
    image: bytes
    tls: tuple[str, ...]


SLOWER_TLS = ('-DSIMT_TLS=__attribute__((tls_model("global-dynamic")))',)


def _key(*facts) -> str:
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


RUNTIME_SOURCES = ("runtime.h", "executor.h", "executor.cpp", "checks.cpp")


@functools.cache
def runtime(checked: bool, tls: tuple[str, ...] = ()) -> Runtime:
    """The executor, with or without the checks.

    It is compiled once per machine and loaded once per process. The fast kind of thread-local
    variables needs space that other libraries may have used up. The slower kind always loads.
    """
    host = compiler()
    files = [HERE / name for name in RUNTIME_SOURCES]
    sources = [HERE / "executor.cpp"]
    # Reports show lines of kernels only.
    options = [*FAST, "-g0", *tls]
    if checked:
        sources.append(HERE / "checks.cpp")
        options += ["-DSIMT_CHECKED", "-fno-omit-frame-pointer"]
    texts = [file.read_text() for file in files]
    key = _key(str(host), platform.machine(), checked, COMMON, options, texts)
    name = f"libsimt-{key[:16]}.so"

    def compile():
        with tempfile.TemporaryDirectory(prefix=PREFIX) as folder:
            output = pathlib.Path(folder) / "runtime.so"
            command = (
                *host.command,
                *COMMON,
                *options,
                *map(str, sources),
                "-shared",
                f"-Wl,-soname,{name}",
                "-lpthread",
                "-o",
                str(output),
            )
            _run(
                command,
                "gpuaccel's runtime",
                lambda log: f"gpuaccel's CPU runtime does not compile with {host}:\n{log}",
            )
            return output.read_bytes()

    try:
        return from_cache(
            "simt", key, compile, lambda image: Runtime(name, _loaded_executor(image), image, tls)
        )
    except OSError as error:
        if not tls:
            return runtime(checked, SLOWER_TLS)
        raise BackendError(f"gpuaccel's CPU runtime cannot be loaded: {error}") from None


_lock = threading.Lock()
# Programs that some kernel uses. Others are unloaded.
_programs: weakref.WeakValueDictionary[str, Program] = weakref.WeakValueDictionary()
# After this many programs, unused kernels are garbage-collected: each is in a reference cycle.
COLLECT_AFTER = 32
_loads = itertools.count(1)


def program(
    source: str,
    filename: str,
    names: list[str],
    checked: bool,
    variant: tuple[str, ...] = (),
) -> Program:
    """The library of a whole source, from this process, the cache, or the compiler.

    Args:
        source: CUDA C with everything it needs, common.cuh included
        filename: what error messages call it
        names: its kernels
        checked: with the instrumentation of the checks
        variant: further options of a checked build: ZEROED, OVERFLOWS

    Returns:
        A program that is shared by all who ask for it.

    Raises:
        CompileError: with the compiler's messages. A feature that only a GPU has is named first.
    """
    flags = _flags(checked, variant)
    with _lock:
        host = compiler()
        executor = runtime(checked)
        headers = [(HERE / name).read_text() for name in ("simt.h", "runtime.h", *OWN_HEADERS)]
        key = _key(
            source,
            filename,
            names,
            checked,
            str(host),
            platform.machine(),
            headers,
            executor.name,
            (COMMON, RETURNS, flags, FAST),
            curand.read_text("latin-1") if (curand := _curand(source)) else None,
        )
        result = _programs.get(key)
        if result is None:
            if next(_loads) % COLLECT_AFTER == 0:
                gc.collect()
            text = translated(source, names)
            try:
                result = from_cache(
                    "simt",
                    key,
                    lambda: _compile(text, source, filename, flags, host, executor),
                    lambda image: Program(source, filename, names, executor.library, image),
                )
                _programs[key] = result
            except OSError as error:
                raise BackendError(
                    f"{filename}: the compiled kernel cannot be loaded: {error}"
                ) from None
        return result


def _curand(source: str) -> pathlib.Path | None:
    """Path of NVIDIA's curand_kernel.h, if it is installed and the source includes it."""
    if "curand_kernel.h" not in source or (folder := curand_folder()) is None:
        return None
    return pathlib.Path(folder, "curand_kernel.h")


def _compile(text, written, filename, flags, host, executor) -> bytes:
    """The library of a translated text. written: the source that messages show."""
    with tempfile.TemporaryDirectory(prefix=PREFIX) as folder:
        source = pathlib.Path(folder) / "kernel.cpp"
        output = pathlib.Path(folder) / "kernel.so"
        text, ours = _with_headers(text)
        source.write_text(text)

        def explain_log(log):
            lines = []
            for line in log.replace(f"{source}:", "").splitlines():
                if "In file included" not in line:
                    lines += [line, *_source_lines(line, written)]
            log = "\n".join(lines)
            reason = explain(text, log, filename)
            return f"{reason}{filename} does not compile for the CPU ({host}):\n{log}"

        headers = [*executor.tls]
        for name in ("simt.h", *ours):
            headers += ["-include", str(HERE / name)]
        if curand := _curand(text):
            # As a GPU reads it.
            wrapped = f'#define __CUDA_ARCH__ 900\n#include "{curand}"\n#undef __CUDA_ARCH__\n'
            for name, content in {**HOST_STUBS, "curand_kernel.h": wrapped}.items():
                stub = pathlib.Path(folder, "headers", name)
                stub.parent.mkdir(parents=True, exist_ok=True)
                stub.write_text(content)
            headers.append(f"-I{folder}/headers")
        compiling, linking = _commands(host, flags, source, output, headers)
        try:
            _run(compiling, filename, explain_log)
        except CompileError as error:
            if "always_inline" not in str(error):
                raise
            # A __forceinline__ function is called through a pointer.
            headers.insert(0, "-DSIMT_NO_FORCED_INLINE")
            compiling, linking = _commands(host, flags, source, output, headers)
            _run(compiling, filename, explain_log)
        # The kernel's library gets the executor's name from its file.
        runtime_file = pathlib.Path(folder) / "runtime.so"
        runtime_file.write_bytes(executor.image)
        _run((*linking, str(runtime_file)), filename, explain_log)
        return output.read_bytes()


def _source_lines(message: str, text: str) -> list[str]:
    """The source line of a compiler's error and a caret below the column, as in NVRTC's messages.

    The compiler cannot print them itself, because #line names files that do not exist.
    """
    place = re.match(r"([^:\n]+):(\d+):(\d+): (?:fatal )?error", message)
    if place is None:
        return []
    line = text_line(text, place[1], int(place[2]))
    if not line:
        return []
    return [f"    {line}", f"    {' ' * (int(place[3]) - 1)}^"]


def _with_one_index(source: str) -> str:
    """Write `(c ? a : b)[i]` as `simt_same(c ? a : b)[i]`.

    g++ turns it into `c ? a[i] : b[i]`, where its sanitizers compute a part of `i` only in the
    first branch.
    """
    blank = without_comments(source)
    for bracket in reversed(list(re.finditer(r"\)\s*\[", blank))):
        depth = 1
        start = bracket.start()
        is_choice = False
        while depth and start:
            start -= 1
            depth += {")": 1, "(": -1}.get(blank[start], 0)
            is_choice |= depth == 1 and blank[start] == "?"
        before = re.search(r"(\w+|[\])])\s*$", blank[max(0, start - 200) : start])
        # After any other word the parentheses belong to a call, an `if` or the like.
        stands_alone = before is None or before[1] in ("return", "else", "do", "case")
        if is_choice and stands_alone:
            source = source[:start] + "simt_same" + source[start:]
    return source


_ALIGNMENT = r"(?:__align__|alignas|__attribute__)\s*\((?:[^()]|\([^()]*\))*\)"
_BEFORE_EXTERN = re.compile(rf"(?:(?:\b(?:__shared__|volatile|const|static)\b|{_ALIGNMENT})\s*)*\Z")


def _is_in_directive(blank: str, position: int) -> bool:
    """True if the position is in a line that begins with #, or in its continuation."""
    start = blank.rfind("\n", 0, position) + 1
    while start > 1 and blank[start - 2] == "\\":
        start = blank.rfind("\n", 0, start - 1) + 1
    return blank[start:position].lstrip().startswith("#")


def _dynamic_arrays(blank: str) -> Iterator[tuple[int, int, list[tuple[str, str]]]]:
    """The declarations of dynamic shared memory in a text without comments.

    Each is (start, end, [(name, the expression that points to it)]).
    """
    for keyword in re.finditer(r"\bextern\b", blank):
        before = _BEFORE_EXTERN.search(blank, max(0, keyword.start() - 200), keyword.start())
        start = before.start() if before else keyword.start()
        stop = ";"
        if _is_in_directive(blank, start):
            # In a macro the semicolon may stand behind its use.
            stop = r";|(?<!\\)(?=\n)|$"
        end = re.compile(rf"[^;{{}}]*?(?:{stop})").match(blank, keyword.end())
        if end is None or "__shared__" not in blank[start : end.end()]:
            continue
        text = blank[start : end.end()].rstrip(";").replace("\\\n", " ")
        text = re.sub(_ALIGNMENT, " ", text)
        text = re.sub(r"\b(?:extern|__shared__|static)\b", " ", text)
        ctype = None
        arrays = []
        for part in split_list(" ".join(text.split())):
            declarator = DECLARATOR.fullmatch(part)
            if declarator is None:
                break
            ctype = declarator[1] if ctype is None else ctype
            rest = re.sub(r"^\[[^\]]*\]\s*", "", declarator[3])
            arrays.append((declarator[2], f"(({ctype} (*){rest})simt_dynamic())"))
        yield start, end.end(), arrays


def _with_dynamic_arrays(source: str) -> tuple[str, list[str]]:
    """The source with pointers for `extern __shared__` arrays, and macros for those at file scope.

    A pointer at file scope would be set only once, before any launch.
    """
    blank = without_comments(source)
    macros = []
    pieces = []
    position = 0
    for start, end, arrays in _dynamic_arrays(blank):
        pieces.append(source[position:start])
        if "" in scopes(blank, start) or _is_in_directive(blank, start):
            pieces += [f"auto {name} = {pointer};" for name, pointer in arrays]
        else:
            macros += [f"#define {name} {pointer}\n" for name, pointer in arrays]
        lines = blank[start:end]
        pieces.append("\\\n" * lines.count("\\\n") or "\n" * lines.count("\n"))
        position = end
    return "".join([*pieces, source[position:]]), list(dict.fromkeys(macros))


def _with_marks(source: str, positions: list[tuple[str, int]]) -> str:
    """The source with a `#define <mark> <its namespace>` above each position.

    An #if that excludes the position thus excludes its mark.
    """
    blank = without_comments(source)
    pieces = []
    position = 0
    for mark, place in positions:
        start = source.rfind("\n", 0, place) + 1
        line = line_number(source, place)
        before = ""
        end, begin = (source.find(sign, start, place) for sign in ("*/", "/*"))
        if end >= 0 and not 0 <= begin < end:
            # The line begins inside of a comment.
            start, before = end + len("*/"), "\n"
        scope = "::".join(namespaces(blank, place))
        pieces += [source[position:start], f"{before}#define {mark} {scope}\n#line {line}\n"]
        position = start
    return "".join([*pieces, source[position:]])


def translated(source: str, names: list[str]) -> str:
    """The source for the host compiler.

    It is in an unnamed namespace, with `extern __shared__` replaced, and exports each kernel.
    """
    source = _with_one_index(source)
    # __shared__ is static already. The blanks keep all positions.
    for match in re.finditer(r"\bstatic(?=\s+__shared__)", without_comments(source)):
        source = source[: match.start()] + " " * len("static") + source[match.end() :]
    source, macros = _with_dynamic_arrays(source)
    own_names = {base_name(name) for name in names}
    marks = [(f"SIMT_HAS_{name}", at) for name, at in kernel_positions(source) if name in own_names]
    variables = device_variables(source)
    marks += [(f"SIMT_HAS_{variable.name}", variable.position) for variable in variables]
    source = _with_marks(source, sorted(marks, key=operator.itemgetter(1)))
    exports = [
        f"#ifdef SIMT_HAS_{base_name(name)}\n"
        f"SIMT_EXPORT({symbol(name)}, SIMT_HAS_{base_name(name)}, {name})\n#endif\n"
        for name in names
    ]
    exports += [
        f"#ifdef SIMT_HAS_{variable.name}\n"
        f"SIMT_EXPORT_VARIABLE({variable.name}, SIMT_HAS_{variable.name})\n#endif\n"
        for variable in variables
    ]
    return "".join(
        [
            '#line 1 "namespace"\n',
            *macros,
            "namespace {\n",
            source,
            '\n}\n#line 1 "exports"\n',
            *exports,
        ]
    )


def text_line(text: str, file: str, line: int) -> str | None:
    """A line of one of the files that make up a whole source; #line says where each begins."""
    name = ""
    parts = list(LINE.finditer(text))
    for part, following in zip(parts, [*parts[1:], None]):
        name = re.sub(r"\\(.)", r"\1", part[2] or "") or name
        lines = text[part.end() : following.start() if following else len(text)].split("\n")
        index = line - int(part[1])
        is_file = name.rsplit("/", 1)[-1] == file.rsplit("/", 1)[-1]
        # The last one, without a line break, is the next #line's.
        if is_file and 0 <= index < len(lines) - (following is not None):
            return lines[index]
    return None


UNKNOWN_NAME = re.compile(
    r"'(\w+)' was not declared|undeclared identifier '(\w+)'|no member named '(\w+)'"
)


def explain(text: str, log: str, filename: str) -> str:
    """A sentence on the features in a compiler's messages that only a GPU has, or ""."""
    # A path may contain words that these patterns match.
    words = log.replace(filename, "")
    features = [name for pattern, name in GPU_ONLY.items() if re.search(pattern, words)]
    lines = re.findall(r"^([^\s:]+):(\d+):", log, re.M)
    line = next((line for file, line in lines if os.path.basename(file) not in SIMT_HEADERS), None)
    place = f"{filename}, line {line}:" if line else f"{filename}:"
    if re.search(r"\bcurand_kernel\.h'?:? (?:No such file|file not found)", log):
        return (
            f"{place} curand_kernel.h is in NVIDIA's wheel: pip install nvidia-curand-cu12, or set "
            "CUDA_HOME to a toolkit.\n"
        )
    if features:
        return (
            f"{place} this uses {' and '.join(features)}, which only a GPU can run. Put it between "
            "#ifdef __CUDA_ARCH__ and #else with a plain version behind #else, or run it on a "
            "GPU.\n"
        )
    unknown = dict.fromkeys("".join(names) for names in UNKNOWN_NAME.findall(log))
    # The compiler prints the line. A name that is called or has a member is no plain variable.
    used_as_more = [
        name for name in unknown if re.search(rf"\b{name}\s*(\(|<\w+>|::|\.)|\.{name}\b|'__", log)
    ]
    if unknown and "__global__" in text and not used_as_more:
        return (
            f"{place} {', '.join(unknown)}: not declared. In C each variable is declared, with "
            "its type, before it is used. Is a name misspelled, or a type missing?\n"
        )
    if unknown and "__global__" in text:
        return (
            f"{place} the CPU does not have {', '.join(unknown)}. Where a GPU has it, put it "
            "between #ifdef __CUDA_ARCH__ and #else with a plain version behind #else (the "
            "functions of the CPU are in gpuaccel/simt/simt.h).\n"
        )
    return ""
