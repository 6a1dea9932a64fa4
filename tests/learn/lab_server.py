"""A JupyterLab of a test's own."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

HANG = 600_000  # milliseconds after which what does not come counts as hanging
# Whether the kernel of the notebook in front is idle.
IDLE = """() => { const w = window.jupyterapp && window.jupyterapp.shell.currentWidget;
    const s = w && w.sessionContext && w.sessionContext.session;
    return !!s && !!s.kernel && s.kernel.status === 'idle' }"""


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextlib.contextmanager
def jupyterlab(folder, port, *options, **env):
    """Serve a folder until the block ends.

    Args:
        options, env: of JupyterLab, beside those that keep a test from the user's settings.

    Yields:
        The server's address, and its token.
    """
    token, state = os.urandom(12).hex(), folder / ".state"
    env |= dict(
        JUPYTER_CONFIG_DIR=str(state / "config"),
        JUPYTERLAB_SETTINGS_DIR=str(state / "settings"),
        JUPYTERLAB_WORKSPACES_DIR=str(state / "workspaces"),
    )
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--ip=127.0.0.1"]
    command += [f"--port={port}", f"--IdentityProvider.token={token}", "--allow-root"]
    command += ["--ServerApp.root_dir=.", "--expose-app-in-browser", *options]
    base = f"http://127.0.0.1:{port}"
    with open(folder / "lab.log", "w") as log:
        output = dict(stdout=log, stderr=log, start_new_session=True)
        server = subprocess.Popen(command, cwd=folder, env=os.environ | env, **output)
    try:
        for _ in range(3000):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{base}/api/status?token={token}", timeout=2)
                break
            time.sleep(0.2)
        else:
            pytest.fail("JupyterLab did not start:\n" + (folder / "lab.log").read_text()[-2000:])
        yield base, token
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
