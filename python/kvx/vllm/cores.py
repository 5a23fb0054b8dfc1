"""Where threads beside the engine's may run."""

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def new_threads_on_any_core() -> Iterator[None]:
    """Threads that are made inside run on every core that the system gives the process.

    On its CPU platform vLLM binds the thread of the steps to one core, and threads inherit that:
    one that writes files would take turns with the steps.
    """
    bound = os.sched_getaffinity(0)  # the calling thread's
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    try:
        yield
    finally:
        os.sched_setaffinity(0, bound)


__all__ = ["new_threads_on_any_core"]
