"""Draw simulated runs while they are run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Self

from evenstride.cli.render.terminal_text import say
from evenstride.errors import ConfigError
from evenstride.report.suite_figures import MOST_PANELS, Panel, check_plotting, check_writable, draw

if TYPE_CHECKING:
    from evenstride.sim.scoring.suite import Ran, Suite

_LONGEST = 200  # bytes of a name; most file systems take 255 with what is added


class Drawing:
    """Collects the runs of the first seed, and draws them when all are there."""

    def __init__(self, suite: Suite, files: dict[tuple[str, int], Path]) -> None:
        self._seed, self._files = suite.seeds[0], files
        self._panels: dict[Path, list[Panel]] = {}
        self._alone = len(set(files.values())) == len(files)

    @classmethod
    def into_file(cls, suite: Suite, path: Path) -> Self:
        """Return a drawing of everything in one file.

        Raises:
            ConfigError: it cannot be drawn, or not be written.
        """
        check_plotting(path)
        runs = suite.runs // len(suite.seeds)
        if runs > MOST_PANELS:
            raise ConfigError(
                f"{runs} runs are too many for one plot (at most {MOST_PANELS}); give fewer "
                "scenarios, policies or lags, or use evenstride compare --plot FOLDER"
            )
        check_writable(path)
        return cls(suite, dict.fromkeys(_settings(suite), path))

    @classmethod
    def into_folder(cls, suite: Suite, folder: Path) -> Self:
        """Return a drawing of each setting in a file of its own.

        Raises:
            ConfigError: it cannot be drawn, or not be written.
        """
        check_plotting()
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"{folder} is no folder; give one to write the plots into")
        settings = _settings(suite)
        lags = {name: [lag for other, lag in settings if other == name] for name, _ in settings}
        files = {
            (name, lag): folder / file_name(name, lag if len(lags[name]) > 1 else None)
            for name, lag in settings
        }
        for path in files.values():
            check_writable(path)
        return cls(suite, files)

    def take(self, ran: Ran) -> None:
        """Keep what is drawn of a run."""
        row = ran.row
        if row.seed == self._seed:
            title = row.policy if self._alone else f"{row.policy} in {row.scenario}, lag {row.lag}"
            panels = self._panels.setdefault(self._files[row.scenario, row.lag], [])
            panels.append(Panel.of(title, ran.track, ran.stage))

    def save(self) -> None:
        """Write the files and tell which."""
        for setting, path in self._files.items():
            panels = self._panels.pop(path, None)
            if panels:
                name = f"{setting[0]}, lag {setting[1]}, " if self._alone else ""
                draw(panels, f"{name}seed {self._seed}", path)
                say(f"plot written to {path}", err=True)


def _settings(suite: Suite) -> list[tuple[str, int]]:
    return [(scenario.name, scenario.exchange.lag) for scenario, _ in suite.cases]


def file_name(name: str, lag: int | None = None) -> str:
    """Return the name of the file that something is drawn into, cut to what file systems take.

    >>> file_name("2 x T4 / P4", 3)
    '2-x-T4-P4-lag-3.png'
    """
    plain = re.sub(r"[^\w.+-]+", "-", name).strip("-.") or "scenario"
    plain = plain.encode()[:_LONGEST].decode(errors="ignore")
    return f"{plain}.png" if lag is None else f"{plain}-lag-{lag}.png"
