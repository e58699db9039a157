from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstride.core.fleet import FloatArray
from evenstride.core.predictors import (
    NETWORK_NAMES,
    PREDICTOR_NAMES,
    Autoregressive,
    MovingAverage,
    Predictor,
    predictor_named,
)
from evenstride.core.speed_networks import Lstm, Narx, SimpleRnn, SpeedNetwork
from evenstride.errors import ConfigError
from tests.messages import raises_message

every_predictor = pytest.mark.parametrize("name", PREDICTOR_NAMES)


def _unknown(workers: int) -> FloatArray:
    return np.full((2, workers), np.nan)


def _errors(
    predictor: Predictor[Any], speeds: FloatArray, loads: FloatArray
) -> tuple[Any, FloatArray]:
    """Return the last state and the relative errors of every prediction after the first step."""
    everyone, errors = np.arange(speeds.shape[1]), []
    state = predictor.start(len(everyone))
    for step, speed in enumerate(speeds):
        if step:
            errors.append(predictor.predict(state, loads[step]) / speed - 1.0)
        state = predictor.learn(state, everyone, speed, loads[step])
    return state, np.array(errors)


def _rmse(errors: FloatArray) -> float:
    return float(np.sqrt((errors[100:] ** 2).mean()))


def _busy_machines(seed: int, *, workers: int = 6) -> tuple[FloatArray, FloatArray]:
    """Return noisy speeds that fall with the load, and the loads, of some hundred steps."""
    rng = np.random.default_rng(seed)
    load = np.repeat(rng.choice([0.0, 0.25, 0.5, 0.75], (40, workers)), 10, axis=0)
    noise = np.exp(0.05 * rng.standard_normal(load.shape))
    speeds = rng.uniform(100, 2000, workers) * (1 - 0.8 * load) * noise
    memory = np.full_like(load, 0.4)
    return speeds, np.stack([load, memory], axis=1)


@every_predictor
def test_nothing_is_predicted_for_a_worker_never_seen(name: str) -> None:
    predictor = predictor_named(name)
    state = predictor.start(2)

    state = predictor.learn(state, np.array([1]), np.array([5.0]), _unknown(1))

    predicted = predictor.predict(state, _unknown(2))
    assert np.isnan(predicted[0])
    assert predicted[1] == pytest.approx(5.0)


@every_predictor
def test_a_steady_speed_is_predicted(name: str) -> None:
    speeds = np.tile([3.0, 4000.0], (300, 1))

    _, errors = _errors(predictor_named(name), speeds, np.full((300, 2, 2), np.nan))

    assert float(np.abs(errors).max()) < 1e-3


@every_predictor
def test_a_change_of_speed_is_predicted_after_a_while(name: str) -> None:
    speeds = np.concatenate([np.full((80, 1), 100.0), np.full((60, 1), 25.0)])

    _, errors = _errors(predictor_named(name), speeds, np.full((140, 2, 1), np.nan))

    assert float(np.abs(errors[-20:]).max()) < 0.05


@every_predictor
@given(data=st.data())
def test_predictions_are_finite_positive_and_pure_whatever_was_seen(
    name: str, data: st.DataObject
) -> None:
    predictor = predictor_named(name)
    speed = st.floats(1e-9, 1e15)
    load = st.floats(0, 1) | st.just(np.nan)
    state = predictor.start(2)
    for _ in range(data.draw(st.integers(1, 12))):
        loads = np.array(data.draw(st.lists(load, min_size=4, max_size=4))).reshape(2, 2)
        speeds = np.array(data.draw(st.lists(speed, min_size=2, max_size=2)))
        before = pickle.dumps(state)

        after = predictor.learn(state, np.array([0, 1]), speeds, loads)

        assert pickle.dumps(state) == before, "nothing was changed in place"
        again = predictor.learn(pickle.loads(before), np.array([0, 1]), speeds, loads)
        predicted = predictor.predict(after, loads)
        assert np.array_equal(predicted, predictor.predict(again, loads))
        assert np.isfinite(predicted).all()
        assert (predicted > 0).all()
        state = after


def test_the_average_forgets_at_its_rate() -> None:
    speeds, loads = np.array([[8.0], [4.0], [4.0]]), np.full((3, 2, 1), np.nan)

    state, _ = _errors(MovingAverage(smoothing=0.5), speeds, loads)

    assert state.tolist() == [5.0]


