"""Where a `Checkpointer` writes: to the script's folder, or to that of a trial."""

from __future__ import annotations

import hashlib
import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from evenstride.runtime.checkpoint.format.storage import location
from evenstride.runtime.environment import Environment
from evenstride.runtime.trial import note, sentence

logger = logging.getLogger("evenstride")

_LONGEST_NAME = 40


@dataclass(frozen=True, slots=True)
class TrialFolder:
    """Where checkpoints are written, and where else one may be restored from.

    Args:
        folder: that checkpoints are written to and restored from.
        replaced: the script's folder, if `folder` replaces it; else empty.
        source: the same, if a run without checkpoints in `folder` starts from it. It is only read.
    """

    folder: str
    replaced: str = ""
    source: str = ""

    def tell(self) -> None:
        """Say where checkpoints go, if it is not where the script says (one rank only)."""
        if not self.replaced:
            return
        read = bool(self.source)
        logger.warning("%s", sentence(self.folder, self.replaced, read=read))
        told = {"folder": self.folder, "replaced": self.replaced, "read": read}
        note(Path(self.folder).parent, told)


def redirect_of(folder: str | os.PathLike[str], environment: Environment) -> TrialFolder:
    """Return where the checkpoints of a script's folder are written and read.

    Raises:
        ConfigError: the folder is neither a path nor a URL.
    """
    theirs = location(folder)
    if environment.checkpoints is None:
        return TrialFolder(theirs)
    own = environment.checkpoints / _name(theirs)
    return TrialFolder(str(own), theirs, theirs if environment.restore else "")


def _name(folder: str) -> str:
    """Return a name that is another one for every folder, and readable."""
    # Folders of several parents may have one name, so a digest of the whole path tells them apart.
    last = re.sub(r"[^\w.=+-]+", "-", PurePosixPath(folder).name)[-_LONGEST_NAME:]
    return f"{last or 'checkpoints'}-{hashlib.sha256(folder.encode()).hexdigest()[:8]}"
