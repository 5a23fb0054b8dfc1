"""Settings of all Python tests: the same examples at every run, none judged by its time."""

from hypothesis import settings

settings.register_profile("kvx", derandomize=True, deadline=None, max_examples=60, database=None)
settings.load_profile("kvx")