def test_an_autoregression_learns_an_alternation() -> None:
    speeds = np.where(np.arange(200) % 2, 90.0, 110.0)[:, None]

    _, errors = _errors(Autoregressive(), speeds, np.full((200, 2, 1), np.nan))

    assert _rmse(errors) < 0.01


@pytest.mark.parametrize("name", ["lstm", "rnn"])
def test_a_recurrent_network_remembers_more_than_the_last_speed(name: str) -> None:
    # Two slow steps follow two fast ones, so the last speed alone does not show the next one.
    speeds = np.where(np.arange(600) % 4 < 2, 80.0, 120.0)[:, None]

    _, errors = _errors(predictor_named(name), speeds, np.full((600, 2, 1), np.nan))

    assert float(np.abs(errors[-100:]).max()) < 0.02


def test_an_autoregression_that_sees_nothing_new_keeps_a_bounded_covariance() -> None:
    speeds = np.full((3000, 1), 7.0)

    state, _ = _errors(Autoregressive(forgetting=0.9), speeds, np.full((3000, 2, 1), np.nan))

    spread = np.linalg.eigvalsh(state.cov[0])
    assert 0 < float(spread.min()) < float(spread.max()) < 100


@every_predictor
@pytest.mark.parametrize("factor", [1e-9, 1e9])
def test_one_absurd_speed_is_got_over(name: str, factor: float) -> None:
    speeds = np.full((300, 1), 50.0)
    speeds[100] *= factor

    _, errors = _errors(predictor_named(name), speeds, np.full((300, 2, 1), np.nan))

    assert float(np.abs(errors[-100:]).max()) < 0.05


@pytest.mark.parametrize("name", NETWORK_NAMES)
def test_a_network_uses_the_given_loads(name: str) -> None:
    speeds, loads = _busy_machines(1)
    blind, network = np.full_like(loads, np.nan), predictor_named(name)

    reported, untold = (_errors(network, speeds, known)[1] for known in (loads, blind))
    others = [_errors(predictor_named(n), speeds, loads)[1] for n in ("last", "ema", "ar")]

    assert _rmse(reported) < 0.08 < 0.7 * min(map(_rmse, others)), "noise alone is 0.05"
    assert _rmse(reported) < 0.6 * _rmse(untold)
    assert _rmse(untold) < 1.1 * min(map(_rmse, others)), "without loads it is no worse"


def test_what_narx_learned_on_some_workers_holds_for_others() -> None:
    taught, _ = _errors(Narx(), *_busy_machines(1))
    speeds, loads = _busy_machines(2)

    fixed = Narx().knowing(taught, learns=False)
    state, errors = _errors(fixed, speeds, loads)
    _, fresh = _errors(Narx(), speeds, loads)

    assert _rmse(errors) < 0.08
    assert float(np.abs(errors[:30]).mean()) < float(np.abs(fresh[:30]).mean())
    assert np.array_equal(state.learned.weights, taught.learned.weights), "it does not go on"


def test_narx_takes_an_unknown_load_for_the_last_known() -> None:
    predictor = Narx()
    state, _ = _errors(predictor, *_busy_machines(1, workers=1))
    latest = 0.5 + state.loads[:, 0].T

    assert np.array_equal(predictor.predict(state, _unknown(1)), predictor.predict(state, latest))
    assert not np.array_equal(
        predictor.predict(state, latest), predictor.predict(state, 1 - latest)
    )


def test_narx_is_taught_by_all_workers_in_turn() -> None:
    everyone = np.arange(40)
    state = Narx().start(40)
    state = Narx().learn(state, everyone, np.full(40, 10.0), _unknown(40))

    taught = []
    for _ in range(3):
        speeds = np.exp(state.speeds[:, 0])
        changed = [
            k
            for k in everyone
            if not np.array_equal(
                Narx()
                .learn(state, everyone, np.where(everyone == k, 11.0, speeds), _unknown(40))
                .learned.weights,
                state.learned.weights,
            )
        ]
        taught.append(changed)
        state = Narx().learn(state, everyone, speeds, _unknown(40))

    assert taught == [list(range(16)), list(range(16, 32)), [*range(8), *range(32, 40)]]


