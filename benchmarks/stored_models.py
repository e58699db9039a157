"""Compare the reused model of a similar job with the universal model, on measured jobs.

    python benchmarks/stored_models.py --store FOLDER [--data FOLDER] [--json] [--plot FILE]

If the folder is missing, six jobs are measured into it: two nets of `forecast_work.py`, each in
three widths. ``evenstride profile`` measures the steps on one thread. Trainings at four batches
show the epochs to a loss, and ``evenstride plan`` stores them.

Then each job is left out in turn. It is assumed to know one step (its largest) and the epochs at
one batch (the second largest). All its other steps and epochs are forecast from the most similar
other job, and from the universal model, the average of all others. The table has the mean relative
errors. It is the code that ``evenstride plan`` uses.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from evenstride._version import __version__
from evenstride.planner.workload.model_reuse import epoch_errors, step_errors
from evenstride.planner.workload.model_store import ModelStore, read_store
from evenstride.report.wording import Table

WIDTHS = {"images": (8, 12, 16), "text": (48, 64, 96)}
TARGETS = {"images": 0.7, "text": 2.6}
BATCHES = (32, 96, 256, 512)
SECONDS = 10
SCRIPT = Path(__file__).with_name("stored_models_script.py")
PRICES = "type,usd_per_h\nthread,0.05\n"


@dataclass(frozen=True, slots=True)
class Row:
    """The errors of one kind of forecast, as means over the jobs that were left out."""

    what: str
    similar: float
    universal: float
    jobs: int


def measure(store: Path, data: Path) -> None:
    """Measure all jobs into a store."""
    with tempfile.TemporaryDirectory(prefix="evenstride-") as name:
        folder = Path(name)
        (folder / "prices.csv").write_text(PRICES)
        for net, widths in WIDTHS.items():
            for width in widths:
                _measure_job(net, width, folder / f"{net}-{width}", store, data)


def _measure_job(net: str, width: int, folder: Path, store: Path, data: Path) -> None:
    print(f"measuring {folder.name} ...", file=sys.stderr, flush=True)
    folder.mkdir()
    script = [str(SCRIPT), net, str(width)]
    environment = {**os.environ, "EVENSTRIDE_DATA": str(data), "EVENSTRIDE_STORE": str(store)}
    own = [sys.executable, "-m", "evenstride"]
    profile = str(folder / "profile.json")
    options = ["--type", "thread", "--seconds", str(SECONDS), "--out", profile]
    _run([*own, "profile", *options, "--", *script], environment)
    runs = [str(folder / str(batch)) for batch in BATCHES]
    for run, batch in zip(runs, BATCHES, strict=True):
        training = ["--batch", str(batch), "--until", str(TARGETS[net])]
        _run([sys.executable, *script, *training], {**environment, "EVENSTRIDE_TRACE": run})
    prices = str(folder.parent / "prices.csv")
    options = ["--target-loss", str(TARGETS[net]), "--catalog", prices, "--json"]
    _run([*own, "plan", profile, *runs, *options], environment)


def _run(command: Sequence[str], environment: dict[str, str]) -> None:
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)


def rows(store: ModelStore) -> list[Row]:
    """Return the errors of steps and epochs, over all jobs."""
    both = (("steps", step_errors(store.models)), ("epochs", epoch_errors(store.models)))
    return [Row(what, **asdict(errors)) for what, errors in both if errors is not None]


def draw(found: Sequence[Row], file: Path) -> None:
    """Plot the errors as bars."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(4, 3), layout="constrained")
    for offset, name, colour in ((-0.2, "similar", "#0072B2"), (0.2, "universal", "#D55E00")):
        errors = [100 * float(getattr(row, name)) for row in found]
        places = [at + offset for at in range(len(found))]
        axes.bar(places, errors, width=0.4, color=colour, label=f"{name} model")
    axes.set_xticks(range(len(found)), [row.what for row in found])
    axes.set_ylabel("mean error in %")
    axes.legend()
    figure.savefig(file)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure jobs that are not stored, and print the errors."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--store", type=Path, required=True, help="folder of the stored profiles")
    data = os.environ.get("EVENSTRIDE_DATA", "../shared/data")
    parser.add_argument("--data", type=Path, default=Path(data), help="folder of the data sets")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--plot", type=Path, help="file for a plot")
    args = parser.parse_args(arguments)
    if not args.store.is_dir():
        measure(args.store.resolve(), args.data.resolve())
    # The versions of the measurements do not matter for errors within one store.
    store = read_store(args.store, __version__, "", force=True)
    found = rows(store)
    if args.plot is not None:
        draw(found, args.plot)
    if args.json:
        print(json.dumps({"rows": [asdict(row) for row in found], "skipped": store.skipped}))
        return
    cells = tuple(
        (row.what, f"{row.similar:.1%}", f"{row.universal:.1%}", str(row.jobs)) for row in found
    )
    print(Table(("forecast of", "similar job", "universal model", "jobs"), cells, keys=1).text())
    print("\n".join(store.skipped))


if __name__ == "__main__":
    main()
