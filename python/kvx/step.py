"""Step: a writer of its own, so that threads append to their sequences of one cache side by side."""

from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Literal, NoReturn, cast

from kvx.arrays import checked_array, described, new_output
from kvx.cache import Cache
from kvx.errors import Error, UnsupportedError
from kvx.refusals import in_words
from kvx.types import Array, ArrayT, Stream


class Step:
    """Steps of some sequences of a cache, beside other threads' steps of other sequences.

        step = kvx.Step(cache)  # one for each thread, used again and again
        with step.begin([(sequence, num_tokens)]):
            out = step.append_and_attend(layer, q, k, v)  # for every layer

    Steps wait for each other only to begin and to end; a sequence is in one step at a time. On a
    GPU their work goes to the cache's stream, one verb after the other. The cache's memory stays
    until the last Step of it is gone, also after cache.close().

    Raises kvx.Error: the cache is closed.
    """

    @in_words
    def __init__(self, cache: Cache) -> None:
        if not isinstance(cache, Cache):
            raise TypeError(f"cache is {described(cache)}; expected a kvx.Cache")
        self._step = cache.new_step()
        self._device, self._v_head_dim = cache.device, cache.v_head_dim

    def __reduce__(self) -> NoReturn:
        """Refuses pickle and copy: the bytes belong to this process."""
        raise UnsupportedError(
            "a kvx.Step cannot be pickled or copied: its bytes belong to this process. Make one of "
            "the cache, kvx.Step(cache)"
        )

    def __repr__(self) -> str:
        return f"kvx.Step({'open' if self.is_open else 'not open'}, on {self._device})"

    @property
    def is_open(self) -> bool:
        """Whether begin() was called, and neither end() nor cancel() since."""
        return self._step.is_open

    @in_words
    def begin(self, entries: Iterable[tuple[int, int]]) -> "Step":
        """Opens the step: entries are (sequence, num_tokens), each sequence once. Returns the step:
        ``with step.begin(...):`` ends it, or cancels it after an exception.

        Raises kvx.Error or kvx.OutOfRangeError naming the entry, kvx.Error: a sequence that is in
        another step, or this step is open; nothing has changed then.
        """
        self._step.begin(entries if isinstance(entries, list) else list(entries))
        return self

    def __enter__(self) -> "Step":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self.is_open:  # the block has ended or cancelled it
            return
        if kind is not None:
            self.cancel()
            return
        try:
            self.end()
        except Error:  # a layer has not appended
            self.cancel()
            raise

    @in_words
    def append_and_attend(
        self,
        layer: int,
        q: ArrayT,
        k: Array,
        v: Array,
        out: ArrayT | None = None,
        *,
        softmax_scale: float | None = None,
        softcap: float = 0.0,
        sinks: Array | None = None,
        precision: Literal["accurate", "fast"] = "accurate",
        stream: Stream = None,
    ) -> ArrayT:
        """kvx.Cache.append_and_attend for the entries of this step."""
        if precision not in ("accurate", "fast"):
            raise Error(f"precision is {precision!r}; expected 'accurate' or 'fast'")
        if out is None:
            shape = (*tuple(checked_array(q, "q").shape[:2]), self._v_head_dim)
            out = cast(ArrayT, new_output(q, shape, self._device, "out is None and q"))
        self._step.append_and_attend(
            layer, q, k, v, out, softmax_scale, softcap, sinks, precision == "fast", stream
        )
        return out

    @in_words
    def end(self, kept_tokens: Sequence[int] | None = None) -> None:
        """Makes the step's tokens part of their sequences.

        kept_tokens: how many of its first tokens each entry keeps, where drafts are taken back
        Raises kvx.Error: a layer has not appended, or another number of counts; kvx.OutOfRangeError
        and kvx.UnsupportedError as Cache.truncate does.
        """
        self._step.end(None if kept_tokens is None else list(kept_tokens))

    @in_words
    def cancel(self) -> None:
        """Leaves the open step without its tokens. Raises kvx.Error: no step is open."""
        self._step.cancel()


__all__ = ["Step"]
