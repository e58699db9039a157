"""``evenstride plan``: tables, JSON, files, and what is refused."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from evenstride import __version__
from evenstride.cli.plan_request import installed_torch
from evenstride.planner.make_plan import MOST_MACHINES
from evenstride.planner.workload.workload_profile import (
    DeviceProfile,
    Model,
    Noise,
    Point,
    WorkloadProfile,
    write_profile,
)
from tests.messages import check_message
from tests.unit.cli.conftest import Answer, Shell
from tests.unit.planner.catalogue.test_live_prices import OTHERS
from tests.unit.planner.runs import SAMPLES, life, noisy

N1 = [item for item in OTHERS if item.provider == "gcp"]

Plan = Callable[..., Answer]

PRICES = """type,usd_per_h,accelerator,accelerators
small,1.0,T4,1
large,3.5,A100,1
other,0.5,,
broken,-1,T4,1
"""


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    points = tuple(Point(samples=b, step_s=0.01 + 0.002 * b, scatter=0.02) for b in (32, 128, 512))
    whole = WorkloadProfile(
        evenstride=__version__,
        torch=installed_torch() or "2.13.0",
        made_on="2026-05-01",
        model=Model(parameters=1_000_000, gradient_bytes=4e6, digest="abc"),
        samples=50_000,
        global_batch=512,
        devices=(DeviceProfile(type="small", points=points),),
        noise=Noise(scale=2000.0, low=1500.0, high=2600.0),
    )
    write_profile(whole, tmp_path / "profile.json")
    (tmp_path / "prices.csv").write_text(PRICES)
    return tmp_path / "profile.json"


@pytest.fixture
def plan(profile: Path, shell: Shell) -> Plan:
    """Return what plans for the profile, for 20 epochs, at the prices above."""
    prices = str(profile.parent / "prices.csv")
    return partial(shell, "plan", str(profile), "--epochs", "20", "--catalog", prices)


def test_a_deadline_chooses_the_cheapest_that_keeps_it(plan: Plan) -> None:
    found = plan("--deadline", "30m", "--json").json()

    chosen = found["candidates"][found["chosen"]]
    assert chosen["time_s"] <= 1800
    assert found["reason"] == "the cheapest within 30 min"
    keeping = [row for row in found["candidates"] if row["time_s"] <= 1800]
    assert chosen["cost_usd"] == min(row["cost_usd"] for row in keeping)
    assert found["types_left_out"] == ["other"]
    assert len(found["rows_refused"]) == 1
    assert "line 5 (broken)" in found["rows_refused"][0]
    for row in found["candidates"]:
        assert row["time_low_s"] < row["time_s"] < row["time_high_s"]
        assert row["cost_low_usd"] < row["cost_usd"] < row["cost_high_usd"]


def test_people_are_reported_what_and_why(plan: Plan) -> None:
    output = plan("--objective", "cost", "--explain", "--script", "train.py --lr 0.1").out
    output = " ".join(output.split())

    assert "Chosen: " in output
    assert "It is the cheapest." in output
    assert "refused, line 5 (broken)" in output
    assert "links were not measured" in output or "1 x small" in output
    assert "torchrun " in output
    assert "train.py --lr 0.1" in output
    assert "undated" in output


def test_files_for_skypilot_and_a_plot_are_written(plan: Plan, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plan(
        *("--objective", "time", "--no-mixed", "--sky", str(tmp_path / "sky")),
        *("--plot", str(tmp_path / "plot.png")),
    )

    task = yaml.safe_load((tmp_path / "sky" / "evenstride.yaml").read_text())
    assert task["num_nodes"] >= 1
    assert (tmp_path / "plot.png").stat().st_size > 10_000


def test_files_for_each_launcher_are_written(plan: Plan, tmp_path: Path) -> None:
    kinds = {"slurm": "sbatch", "jobset": "JobSet", "trainjob": "TrainJob", "kuberay": "RayJob"}
    options = [f"{kind}:{tmp_path / kind}" for kind in (*kinds, "sky")]
    given = [word for option in options for word in ("--write", option)]
    output = plan("--objective", "cost", "--job-name", "digits", *given).out

    texts = {kind: (tmp_path / kind).read_text() for kind in kinds}
    assert "#SBATCH --job-name=digits " in texts["slurm"]
    for kind in ("jobset", "trainjob", "kuberay"):
        *_, job = yaml.safe_load_all(texts[kind])
        assert (job["kind"], job["metadata"]["name"]) == (kinds[kind], "digits")
    assert yaml.safe_load((tmp_path / "sky" / "digits.yaml").read_text())["name"] == "digits"
    assert f"sbatch {tmp_path / 'slurm'}" in output
    assert output.count("kubectl apply -f -") == 3
    written = plan("--objective", "cost", "--json", *given).json()["files"]
    assert written == [
        *(str(tmp_path / kind) for kind in kinds),
        str(tmp_path / "sky/evenstride.yaml"),
    ]


def test_trainings_take_the_place_of_given_epochs(profile: Path, shell: Shell) -> None:
    found = shell(
        *("plan", str(profile), "--catalog", str(profile.parent / "prices.csv"), "--json"),
        *("--trained", "256:12", "--trained", "1024:18", "--objective", "cost"),
    ).json()

    check_message(found["caveats"])


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--deadline", "soon"), ("--deadline", "'soon'")),
        (("--budget", "-4"), ("--budget", "-4.0")),
        (("--objective", "fun"), ("--objective", "'fun'")),
        (("--links", "fast"), ("--links", "'fast'")),
        (("--batches", "0,5"), ("--batches", "'0,5'")),
        (("--deadline", "1s"), ()),
        (("--types", "tiny"), ("'tiny'",)),
        (("--plot", "plan.txt"), ()),
        (("--epochs", "0"), ("--epochs", "0.0")),
        (("--trained", "256:12"), ("--epochs", "--trained")),
        (("--target-loss", "0.3"), ("--epochs", "--target-loss")),
        (("--metric", "error"), ("--metric", "'error'", "--target-loss")),
        (("--script", "train.py 'x"), ("--script",)),
        (("--batches", "99999999999999999999"), ()),
        (("--batches", "60000"), ("60000", "50000 samples")),
        (("--restart", "3m"), ("--restart", "--spot")),
        (("--max-nodes", str(MOST_MACHINES + 1)), ()),
        (("--write", "accelerate:a.yaml"), ("--write", "'accelerate:a.yaml'")),
        (("--write", "slurm"), ("--write", "'slurm'")),
        (("--write", "slurm:/proc/x/a.sbatch"), ("/proc/x/a.sbatch",)),
        (("--write", "jobset:a.yaml", "--kuberay", "a.yaml"), ("are a.yaml",)),
        (("--write", "jobset:a.yaml", "--job-name", "My Job"), ("--job-name", "'My Job'")),
        (("--job-name", "digits"), ("--job-name", "--write")),
    ],
)
def test_invalid_input_is_refused(
    plan: Plan, options: tuple[str, ...], why: tuple[str, ...]
) -> None:
    answer = plan(*options)

    assert answer.code == 2
    assert answer.out == ""
    check_message(answer.err, *why)


def test_a_profile_of_another_version_is_refused_unless_forced(profile: Path, plan: Plan) -> None:
    plain = json.loads(profile.read_text())
    profile.write_text(json.dumps({**plain, "torch": "1.0.0"}))

    assert "measured with torch 1.0.0" in plan("--objective", "cost").err
    assert "Chosen" in plan("--force", "--objective", "cost").out


def test_a_run_needs_names_for_its_machines(tmp_path: Path, shell: Shell) -> None:
    assert "give --as TYPE" in shell("plan", str(tmp_path)).err


def test_an_invalid_training_is_refused(profile: Path, shell: Shell) -> None:
    assert "--trained is 'many'" in shell("plan", str(profile), "--trained", "many").err


def test_epochs_count_at_one_batch(profile: Path, plan: Plan) -> None:
    plain = json.loads(profile.read_text())
    other = profile.with_name("other.json")
    other.write_text(json.dumps({**plain, "global_batch": 1024}))

    assert "batches of 512 and 1024" in plan(str(other)).err


def test_the_epochs_at_the_chosen_batch_are_reported_everywhere(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")  # at 80, the table leaves the column out
    options = ("--batches", "1024", "--objective", "cost")
    row = (found := plan(*options, "--json").json())["candidates"][0]

    # Of 20 at 512, by the noise scale of 2000 (1500 to 2600).
    assert row["epochs"] == pytest.approx(20 * 3024 / 2512)
    assert row["epochs_low"] == pytest.approx(20 * 3624 / 3112)
    assert row["epochs_high"] == pytest.approx(20 * 2524 / 2012)
    assert found["variables"] == {"EVENSTRIDE_EPOCHS": "25", "EVENSTRIDE_GLOBAL_BATCH": "1024"}
    output = plan(*options, "--sync", "bsp-ps(servers=1)").out
    assert "batch 1024, 24.08 (23.29 to 25.09) epochs: " in output
    assert re.search(r"\bepochs\b", output.partition("Chosen: ")[0])
    check_message(output, "1024", "25", "train.py")
    named = "EVENSTRIDE_EPOCHS=25 EVENSTRIDE_GLOBAL_BATCH=1024 EVENSTRIDE_SYNC='bsp-ps(servers=1)'"
    assert f"{named} torchrun " in output


def test_files_for_skypilot_tell_the_script_of_the_plan(plan: Plan, tmp_path: Path) -> None:
    plan("--batches", "1024", "--no-mixed", "--sky", str(tmp_path))

    task = yaml.safe_load((tmp_path / "evenstride.yaml").read_text())
    assert task["envs"] == {"EVENSTRIDE_EPOCHS": "25", "EVENSTRIDE_GLOBAL_BATCH": "1024"}
    torch = (installed_torch() or "2.13.0").partition("+")[0]
    assert task["setup"].startswith(f"pip install torch=={torch}\n")


def test_spot_without_spot_prices_says_so(plan: Plan, profile: Path) -> None:
    output = plan("--spot", "--json").json()["caveats"]
    assert any("--spot changes nothing" in one for one in output)
    prices = profile.with_name("prices.csv")
    prices.write_text("type,usd_per_h,accelerator,spot\nsmall,1.0,T4,0.4\n")
    output = plan("--spot", "--restart", "3m", "--json").json()["caveats"]
    assert not any("--spot changes" in one for one in output)


def test_with_epochs_it_does_not_matter_what_profiles_came_to(
    profile: Path, plan: Plan, shell: Shell
) -> None:
    plain = json.loads(profile.read_text())
    other = profile.with_name("other.json")
    for path, target in ((profile, "loss 0.3"), (other, "loss 0.4")):
        one = {"batch": 512, "epochs": 9.0}
        path.write_text(json.dumps({**plain, "target": target, "trainings": [one]}))

    found = plan(str(other), "--batches", "512", "--json").json()

    assert found["candidates"][0]["epochs"] == 20
    assert found["target"] == ""
    prices = ("--catalog", str(profile.parent / "prices.csv"), "--json")
    own = ("--batches", "512", "--trained", "512:8")
    trained = shell("plan", str(profile), str(other), *prices, *own).json()
    assert trained["candidates"][0]["epochs"] == 8
    assert "different targets" in shell("plan", str(profile), str(other), *prices).refusal()


def test_todays_n1_machines_are_distinguished(
    profile: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched = SimpleNamespace(query=lambda **_: N1, GPUHuntError=RuntimeError)
    monkeypatch.setitem(sys.modules, "gpuhunt", fetched)
    plain = json.loads(profile.read_text())
    device = {**plain["devices"][0], "type": "n1-standard-8"}
    sky = profile.parent / "sky"
    options = ("plan", str(profile), "--epochs", "20", "--live", "gcp", "--sky", str(sky))

    profile.write_text(json.dumps({**plain, "devices": [device]}))
    assert "name it n1-standard-8+none, n1-standard-8+T4 or" in shell(*options).refusal()
    profile.write_text(json.dumps({**plain, "devices": [{**device, "device": "Tesla T4"}]}))
    output = shell(*options, "--max-nodes", "1", "--no-transfer").out

    assert "Chosen: 1 x n1-standard-8+T4:1" in output
    assert "Price: n1-standard-8+T4:1: 0.73 USD/h" in output
    task = yaml.safe_load((sky / "evenstride.yaml").read_text())
    assert task["resources"]["accelerators"] == "T4:1"


def changed(profile: Path, **device: object) -> None:
    """Change the profile's device."""
    plain = json.loads(profile.read_text())
    plain["devices"] = [{**plain["devices"][0], **device}]
    profile.write_text(json.dumps(plain))


