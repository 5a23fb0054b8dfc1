"""Folders in shared memory that end with the processes that use them, however those end.

A process holds a lock on its folder's file ``in-use`` while it lives. The kernel gives the lock
back when the process is killed, so a folder whose lock can be had is nobody's.
"""

import fcntl
import os
import shutil
from pathlib import Path

_LOCK = "in-use"


class SharedFolder:
    """A folder that several processes of one engine use. path: created if missing.

    Folders beside it whose names begin alike (up to the first ``-``), which this user's processes
    made and none of them uses any more, are deleted first. Raises OSError: it cannot be created.
    """

    def __init__(self, path):
        self.path = Path(path)
        _delete_what_dead_processes_left(self.path)
        while True:
            self.path.mkdir(exist_ok=True)
            try:
                self._lock = _lock(self.path, fcntl.LOCK_SH)
            except FileNotFoundError:  # another process has just deleted the folder
                continue
            if self._lock is not None:
                return

    def delete(self):
        """Deletes the folder, also for the engine's other processes."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _delete_what_dead_processes_left(path):
    kind = path.name.partition("-")[0]
    for folder in path.parent.glob(f"{kind}-*"):
        if folder == path or not (folder / _LOCK).is_file():
            continue
        try:
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            lock = _lock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB, is_new=False)
        except OSError:  # in use, or deleted by another process
            continue
        if lock is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _lock(folder, operation, is_new=True):
    """The open file that holds the lock; None where the file was deleted meanwhile."""
    flags = os.O_RDWR | os.O_NOFOLLOW | (os.O_CREAT if is_new else 0)
    file = os.open(folder / _LOCK, flags, 0o600)
    try:
        fcntl.flock(file, operation)
        if os.path.samestat(os.fstat(file), os.stat(folder / _LOCK)):
            return file
    except FileNotFoundError:
        pass
    except BaseException:
        os.close(file)
        raise
    os.close(file)
    return None
