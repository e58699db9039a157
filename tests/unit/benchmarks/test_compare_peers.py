"""The comparison with other systems: figures from notes, what is run again, and the page."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from benchmarks.peers.compare_peers import PAGE, PEERS, RESULTS, Comparison, read, wanted
from benchmarks.peers.peer_blocks import Lengths, gradient_error, proportional
from benchmarks.peers.peer_figures import (
    Note,
    disturbed,
    pause_s,
    samples_of_updates,
    samples_per_s,
    tail,
    to_loss_s,
)
from benchmarks.peers.peer_page import page, uneven_rows
from benchmarks.peers.published_peer import next_sizes

from evenstride.lab.demo.demo_script import load_task


def steps(*times_s: float, samples: int = 10, loss: float = 1.0) -> list[Note]:
    """Return a note of an update at each time."""
    return [Note(at, samples, loss, number + 1) for number, at in enumerate(times_s)]


def test_a_rate_counts_whole_steps_only() -> None:
    notes = [steps(1.0, 2.0, 3.0, 4.0, 5.0), steps(0.5, 2.5, 4.5)]

    # 2 of 10 samples in 2 s, and one in the 2 s before 2.5.
    assert samples_per_s(notes, 1.0, 3.5) == pytest.approx(10.0 + 5.0)


def test_a_worker_that_hangs_has_worked_for_the_whole_window() -> None:
    assert samples_per_s([steps(1.0, 2.0, 3.0)], 1.0, 11.0) == pytest.approx(2.0)
    assert samples_per_s([steps(1.0)], 2.0, 11.0) == 0.0


def test_the_loss_is_a_mean_over_the_samples_of_an_epoch() -> None:
    fast = [Note(1.0, 10, 1.0, 1), Note(2.0, 10, 0.6, 2), Note(3.0, 10, 0.2, 3)]
    slow = [Note(2.5, 10, 0.4, 1)]

    assert to_loss_s([fast, slow], 0.41, 30) == pytest.approx(2.0)
    assert to_loss_s([fast, slow], 0.41, 40) is None
    assert to_loss_s([fast, slow], 0.3, 20) == pytest.approx(2.0)


def test_a_pause_is_the_longest_time_without_an_update_after_a_loss() -> None:
    survivor = steps(1.0, 2.0, 3.0, 8.0, 9.0)
    accumulating = [Note(4.0, 10, 1.0, 0), Note(5.0, 10, 1.0, 0)]

    assert pause_s([survivor, accumulating], 3.5) == pytest.approx(4.0)
    assert pause_s([steps(1.0, 2.0)], 3.5) == math.inf


def test_samples_of_steps_without_an_update_belong_to_the_next_one() -> None:
    notes = [
        Note(1.0, 1, 1.0, 0, (1,)),
        Note(2.0, 1, 1.0, 1, (2,)),
        Note(3.0, 1, 1.0, 1, (3,)),
        Note(4.0, 1, 1.0, 2, (4,)),
    ]

    assert samples_of_updates(notes) == {1: [1, 2], 2: [3, 4]}


def test_the_tail_is_what_the_epoch_had_left() -> None:
    one = [Note(1.0, 2, 1.0, 1, (0, 1)), Note(2.0, 1, 1.0, 2, (4,)), Note(3.0, 1, 1.0, 3, (0,))]
    other = [Note(1.0, 2, 1.0, 1, (2, 3)), Note(2.0, 1, 1.0, 2, (0,))]

    assert tail([one, other], 5) == (2, [4], 1)
    assert tail([one, other], 6) is None


def test_a_gradient_is_compared_with_that_of_the_samples(tmp_path: Path) -> None:
    task = load_task(None)
    _, x, y = task.train[:12]

    def kept(weights: list[float]) -> float:
        net = task.net()
        before = torch.nn.utils.parameters_to_vector(net.parameters()).detach()
        losses = F.cross_entropy(net(x), y, reduction="none")
        (losses * torch.tensor(weights)).sum().backward()  # type: ignore[no-untyped-call]
        grads = torch.nn.utils.parameters_to_vector([p.grad for p in net.parameters()])  # type: ignore[misc]
        torch.save({"grads": grads, "weights": before}, tmp_path / "update-0-1.pt")
        return gradient_error(tmp_path, 1, list(range(12)))

    assert kept([1 / 12] * 12) < 1e-5
    # The mean of three workers' means, of 7, 4 and 1 samples.
    assert kept([1 / 21] * 7 + [1 / 12] * 4 + [1 / 3]) > 0.1


def test_the_published_rules_follow_busy_times_and_keep_the_batch() -> None:
    assert next_sizes("dbs", [20, 20, 20], [1.0, 2.0, 4.0]) == [34, 17, 9]
    assert next_sizes("omnilearn", [20, 20, 20], [1.0, 1.1, 1.2]) == [20, 20, 20]
    # Without the bounds, it would be 30, 30 and 0.
    assert next_sizes("omnilearn", [20, 20, 20], [1.0, 1.0, 50.0]) == [28, 28, 4]
    assert proportional((1.0, 0.5, 0.5)) == (96, 48, 48)


def test_a_block_is_disturbed_if_the_sum_of_speeds_changes_by_a_tenth() -> None:
    assert not disturbed(100.0, 109.0)
    assert disturbed(100.0, 112.0)
    assert disturbed(0.0, 0.0)


def test_every_system_has_an_adapter_and_requirements() -> None:
    for peer in PEERS.values():
        assert peer.script.exists()
        assert (peer.script.parent / "requirements" / f"{peer.venv}.txt").exists()


def test_the_order_of_the_systems_changes_from_round_to_round() -> None:
    order = list(wanted(["ddp", "adaptdl"], ["by-hand", "equal"], 2))

    assert order == [
        (0, "by-hand", "ddp"),
        (0, "equal", "ddp"),
        (0, "equal", "adaptdl"),
        (1, "by-hand", "ddp"),
        (1, "equal", "adaptdl"),
        (1, "equal", "ddp"),
    ]


@dataclass(slots=True)
class Rehearsal(Comparison):
    """A comparison without processes, whose workers' sums are given."""

    sums: list[float] = field(default_factory=list)
    ran: list[str] = field(default_factory=list)

    def figures(self, peer: str, measure: str) -> dict[str, Any]:
        self.ran.append(peer)
        return {"figures": {measure: 1.0}, "error": None}

    def sum_of(self, measure: str) -> float | None:
        assert measure == "equal"
        return self.sums.pop(0)


