"""kvx_oracle computes, slowly and exactly, the bytes that docs/numbers.md defines.

It is written from that page and the public standards alone, uses nothing but Python's standard
library, and imports nothing of kvx: where it and src/format disagree, one of them has a bug.
"""
