"""A sink that writes to a run of MLflow: the script's own, or one that it starts."""

from __future__ import annotations

import logging
import os
from typing import Any

from evenstride.errors import ConfigError
from evenstride.runtime.sinks.snapshot import Snapshot, error_text, rows_of, tag_of

logger = logging.getLogger("evenstride")

_MOST_IN_REQUEST = 1000  # metrics that MLflow accepts at once


class MlflowSink:
    """Writes metrics to a run of MLflow; each call waits for the store.

    If the script has an active run, its metrics and alerts go there, and its end stays its own.
    Otherwise the sink starts a run, or continues that of ``MLFLOW_RUN_ID``, and ends it.

    Args:
        where: an experiment; or the URI of a store, with ``://`` or ``file:``; empty for those of
            the environment variables of MLflow.

    Raises:
        ConfigError: the store cannot be used, or the run does not exist.
    """

    def __init__(self, where: str) -> None:
        import mlflow

        quiet = "MLFLOW_LOGGING_LEVEL" not in os.environ
        level = (log := logging.getLogger("mlflow")).level
        if quiet:  # a new database is a line of the log for every table
            log.setLevel(logging.WARNING)
        try:
            active = mlflow.active_run()
            self._own = active is None
            self._client, self._run_id = _started(where) if active is None else _joined(active)
        except Exception as error:  # of MLflow, of its network, of its database
            raise ConfigError(
                f"MLflow cannot start a run ({error_text(error)}); check "
                "MLFLOW_TRACKING_URI and MLFLOW_RUN_ID, name a store such as "
                "mlflow:sqlite:///runs/mlflow.db, or remove the sink mlflow"
            ) from None
        finally:
            log.setLevel(level)
        which = "a run" if self._own else "the script's run"
        logger.info(
            "metrics go to %s of MLflow: %s in %s", which, self._run_id, self._client.tracking_uri
        )

    def write(self, snapshot: Snapshot) -> None:
        """Write the values, and each alert as a tag of its worker."""
        from mlflow.entities import Metric

        at_ms = round(snapshot.unix_s * 1e3)
        metrics = [
            Metric(tag, value, at_ms, step)
            for step, values in rows_of(snapshot)
            for tag, value in values.items()
        ]
        for first in range(0, len(metrics), _MOST_IN_REQUEST):
            self._client.log_batch(self._run_id, metrics[first : first + _MOST_IN_REQUEST])
        for alert in snapshot.alerts:
            tag = tag_of(f"alert_{alert.kind}", alert.worker)
            self._client.set_tag(self._run_id, tag, f"step {snapshot.step}: {alert.reason}")

    def close(self) -> None:
        """End the run, if it is this sink's own."""
        if self._own:
            self._client.set_terminated(self._run_id)


def _joined(active: Any) -> tuple[Any, str]:
    from mlflow import MlflowClient

    return MlflowClient(), active.info.run_id


def _started(where: str) -> tuple[Any, str]:
    """Return a client with a run that is new, or continued."""
    from mlflow import MlflowClient

    uri = is_uri(where)
    client = MlflowClient(where if uri else None)
    run_id = os.environ.get("MLFLOW_RUN_ID")
    if run_id:
        client.update_run(run_id, status="RUNNING")
        return client, run_id
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "") if uri or not where else where
    run_name = os.environ.get("MLFLOW_RUN_NAME")
    return client, client.create_run(_experiment(client, name), run_name=run_name).info.run_id


def _experiment(client: Any, name: str) -> str:
    """Return the id of an experiment, which is created if it does not exist."""
    if not name:
        return os.environ.get("MLFLOW_EXPERIMENT_ID") or "0"  # MLflow's "Default"
    found = client.get_experiment_by_name(name)
    return str(client.create_experiment(name) if found is None else found.experiment_id)


def is_uri(where: str) -> bool:
    """Return whether a text names a store of MLflow, not an experiment."""
    return "://" in where or where.startswith("file:")
