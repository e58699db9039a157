"""A sink that writes to a run of Weights & Biases: the script's own, or one that it starts."""

from __future__ import annotations

import logging
import os
from typing import Any

from evenstride.errors import ConfigError
from evenstride.runtime.sinks.snapshot import Snapshot, error_text, rows_of, tag_of

logger = logging.getLogger("evenstride")

_STEP = tag_of("step", "")


class WandbSink:
    """Writes rows to a run of W&B, whose service process sends them; training does not wait.

    If the script has an active run, the values join the row that it logs next. The steps of its
    rows and its end stay its own. Otherwise the sink starts a run, as the environment variables of
    W&B say, and ends it at the close, unless the script has logged to it as well.

    Args:
        project: ``PROJECT`` or ``ENTITY/PROJECT``; empty for those of ``WANDB_PROJECT``.

    Raises:
        ConfigError: W&B cannot start a run.
    """

    def __init__(self, project: str) -> None:
        import wandb

        active = wandb.run
        self._run: Any = _started(project) if active is None else active
        self._shared = active is not None
        self._rows = self._run.step  # W&B's number of the next row, if nothing else logs
        # Rows have numbers of their own in W&B, which never fall; ours may after a crash.
        self._run.define_metric("evenstride*", step_metric=_STEP)
        where = self._run.sync_dir if self._run.offline else self._run.url
        logger.info(
            "metrics go to %s run of W&B: %s", "the script's" if self._shared else "a new", where
        )

    def write(self, snapshot: Snapshot) -> None:
        """Hand the values to the service process."""
        for step, values in rows_of(snapshot):
            self._log({**values, _STEP: step})
        for alert in snapshot.alerts:
            title = f"{alert.kind} worker {alert.worker}"
            self._run.alert(title, text=f"step {snapshot.step}: {alert.reason}", level="WARN")

    def _log(self, row: dict[str, float]) -> None:
        # A later `wandb.init()` of the script returns this run, so look again each time.
        self._shared = self._shared or self._run.step != self._rows
        if self._shared:  # a row of ours would make W&B refuse the script's next `step=`
            self._run.log(row, commit=False)
        else:
            self._run.log(row)
            self._rows += 1

    def close(self) -> None:
        """End the run, if it is this sink's alone."""
        if not self._shared and self._run.step == self._rows:
            self._run.finish()


def _started(project: str) -> Any:
    """Return a new run, quiet unless the environment says otherwise."""
    import wandb

    entity, _, name = project.rpartition("/")
    quiet = {"silent": True} if "WANDB_SILENT" not in os.environ else {}
    # W&B would otherwise replace an earlier run of the same name, not continue it.
    known = "WANDB_RUN_ID" in os.environ and "WANDB_RESUME" not in os.environ
    # The output of the script belongs to the script's own run.
    console = {} if "WANDB_CONSOLE" in os.environ else {"console": "off"}
    try:
        return wandb.init(
            entity=entity or None,
            project=name or None,
            resume="allow" if known else None,
            settings=wandb.Settings(**quiet, **console),
        )
    except Exception as error:  # of W&B, of its service, of the disk
        raise ConfigError(
            f"W&B cannot start a run ({error_text(error)}); log in with wandb login, "
            "check WANDB_BASE_URL, set WANDB_MODE=offline to write to WANDB_DIR only, or remove "
            "the sink wandb"
        ) from None
