"""A folder of converted things: an entry is written whole or not at all, and checked when it is read."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger(__name__)

_MANIFEST = "manifest.json"


def fetch(folder: Path, build: Callable[[Path], None]) -> Path:
    """The entry at `folder`, built first if it is not there or damaged.

    build: fills the empty folder it is given. Several processes may do this at once; the first one wins and
    the others use its entry. Raises `OSError` if the entry cannot be written.
    """
    if folder.exists():
        damage = _damage(folder)
        if damage is None:
            return folder
        logger.warning("%s is damaged (%s) and is built again", folder, damage)
        shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        build(draft)
        _seal(draft)
        draft.chmod(0o755)
        try:
            draft.rename(folder)
        except OSError:
            if _damage(folder) is not None:  # not another process's finished entry: a real failure
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def _seal(folder: Path) -> None:
    """Write down what the entry holds, and make sure it is on disk before the entry gets its name."""
    files = {}
    for path in sorted(folder.iterdir()):
        with path.open("rb+") as file:
            os.fsync(file.fileno())
        files[path.name] = _checksum(path)
    (folder / _MANIFEST).write_text(json.dumps({"sha256": files}))


def _damage(folder: Path) -> str | None:
    """What is wrong with an entry, or None."""
    try:
        files = json.loads((folder / _MANIFEST).read_text())["sha256"]
        for name, checksum in files.items():
            if _checksum(folder / name) != checksum:
                return f"{name} has changed"
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