def test_steps_of_a_processor_are_not_planned_as_those_of_an_accelerator(
    profile: Path, plan: Plan
) -> None:
    changed(profile, computed_on="cpu")

    assert "small has the accelerator T4" in plan().refusal()
    output = " ".join(plan("--force", "--objective", "cost").out.split())
    check_message(output)
    changed(profile, computed_on="cpu", type="other")
    found = plan("--objective", "cost", "--json").json()
    assert {row["cluster"].split(" x ")[1] for row in found["candidates"]} == {"other"}


def test_a_type_that_is_not_on_offer_is_named(profile: Path, plan: Plan) -> None:
    changed(profile, type="smal")

    output = plan().refusal()

    assert "has no smal, " in output
    assert "nearest are small" in output


def test_profiles_of_other_models_are_refused_for_that_first(profile: Path, plan: Plan) -> None:
    plain = json.loads(profile.read_text())
    other = profile.with_name("other.json")
    model = {**plain["model"], "digest": "another"}
    other.write_text(json.dumps({**plain, "global_batch": 1024, "model": model}))

    check_message(plan(str(other)).refusal())


def test_a_profile_that_fits_badly_is_doubted(profile: Path, plan: Plan) -> None:
    points = [{"samples": b, "step_s": t} for b, t in ((64, 0.054), (256, 0.044), (512, 0.119))]
    changed(profile, points=points)

    output = plan("--objective", "cost", "--json").json()["caveats"]

    check_message(output)


