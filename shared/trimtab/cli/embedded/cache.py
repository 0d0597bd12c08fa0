"""A cache on disk whose entries are either whole or absent."""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from trimtab.errors import TrimtabError


def cache_root() -> Path:
    """Return the folder for what is built at first use.

    Returns:
        `$TRIMTAB_CACHE`, else `$XDG_CACHE_HOME/trimtab`, else `~/.cache/trimtab`; it may not exist yet.

    Example:
        >>> cache_root()  # doctest: +SKIP
        PosixPath('/home/me/.cache/trimtab')
    """
    if own := os.environ.get("TRIMTAB_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "trimtab"


def build_once(folder: Path, build: Callable[[Path], None]) -> None:
    """Make a folder by calling `build`, unless it exists.

    `build` fills a temporary folder beside it, which is renamed when it is done. An interrupted build thus leaves no
    folder of this name, and where several processes build at once all of them end up with the result of the first.

    Args:
        folder: the entry of the cache.
        build: called with the empty folder to fill.

    Raises:
        TrimtabError: the cache cannot be written.

    Example:
        >>> build_once(cache_root() / "greeting", lambda path: (path / "hello").touch())  # doctest: +SKIP
    """
    if folder.is_dir():
        return
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise TrimtabError(
            f"cannot write the cache ({error}); set TRIMTAB_CACHE to a folder that can be written"
        ) from error
    try:
        build(scratch)
        os.replace(scratch, folder)
    except OSError:
        if not folder.is_dir():  # else another process was first
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