def rehearse(out: Path, sums: list[float], ends_s: float = math.inf) -> list[str]:
    """Compare two systems, and return what was run."""
    comparison = Rehearsal(out, out, ends_s, Lengths(), sums=sums)
    comparison.run(["ddp", "dbs"], ["equal"], 1)
    return comparison.ran


def test_disturbed_blocks_are_repeated_once_and_stay_in_the_file(tmp_path: Path) -> None:
    out = tmp_path / "results.json"

    assert rehearse(out, [1.0, 1.0, 1.0, 2.0, 1.0, 2.0]) == ["ddp", "dbs", "dbs"]
    assert [one["disturbed"] for one in read(out)["blocks"]] == [False, True, True]
    # A later run has nothing to add.
    assert rehearse(out, []) == []


def test_no_block_starts_when_the_time_is_over(tmp_path: Path) -> None:
    assert rehearse(tmp_path / "results.json", [], ends_s=0.0) == []


def block(peer: str, rate: float, **more: Any) -> dict[str, Any]:
    """Return a block on unequal workers whose speeds sum to 100."""
    figures = {
        "samples_per_s": rate,
        "to_loss_s": None,
        "swap_samples_per_s": rate / 2,
        "swap_lost_s": 5.0,
    }
    return {
        "round": 0,
        "measure": "uneven",
        "peer": peer,
        "figures": figures,
        "error": None,
        "sums": [90.0, 110.0],
        "disturbed": False,
        **more,
    }


def test_rows_are_ordered_by_share_and_leave_disturbed_blocks_out() -> None:
    blocks = [
        block("ddp", 33.0),
        block("ddp", 66.0, disturbed=True),
        block("evenstride", 94.0),
        block("evenstride", 96.0),
        block("dbs", 50.0, disturbed=True),
    ]

    assert uneven_rows(blocks) == [
        (
            *("evenstride", "95 (94 to 96)", "95 % (94 % to 96 %)", "not in 2 of 2"),
            *("48 % (47 % to 48 %)", "5.0 s (5.0 s to 5.0 s)", "2", "0"),
        ),
        ("dbs", "50*", "50 %*", "not in 1 of 1*", "25 %*", "5.0 s*", "1", "1"),
        ("ddp", "33", "33 %", "not in 1 of 1", "16 %", "5.0 s", "2", "1"),
    ]


def test_a_failure_is_on_the_page_with_its_error() -> None:
    failed = block("ddp", 33.0, figures=None, error="worker 0 ended with `np.int`")
    stored = {**read(RESULTS), "blocks": [failed], "installs": {"hivemind": "no wheel"}}

    text = page(stored)
    assert "| ddp | failed | failed |" in text
    assert "- **ddp**, uneven: `worker 0 ended with 'np.int'`" in text
    assert "- **hivemind** could not be installed: `no wheel`" in text


def test_the_page_is_that_of_the_file() -> None:
    assert PAGE.read_text() == page(json.loads(RESULTS.read_text()))