@pytest.mark.parametrize(
    "predictor",
    [Narx(delays=2, hidden=3), SimpleRnn(delays=3, hidden=2), Lstm(delays=3, hidden=2)],
    ids=lambda predictor: predictor.name,
)
def test_a_step_of_several_workers_teaches_their_least_squares(predictor: SpeedNetwork) -> None:
    rng, everyone = np.random.default_rng(5), np.arange(4)
    reader = replace(predictor, learns=False)
    state = predictor.start(4)
    for _ in range(3):
        speeds = np.exp(0.2 * rng.standard_normal(4))
        state = reader.learn(state, everyone, speeds, rng.random((2, 4)))
    weights = 0.2 * rng.standard_normal(len(state.learned.weights))
    state = replace(state, learned=replace(state.learned, weights=weights))
    loads, missed = rng.random((2, 4)), np.array([0.1, -0.1, 0.05, 0.0])

    def log_speeds(of: FloatArray) -> FloatArray:
        known = replace(state, learned=replace(state.learned, weights=of))
        return np.log(predictor.predict(known, loads))

    nudges = 1e-5 * np.eye(len(weights))
    slopes = np.stack(
        [(log_speeds(weights + one) - log_speeds(weights - one)) / 2e-5 for one in nudges], axis=1
    )

    taught = predictor.learn(state, everyone, np.exp(log_speeds(weights) + missed), loads).learned

    information = np.linalg.inv(state.learned.cov) + slopes.T @ slopes
    change = np.linalg.solve(information, slopes.T @ missed)
    assert taught.weights - weights == pytest.approx(change, abs=1e-6)
    assert taught.cov == pytest.approx(np.linalg.inv(information), abs=1e-5)


def test_a_spike_teaches_no_more_than_a_large_error() -> None:
    predictor, (state, _) = Narx(), _errors(Narx(), *_busy_machines(1, workers=1))
    usual, worker, loads = np.exp(state.speeds[0, 0]), np.array([0]), _unknown(1)

    large, spike = (
        predictor.learn(state, worker, np.array([usual / by]), loads) for by in (5.0, 5000.0)
    )

    assert np.array_equal(large.learned.weights, spike.learned.weights)


def test_a_correction_is_limited() -> None:
    predictor = Narx(delays=2, hidden=3)
    state = predictor.learn(predictor.start(1), np.array([0]), np.array([10.0]), _unknown(1))
    weights = np.where(np.arange(len(state.learned.weights)) == 0, 50.0, 0.0)
    wild = replace(state, learned=replace(state.learned, weights=weights))

    predicted = predictor.predict(wild, _unknown(1))

    assert float(predicted[0]) == pytest.approx(10 * np.e)


def test_narx_forgets_what_held_before() -> None:
    speeds, loads = _busy_machines(1)
    turned = np.concatenate([loads[:200], 1 - loads[200:]])

    kept, forgot = (_errors(Narx(forgetting=part), speeds, turned)[1][200:] for part in (1.0, 0.9))

    assert _rmse(forgot) < 0.9 * _rmse(kept)


def test_the_first_step_fills_the_delays_and_loads_end_at_one() -> None:
    loads = np.array([[0.75], [7.0]])

    state = Narx(delays=3).learn(Narx(delays=3).start(1), np.array([0]), np.array([np.e]), loads)

    assert state.speeds.tolist() == [[1.0, 1.0, 1.0]]
    assert state.loads.tolist() == [[[0.25, 0.5]] * 3]


@pytest.mark.parametrize(
    "make",
    [
        lambda: MovingAverage(smoothing=0.0),
        lambda: Autoregressive(order=0),
        lambda: Autoregressive(forgetting=1.5),
        lambda: Narx(delays=0),
        lambda: Narx(hidden=0),
        lambda: Narx(forgetting=0.0),
        lambda: SimpleRnn(delays=0),
        lambda: Lstm(hidden=0),
    ],
)
def test_settings_that_make_no_sense_are_refused(make: Any) -> None:
    with raises_message(ConfigError):
        make()


def test_an_unknown_name_is_refused() -> None:
    with raises_message(ConfigError):
        predictor_named("gru")
