"""An environment that holds a few distributions and what they require, made without a network.

It is a venv whose site-packages links to what this environment has installed, so that `pip check`
and every import see exactly those."""

import importlib.metadata
import pathlib
import subprocess
import sys
import venv

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def closure(lines):
    """name -> distribution, of these requirements and all that they require.

    Skips the running test where one of them is not installed here."""
    found = {}
    waiting = [Requirement(line) for line in lines]
    seen = set()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        for extra in ["", *requirement.extras]:
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            try:
                found[name] = importlib.metadata.distribution(name)
            except importlib.metadata.PackageNotFoundError:
                pytest.skip(f"{requirement} is not installed here")
            for line in found[name].requires or ():
                inner = Requirement(line)
                if not inner.marker or inner.marker.evaluate({"extra": extra}):
                    waiting.append(inner)
    return found


class CleanPrefix:
    """A venv in `folder` with these requirements; `python` and `bin` are its own.

    Commands run in `cwd`, an empty folder, without the variables of this environment."""

    def __init__(self, folder: pathlib.Path, requirements):
        venv.create(folder, with_pip=False)
        self.bin = folder / "bin"
        self.python = self.bin / "python"
        self.cwd = folder / "elsewhere"
        self.cwd.mkdir()
        self.site = next((folder / "lib").glob("python*")) / "site-packages"
        for distribution in closure(requirements).values():
            self._link(distribution)

    def _link(self, distribution):
        """Link every folder and module of a distribution, and its metadata."""
        for file in distribution.files or ():
            top = file.parts[0]
            if top not in ("..", "__pycache__") and not (self.site / top).exists():
                (self.site / top).symlink_to(pathlib.Path(distribution.locate_file(top)).resolve())

    def env(self, **more):
        # Its programs, and those of the system: the compiler among them.
        path = f"{self.bin}:/usr/local/bin:/usr/bin:/bin"
        home = str(self.cwd.parent)
        return {"PATH": path, "HOME": home, "OMP_NUM_THREADS": "1", **more}

    def pip(self, *words, cwd=None):
        """This environment's pip, without an index, on that one."""
        command = [sys.executable, "-m", "pip", "--python", self.python, *words]
        env = self.env(PIP_NO_INDEX="1", PIP_DISABLE_PIP_VERSION_CHECK="1")
        return subprocess.run(command, cwd=cwd or self.cwd, env=env, capture_output=True, text=True)

    def run(self, *command, cwd=None, **env):
        """The CompletedProcess of a command, whose programs are found in `bin` first."""
        program = self.bin / command[0]
        return subprocess.run(
            [program if program.exists() else command[0], *map(str, command[1:])],
            cwd=cwd or self.cwd,
            env=self.env(**env),
            capture_output=True,
            text=True,
            timeout=600,
        )
