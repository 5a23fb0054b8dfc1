"""A store as somebody would write it for kvx: files of a folder, so that processes share it."""

from pathlib import Path

NUM_MADE = 0  # in this process


class FileStore:
    def __init__(self, folder):
        self.folder = Path(folder)

    def _path(self, key):
        return self.folder / key.replace("/", "~")

    def put(self, keys, values):
        for key, value in zip(keys, values):
            self._path(key).write_bytes(value)

    def get(self, keys):
        return [self._path(key).read_bytes() if self._path(key).exists() else None for key in keys]

    def exists(self, keys):
        return [self._path(key).exists() for key in keys]

    def remove(self, keys):
        for key in keys:
            self._path(key).unlink(missing_ok=True)

    def remove_all(self, parts):
        for path in self.folder.glob(parts.replace("/", "~") + "~*"):
            path.unlink()


def make(folder):
    global NUM_MADE
    NUM_MADE += 1
    return FileStore(folder)


NOT_A_STORE = dict
