"""`gpuaccel doctor` and `ga.doctor()`: what runs on this machine, and why."""

import html
import importlib.metadata
import json
import os
import pathlib
import platform
import warnings
from collections import Counter
from dataclasses import dataclass

import torch

from .. import __version__
from ..backends import backend, cache_dir, default_dtype, find_compiler, find_driver
from ..compiler import nvrtc
from ..errors import GpuaccelError
from .arguments import add_command


@dataclass(frozen=True)
class Doctor:
    """What runs here, and why.

    Attributes:
        facts: name -> value, in reading order; None: there is none.
        problems: one sentence each, empty when all is well.
    """

    facts: dict[str, str | list | None]
    problems: list[str]

    def rows(self):
        """(name, text) of every fact, then of every problem."""
        facts = [(name, _text(value)) for name, value in self.facts.items()]
        return facts + [("problem", problem) for problem in self.problems]

    def __str__(self):
        rows = self.rows()
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)

    __repr__ = __str__

    def _repr_html_(self):
        cells = "".join(
            f'<tr><th style="text-align:left">{html.escape(name)}</th>'
            f'<td style="text-align:left">{html.escape(text)}</td></tr>'
            for name, text in self.rows()
        )
        return f"<table>{cells}</table>"


def _text(value):
    """A fact in words."""
    if value is None:
        return "none"
    return " ".join(value) if isinstance(value, list) else str(value)


def doctor() -> Doctor:
    """Look at this machine: backend and reason, GPU, driver, NVRTC, cache, versions.

    Changes nothing and never raises. `print(ga.doctor())` is a table in text; as the last line of a
    notebook cell it is one in HTML.

    Returns:
        A Doctor, whose `facts` map names to values and whose `problems` are sentences.

    Example:
        >>> report = ga.doctor()
        >>> report.facts["gpuaccel"] == ga.__version__
        True
        >>> print(report)
        gpuaccel ...
    """
    problems = []

    def attempt(look):
        """look(), or None and its error among the problems."""
        try:
            return look()
        except GpuaccelError as error:
            problems.append(str(error))

    choice = attempt(backend)
    library = attempt(nvrtc.library)
    driver = find_driver()[0]
    compiler, no_compiler = find_compiler()
    if library is not None and choice is not None and choice.name == "cuda":
        attempt(lambda: nvrtc.check_driver(driver))
        attempt(lambda: nvrtc.check_arch(choice.arch))
    cache = _describe_cache()
    if cache is None:
        problems.append(
            "the cache folder cannot be written, or other users can write to it, so kernels are "
            "compiled every time: set GPUACCEL_CACHE"
        )
    built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    if compiler:
        compiler_fact = f"{compiler} (runs kernels on the CPU)"
    else:
        compiler_fact = f"none: {no_compiler}"
    facts = {
        "gpuaccel": __version__,
        "python": platform.python_version(),
        "torch": f"{torch.__version__} (built {built})",
        "backend": choice and choice.name,
        "reason": choice and choice.reason,
        "GPU policy": choice.policy if choice else os.environ.get("GPUACCEL_GPU", "auto"),
        "device": choice and choice.device,
        "architecture": choice and choice.arch,
        "default dtype": choice and _describe_dtype(choice.arch),
        "driver": f"for CUDA {driver // 1000}.{driver % 1000 // 10}" if driver else None,
        "NVRTC": library and f"{library.version[0]}.{library.version[1]}",
        # the end of the path says which wheel, and shows no home folder
        "NVRTC library": library and "/".join(pathlib.Path(library.path).parts[-4:]),
        "NVRTC writes": library and list(library.archs),
        "C++ compiler": compiler_fact,
        "cuda-core": _version("cuda-core"),
        "cuda-bindings": _version("cuda-bindings"),
        "cache": cache,
    }
    return Doctor(facts, problems)


def _version(package):
    """The installed version of a package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _describe_dtype(arch):
    """The dtype to train in on this architecture, in words."""
    dtype = default_dtype()
    if arch is not None and dtype == torch.float32:
        return f"{dtype}: {arch} has no matrix products in bf16, which begin with sm_80"
    return str(dtype)


def _describe_cache():
    """The cache folder and what is in it, in words; None when it cannot be written."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = cache_dir()
    if folder is None:
        return None
    files = [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")]
    kinds = Counter(path.relative_to(folder).parts[0] for path in files)
    contents = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())) or "empty"
    size = sum(path.stat().st_size for path in files)
    home = str(pathlib.Path.home()) + os.sep
    return f"{str(folder).replace(home, '~' + os.sep, 1)} ({contents}, {size / 1e6:.1f} MB)"


def add_parser(commands):
    """Add `gpuaccel doctor`."""
    parser = add_command(
        commands, "doctor", run, "show what runs here, and why; status 1 if something is wrong"
    )
    parser.add_argument("--json", action="store_true", help="as JSON")


def run(args) -> int:
    report = doctor()
    if args.json:
        print(json.dumps({**report.facts, "problems": report.problems}, indent=2))
    else:
        print(report)
    return 1 if report.problems else 0
