"""Metrics of this process's caches, for Prometheus (docs/metrics.md)."""

from kvx import _core
from kvx.refusals import in_words


@in_words
def metrics() -> str:
    """The figures of all caches of this process, in Prometheus' text format.

    Each has the label ``cache``: a number, or the name that the cache was given.
    Raises kvx.UnsupportedError: no libkvx_observe.so.
    """
    return _core.metrics()


@in_words
def serve_metrics(port: int = 9400, *, address: str = "127.0.0.1") -> int:
    """Serves metrics() at http://address:port/metrics from threads of the library's own, until
    stop_metrics() or the end of the process: the port. 0 takes any free one.

    A second call ends the first's. Raises kvx.Error: the address cannot be bound;
    kvx.UnsupportedError: no libkvx_observe.so.
    """
    return _core.serve_metrics(address, port)


def stop_metrics() -> None:
    """Serves no metrics any more; nothing where none are served."""
    _core.stop_metrics()