def test_the_script_is_the_one_that_was_measured(profile: Path, plan: Plan) -> None:
    profile.write_text(json.dumps({**json.loads(profile.read_text()), "script": "my.py --a 'b c'"}))
    asked = ("--objective", "cost", "--max-nodes", "1")

    (line,) = [one for one in plan(*asked).out.splitlines() if "torchrun" in one]
    assert line.endswith("torchrun --standalone --nproc-per-node=1 my.py --a 'b c'")
    assert plan(*asked, "--script", "other.py").out.rstrip().endswith("other.py")
    assert "--script is empty" in plan(*asked, "--script", "").refusal()


def test_spot_says_what_it_takes_for_granted(profile: Path, plan: Plan, tmp_path: Path) -> None:
    profile.with_name("prices.csv").write_text(
        "type,usd_per_h,accelerator,spot,interruption\n"
        "small,1.0,T4,0.2,<5%\nlarge,1.0,A100,0.2,<5%\n"
    )

    answer = plan("--spot", "--objective", "cost", "--sky", str(tmp_path / "sky"))

    output = " ".join(answer.out.split())
    assert "without an evenstride.Checkpointer" in output
    check_message(output, "--restart")
    assert "evenstride launch --store-only" in output
    assert "--spot train.py" in output


@pytest.mark.parametrize("columns", ["80", "120"])
def test_a_plan_is_no_wider_than_the_terminal_but_for_lines_to_run(
    plan: Plan, monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)

    shown, found = plan("--objective", "time").out, plan("--objective", "time", "--json").json()

    before, _, _ = shown.partition("To start it")
    lines = [line for line in before.splitlines() if "prices.csv" not in line]
    assert max(map(len, lines)) <= int(columns)
    mixed = [row["cluster"] for row in found["candidates"] if " + " in row["cluster"]]
    assert mixed, "so that a name of two types has to be shown"
    assert "…" not in before
    table = [line for line in lines if re.match(r"[* ]  \d+ x ", line)]
    left_out = len(found["candidates"]) - len(table)
    assert 1 < len(table) <= 12 < left_out
    assert f"{left_out} more candidates" in before


