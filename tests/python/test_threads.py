"""Which OpenMP library kvx.threads finds among what the process has loaded."""

import builtins
import io

from kvx import threads

MAPS = """\
7f00-7f01 r--p 00000000 fe:01 1 /usr/lib/libm.so.6
7f02-7f03 r-xp 00000000 fe:01 2                     /home/a user/my env/torch/lib/libgomp-1.so.1
7f04-7f05 rw-p 00000000 00:00 0
"""


def test_a_path_may_hold_blanks(monkeypatch):
    monkeypatch.setattr(builtins, "open", lambda path: io.StringIO(MAPS))
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    assert threads._openmp_library() == "/home/a user/my env/torch/lib/libgomp-1.so.1"
