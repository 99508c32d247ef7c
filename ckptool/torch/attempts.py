"""Open uploads, written down in the run, so that the next start can abort what a dead one left.

An object ``.attempts/{attempt}-{rank}.json`` stands in the run from before an upload's first
part until the upload is whole or aborted.
"""

from __future__ import annotations

import json
import logging

from ckptool.errors import StorageError
from ckptool.storage.base import Store

__all__ = ["AttemptFile", "abort_stale_uploads"]

log = logging.getLogger("ckptool")
_FOLDER = ".attempts"


class AttemptFile:
    """The entry of one rank's upload in one attempt."""

    def __init__(self, run: Store, *, attempt: str, rank: int) -> None:
        self._run = run
        self._key = f"{_FOLDER}/{attempt}-{rank}.json"
        self._written = False

    def write(self, key: str, token: str, num_bytes: int) -> None:
        """Write down an assembly; ``key`` counts from the run's root."""
        row = {"key": key, "token": token, "num_bytes": num_bytes}
        self._written = True
        self._run.put(self._key, json.dumps(row).encode())

    def remove(self) -> None:
        """The upload is over, one way or the other."""
        if self._written:
            self._run.delete(self._key)
            self._written = False


def abort_stale_uploads(run: Store) -> int:
    """Abort every upload that is written down in the run; returns how many there were."""
    entries = run.list_level(_FOLDER).objects
    for info in entries:
        name = info.key.rsplit("/", 1)[-1]
        try:
            row = json.loads(run.read(f"{_FOLDER}/{name}"))
            run.attach_assembly(row["key"], row["token"], num_bytes=row["num_bytes"]).abort()
        except (StorageError, ValueError, KeyError, TypeError) as error:
            log.warning("could not abort the upload of %s: %s", run.url_of(info.key), error)
        run.delete(f"{_FOLDER}/{name}")
    return len(entries)
