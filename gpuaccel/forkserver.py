"""For the server process that forks the ranks of ga.launch, which imports this module first.

    GPUACCEL_LAUNCHED_BY=<pid> python -c "import gpuaccel.forkserver, gpuaccel.training"

The server ends with its parent by itself, but not before it has imported torch, which takes
seconds. With this module it ends within these, too. SIGTERM does not end it: a service manager
sends that to every process, and the parent's ranks still finish their step. In other processes the
module does nothing.
"""

import os
import signal

LAUNCHED_BY = "GPUACCEL_LAUNCHED_BY"
INTERVAL = 0.2  # seconds between two looks at the parent


if LAUNCHED_BY in os.environ:
    parent = int(os.environ[LAUNCHED_BY])

    def end_without_parent(*_):
        if os.getppid() != parent:
            os._exit(1)

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # A timer and no thread: what forks must have none. Forks do not inherit a timer.
    signal.signal(signal.SIGALRM, end_without_parent)
    signal.setitimer(signal.ITIMER_REAL, INTERVAL, INTERVAL)