def rows_of(text: str) -> list[str]:
    """Return the clusters in the table of a plan, the marked one with a star."""
    return re.findall(r"^([* ]  \d+ x \S+)", text, re.MULTILINE)


@pytest.mark.parametrize("columns", ["80", "100", "200"])
def test_a_plan_has_one_table_of_at_most_100_columns(
    plan: Plan, profile: Path, monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    name = "small" if columns == "80" else "small-machine-with-a-long-name-in-zone-a"
    changed(profile, type=name)
    prices = profile.with_name("prices.csv")
    prices.write_text(prices.read_text().replace("small", name))

    shown = plan("--objective", "cost", "--no-mixed").out
    headings = [line for line in shown.splitlines() if "cluster" in line and "batch" in line]
    assert len(headings) == 1
    assert {"cluster", "batch", "time", "USD"} <= set(headings[0].split())
    table = shown[shown.index(headings[0]) : shown.index("Chosen: ")]
    assert max(map(len, table.splitlines()[:-2])) <= min(int(columns), 100)


def test_nearly_equal_candidates_are_left_out_of_the_table(plan: Plan) -> None:
    asked = ("--objective", "time", "--no-mixed")
    shown, found = plan(*asked).out, plan(*asked, "--json").json()

    assert len(rows_of(shown)) < len(found["candidates"])
    (chosen,) = [row for row in rows_of(shown) if row.startswith("*")]
    assert (
        chosen.removeprefix("*").split() == found["candidates"][found["chosen"]]["cluster"].split()
    )


def test_a_machine_at_a_higher_price_for_the_same_speed_is_not_in_the_table(
    plan: Plan, profile: Path
) -> None:
    prices = "type,usd_per_h,accelerator\nsmall,1.0,T4\nlarge,3.5,A100\nlarger,7.0,A100\n"
    profile.with_name("prices.csv").write_text(prices)

    shown = plan("--objective", "knee").out
    assert "x large " in shown
    assert "larger" not in shown.partition("Chosen: ")[0]


def test_five_notes_are_shown_and_the_rest_on_request(plan: Plan) -> None:
    few, all_of_them = (
        re.findall(r"^- (.*)$", plan("--objective", "time", *more).out, re.MULTILINE)
        for more in ((), ("--explain",))
    )

    assert few[:5] == all_of_them[:5] and len(few) == 6
    assert few[5] == f"{len(all_of_them) - 5} more: --explain"
    caveats = plan("--objective", "time", "--json").json()["caveats"]
    assert len(all_of_them) >= len(caveats) > 3


def test_the_folder_of_a_search_has_several_runs(tmp_path: Path, shell: Shell) -> None:
    for number, size in (("1", 10), ("2", 99)):
        (tmp_path / "on" / f"phase-{number}").mkdir(parents=True)
        (tmp_path / "on" / f"phase-{number}" / "trace.jsonl").write_text("x" * size)

    output = shell("plan", str(tmp_path / "on"), "--as", "small").refusal()

    assert output.rstrip().endswith("on/phase-2")


def test_a_run_given_with_a_profile_has_noise_at_its_own_batch(profile: Path, plan: Plan) -> None:
    plain = json.loads(profile.read_text())
    profile.write_text(json.dumps({**plain, "samples": SAMPLES, "noise": None}))
    steps = [noisy(n, 900.0) for n in range(40)]
    version = {"evenstride": __version__, "torch": plain["torch"]}
    run = life(profile.parent / "run", steps, batch=256, busy_s={0: 0.1}, **version)

    found = plan(str(run), "--json").json()

    check_message(found["caveats"], "20", "512")


def test_the_full_search_compares_the_clusters_of_the_runs(tmp_path: Path, shell: Shell) -> None:
    (tmp_path / "prices.csv").write_text("type,usd_per_h,vcpus\nbox,0.1,2\n")
    runs = list[str]()
    for workers, batch, busy_s in ((1, 64, 0.25), (2, 64, 0.15), (1, 256, 0.55), (2, 256, 0.75)):
        folder = tmp_path / f"{workers}x{batch}"
        names = [f"host/{rank}" for rank in range(workers)]
        times_s = dict.fromkeys(range(workers), busy_s)
        torch = installed_torch() or "2.13.0"
        life(
            folder,
            batch=batch,
            workers=names,
            busy_s=times_s,
            evenstride=__version__,
            torch=torch,
        )
        runs.append(str(folder))

    found = shell(
        *("plan", *runs, "--as", "box", "--catalog", str(tmp_path / "prices.csv"), "--json"),
        *("--full", "--trained", "64:10", "--trained", "256:12", "--objective", "time"),
    ).json()

    rows = {(row["workers"], row["global_batch"]): row["step_s"] for row in found["candidates"]}
    assert (found["looked_at"], found["gap"]) == (4, 0.0)
    chosen = found["candidates"][found["chosen"]]
    assert (chosen["workers"], chosen["global_batch"]) == (1, 256)
    assert rows[1, 256] == pytest.approx(0.6), "with the waits of 0.05 s"
    assert chosen["time_s"] == pytest.approx(12 * SAMPLES / 256 * 0.6)
    assert any("were trained were compared" in caveat for caveat in found["caveats"])
