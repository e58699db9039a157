"""Train, measure, decide and switch, until training stays in the best configuration."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date

from evenstride.core.gradients.noise_scale import Z95
from evenstride.errors import ConfigError
from evenstride.lab.online.phase_measurements import facts_of, probe_of
from evenstride.lab.online.search_journal import (
    CHECKPOINTS,
    OnlineRequest,
    OnlineResult,
    SearchJournal,
    Switch,
    opened,
)
from evenstride.lab.online.training_phase import (
    QUICK_S,
    START_S,
    Ground,
    OnlineTraining,
    PhaseProcesses,
    ScriptPhase,
    ground,
)
from evenstride.lab.processes.speeds import check_fit, usable_cpus
from evenstride.lab.processes.trial_checkpoints import Trials, make_folder, require_script
from evenstride.planner.online_forecast import (
    Configuration,
    OnlineForecast,
    Probe,
    TrainingJob,
    carried_over,
    misses,
)
from evenstride.planner.online_policy import (
    USUAL_SWITCH_S,
    OnlineDecision,
    OnlineStanding,
    awaits_noise,
    best_known,
    choices,
    decide,
    extremes,
    must_restart,
    overhead,
    whole_epochs,
    with_gamma,
)
from evenstride.planner.online_store import (
    SearchStore,
    StoredKnowledge,
    confirms,
    knowledge_of,
    search_profile,
)
from evenstride.planner.workload.epochs_to_target import epochs_of_runs
from evenstride.planner.workload.from_trace import Facts
from evenstride.planner.workload.model_store import command_text, of_script
from evenstride.planner.workload.workload_profile import WorkloadProfile

_LOOK_S = 0.5  # between two reads of a trace
_TELL_S = 30.0  # between two progress messages after the choice
_STOP_S = 120.0  # longest time for a phase to save and end
_NOISE_EVERY = 3
_NO_STEP = (
    "did not save and end when asked to, because it did not call its Checkpointer's step() after "
    "every optimizer step; add that call"
)

Say = Callable[[str], None]


def search(
    asked: OnlineRequest, say: Say = lambda _: None, store: SearchStore | None = None
) -> OnlineResult:
    """Train a script to its end, and find the best workers and batch meanwhile.

    With a ``store``, it begins with what earlier searches measured.
    """
    require_script(asked.command[0])
    if asked.speeds:
        check_fit(asked.speeds, usable_cpus())
    make_folder(asked.folder)
    journal = opened(asked.folder.resolve(), asked.to_plain())
    trials = Trials(asked.folder.resolve() / CHECKPOINTS, restore=asked.restore)
    with ground(asked.speeds) as (on, limits):
        say(limits)
        return _Search(asked, on, journal, trials, say, store or SearchStore()).run()


@dataclass(slots=True)
class _Search:
    asked: OnlineRequest
    on: Ground
    journal: SearchJournal
    trials: Trials
    say: Say
    store: SearchStore
    known: StoredKnowledge | None = None  # what the store knows of this job, once it is known
    facts: Facts | None = None  # of the workload
    possible: tuple[Configuration, ...] = ()
    foreseen: tuple[OnlineForecast, ...] = ()
    started_s: float = 0.0  # time of the first committed step since the latest start
    carried: float = 0.0  # samples trained before that start
    continued: bool = False
    epochs_by: str = ""  # where the epochs at other batches come from

    def run(self) -> OnlineResult:
        at = self._begun()
        if at is None:
            self.say("the training had already ended")
            return OnlineResult(self.journal, (), None, None, 0.0, self.continued)
        self.started_s = at.first_s
        while self.journal.chosen is None:
            probe = self._measure(at)
            if probe is None:
                return self._found(at, None)
            decision = self._decide(at, probe)
            to = self._restarted(at) if decision.to is None else decision.to
            following = at if to is None else self._switch(at, to)
            if following is None:
                return self._found(at, None)
            at = following
            if decision.to is None:
                self._stay(at, decision)
        return self._to_the_end(at)

    def _begun(self) -> OnlineTraining | None:
        """Start the first phase; return it once it trains, or ``None`` if nothing is left."""
        before = self.journal.chosen or self.journal.present
        first, self.continued = before or self._first(), before is not None
        at = self._training(first)
        self.say(f"{_phase(self.journal.phases, first)}: begins")
        at.crew.go()
        if not at.await_first_step() and at.crew.restored is not None:
            return None
        self._take_up(at)
        self.carried = self.journal.samples
        return at

    def _first(self) -> Configuration:
        """Return the best configuration by the stored model of the command, else the smallest.

        With other arguments, the model may be larger, and a large batch not fit into memory.
        """
        found = of_script(self.asked.command, self.store.searches)
        if found and found[0][1].same:
            profile, like = found[0][0].profile, found[0][1]
            batches = self.asked.batches or (profile.global_batch,)
            known = self._knowledge(profile.model_copy(update={"global_batch": min(batches)}))
            possible = choices(self.asked.workers, batches)
            job = self._job(profile.samples, profile.model.gradient_bytes, min(batches), known, [])
            ranked = best_known(job, possible, known.probes) if known.probes else ()
            if ranked and known.doubt is None:  # not from a similar job
                self.foreseen = ranked
                self.say(f"{ranked[0].choice} is the best by the stored model of {like.why}")
                return ranked[0].choice
        fewest = min(self.asked.workers)
        if not self.asked.batches:
            return Configuration(fewest, 0)
        return extremes(self.asked.workers, self.asked.batches)[0]

    def _training(self, choice: Configuration) -> OnlineTraining:
        return OnlineTraining(self.asked.command[0], self._start(choice), choice)

    def _start(self, choice: Configuration) -> PhaseProcesses:
        folder = self.journal.file.parent / f"phase-{self.journal.start_phase()}"
        # Without --batches, the script keeps its own batch.
        batch = choice.batch if self.asked.batches else None
        own = {"EVENSTRIDE_NOISE": str(_NOISE_EVERY)} if len(self.asked.batches) > 1 else {}
        phase = ScriptPhase(choice.workers, batch, folder, self._epochs(choice))
        own |= self.trials.variables()
        return PhaseProcesses.started(phase, self.asked.command, own, self.on)

    def _epochs(self, choice: Configuration) -> int:
        """Return the epochs of the whole training, if it continues in a configuration."""
        found = self._foreseen(choice)
        if found is not None:
            return whole_epochs(found)
        if choice == self.journal.present and self.journal.epochs is not None:
            return self.journal.epochs
        return math.ceil(self.asked.epochs)

    def _foreseen(self, choice: Configuration) -> OnlineForecast | None:
        return next((one for one in self.foreseen if one.choice == choice), None)

    def _take_up(self, at: OnlineTraining) -> None:
        """Read the workload and the starting point; refuse a script that cannot take part."""
        known = at.facts()
        at.check(known, open_batch=bool(self.asked.batches))
        for line in self.trials.news():
            self.say(line)
        at.settle(known)
        self.possible = choices(self.asked.workers, self.asked.batches or (known.global_batch,))
        self.facts = known
        if self.known is None:
            self.known = self._knowledge(self._profile(known, []))
            for part in self.known.parts:
                self.say(part.sentence(date.today()))
            if self.foreseen and not self.known.probes:
                self.say("the stored model is of another model or other data, so it does not count")
        # Work that was saved before an interruption counts for the configuration of that time.
        self.journal.train(at.choice.batch, at.began - self.journal.samples)
        self.journal.enter(at.choice, at.crew.phase.epochs)

    def _measure(self, at: OnlineTraining) -> Probe | None:
        probe: Probe | None = None
        looked_s = 0.0

        def enough() -> bool:
            nonlocal probe, looked_s
            if at.crew.steps < self.asked.probe_steps or time.monotonic() - looked_s < _LOOK_S:
                return False
            looked_s = time.monotonic()
            probe = probe_of(at.crew.phase.trace, self.asked.probe_steps)
            return probe is not None and self._noise_known(at, probe)

        if not at.until(enough, math.inf):
            return None
        assert probe is not None, "enough() has returned true"
        self.journal.note(probe)
        step_ms, factor = probe.step_s * 1e3, math.exp(Z95 * probe.drift)
        self.say(
            f"{_phase(self.journal.phases, at.choice)}: {step_ms:.3g} ms per step ("
            f"{step_ms / factor:.3g} to {step_ms * factor:.3g}), "
            f"{at.choice.batch / probe.step_s:.0f} samples/s, from {probe.steps} steps"
            + _noise(probe)
        )
        return probe

    def _noise_known(self, at: OnlineTraining, probe: Probe) -> bool:
        """Return whether a phase needs no more steps for its noise."""
        assert self.known is not None, "the phase trains"
        if len(set(self.asked.batches)) < 2 or self.asked.trained or self.known.settled:
            return True
        return not awaits_noise(probe.noise, at.samples / (self.asked.epochs * at.length))

    def _decide(self, at: OnlineTraining, probe: Probe) -> OnlineDecision:
        known = facts_of(at.crew.phase.trace)
        assert known is not None, "the phase has been measured"
        assert self.known is not None, "the phase trains"
        measured = [*(one for one in self.journal.probes if one is not probe), probe]
        base = min(self.asked.batches or (at.choice.batch,))
        job = self._job(at.length, known.gradient_bytes, base, self.known, measured)
        trained = dict(self.journal.trained)
        trained[at.choice.batch] = trained.get(at.choice.batch, 0.0) + at.samples
        standing = OnlineStanding(
            at.choice,
            trained,
            self.journal.switch_s(USUAL_SWITCH_S),
            len(self.journal.switches) + 1,
            confirms(job, self.possible, self.known, measured),
        )
        stored = carried_over(job, self.known.probes, measured, self.known.doubt)
        self._compare(job, probe)
        decision = decide(job, self.possible, [*stored, *measured], standing)
        self.foreseen = decision.foreseen  # the epochs follow from it
        self.epochs_by = job.lasts.why
        self.journal.decide(decision.reason, self._epochs(at.choice))
        self.say(f"stays: {decision.reason}" if decision.to is None else f"next: {decision.reason}")
        if decision.to is None and job.batches > 1:
            self.say(self.epochs_by)
        return decision

    def _job(
        self,
        samples: int,
        gradient_bytes: float,
        base: int,
        known: StoredKnowledge,
        probes: Sequence[Probe],
    ) -> TrainingJob:
        """Return the training, with the noise and the epochs that the store knows."""
        trained = self.asked.trained
        return TrainingJob(
            samples,
            self.asked.epochs,
            base,
            gradient_bytes,
            self.asked.objective,
            self.asked.usd_per_h,
            known.noise_with(probes),
            len(set(self.asked.batches)) or 1,
            epochs_of_runs(with_gamma(trained, self.journal.probes)) if trained else known.fitted,
        )

    def _knowledge(self, profile: WorkloadProfile) -> StoredKnowledge:
        """Return what the store knows of a job; ``--trained`` has its epochs by batch already."""
        epochs = None if self.asked.trained else self.asked.epochs
        return knowledge_of(profile, epochs, self.asked.batches, self.store)

    def _profile(self, known: Facts, probes: Sequence[Probe]) -> WorkloadProfile:
        base = min(self.asked.batches or (known.global_batch,))
        return search_profile(
            known, probes, self.store.types, command_text(self.asked.command), base
        )

    def _compare(self, job: TrainingJob, probe: Probe) -> None:
        """Say how far the stored model misses a measured step."""
        assert self.known is not None, "the phase trains"
        if self.known.probes and (missed := misses(job, self.known.probes, [probe])):
            self.say(f"the stored model misses this step by {math.exp(-missed[0]) - 1:+.1%}")

    def _switch(self, at: OnlineTraining, to: Configuration) -> OnlineTraining | None:
        begun_s, step, step_s = time.monotonic(), at.crew.steps, self.journal.probes[-1].step_s
        following = self._training(to)
        if not at.until(lambda: following.crew.up, START_S, successor=following.crew):
            following.crew.kill()
            return None
        at.crew.stop()
        last, last_s = at.crew.steps, time.monotonic()

        def saved() -> bool:
            nonlocal last, last_s
            if at.crew.steps > last:
                last, last_s = at.crew.steps, time.monotonic()
            return at.crew.saved

        if not at.until(saved, _STOP_S, _NO_STEP, every_s=QUICK_S, successor=following.crew):
            following.crew.kill()
            return None
        following.crew.go()
        if not following.await_first_step(QUICK_S):
            return None
        self._hand_over(at, following, (begun_s, last_s), (last - step) * step_s)
        at.crew.bury()
        return following

    def _hand_over(
        self,
        at: OnlineTraining,
        following: OnlineTraining,
        between: tuple[float, float],
        usual_s: float,
    ) -> None:
        begun_s, last_s = between
        began = following.restored_at(at.length)
        if began is None:
            raise ConfigError(
                f"{self.asked.command[0]} started from scratch, because it does not call restore() "
                "of its Checkpointer before the loop; add that call"
            )
        self.journal.train(at.choice.batch, began - at.began)
        self._take_up(following)
        gap_s = following.first_s - last_s
        slowed_s = max(last_s - begun_s - usual_s, 0.0)
        switch = Switch(at.choice, following.choice, gap_s, slowed_s)
        self.journal.switched(switch, following.first_s - at.first_s)
        self.say(
            f"{_phase(self.journal.phases, following.choice)}: continues after {gap_s:.2f} s; "
            f"its start had slowed down the phase before by {slowed_s:.2f} s"
        )

    def _restarted(self, at: OnlineTraining) -> Configuration | None:
        """Return the present configuration, if it must be restarted with other epochs."""
        here, given = self._foreseen(at.choice), at.crew.phase.epochs
        switch_s = self.journal.switch_s(USUAL_SWITCH_S)
        if here is None or not must_restart(here, given, at.length, switch_s):
            return None
        self.say(
            f"{at.choice} needs {whole_epochs(here)} epochs instead of {given}; restarting it with "
            "these"
        )
        return at.choice

    def _stay(self, at: OnlineTraining, decision: OnlineDecision) -> None:
        self.journal.stay(at.choice, decision.reason)
        self.say(f"trains to the end; its output is in {at.crew.phase.folder}/rank-0.log")

    def _to_the_end(self, at: OnlineTraining) -> OnlineResult:
        reported_s, begun, begun_s = time.monotonic(), at.samples, time.monotonic()

        def report() -> bool:
            nonlocal reported_s
            now_s = time.monotonic()
            if now_s - reported_s >= _TELL_S:
                reported_s = now_s
                self._report_progress(at, (at.samples - begun) / (now_s - begun_s))
            return False

        at.until(report, math.inf)
        after = probe_of(at.crew.phase.trace, 1)
        return self._found(at, after)

    def _report_progress(self, at: OnlineTraining, per_s: float) -> None:
        """Print the trained epochs, and the remaining time at the present rate."""
        trained, whole = self.journal.samples + at.samples, at.crew.phase.epochs * at.length
        left = max(whole - trained, 0.0)
        rest = f"; about {left / per_s:.0f} s remain at this rate" if per_s > 0 else ""
        self.say(f"{trained / at.length:.1f} of {at.crew.phase.epochs} epochs trained{rest}")

    def _found(self, at: OnlineTraining, after: Probe | None) -> OnlineResult:
        now_s = time.monotonic()
        samples = self.journal.samples - self.carried
        self.journal.train(at.choice.batch, at.samples)
        cost = None
        # For a session that was interrupted, its duration and its lost work are unknown.
        if after is not None and self.journal.chosen is not None and not self.continued:
            per_s = after.choice.batch / after.step_s
            cost = overhead(self.journal.search_s, samples, per_s, now_s - at.first_s)
        total_s = now_s - self.started_s
        kept = bool(self.journal.probes and self.store.types)
        return OnlineResult(
            self.journal,
            self.foreseen,
            after,
            cost,
            total_s,
            self.continued,
            self.epochs_by,
            self._profile(self.facts, self.journal.probes) if self.facts and kept else None,
            self.known.parts if self.known else (),
        )


def _phase(number: int, choice: Configuration) -> str:
    if choice.batch:
        return f"phase {number}, {choice}"
    plural = "" if choice.workers == 1 else "s"
    return f"phase {number}, {choice.workers} worker{plural}"


def _noise(probe: Probe) -> str:
    if probe.noise is None:
        return ""
    high = "" if probe.noise.high is None else f" to {probe.noise.high:.0f}"
    unsettled = ", not settled" if probe.noise.settled is False else ""
    return f", noise scale {probe.noise.scale:.0f} samples ({probe.noise.low:.0f}{high}){unsettled}"
