"""A progress bar where tqdm is installed, and nothing where it is not."""

try:
    from tqdm.auto import tqdm
except ImportError:
    tqdm = None


def progress(steps, description, shown=True):
    """Yields from ``steps`` under a bar with the title ``description``."""
    if tqdm is None or not shown:
        return steps
    return tqdm(steps, desc=description, leave=False)
