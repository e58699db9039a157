"""A mode's text is read back as that mode, alone and in a list."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from evenstride.core.spec import split_specs
from evenstride.core.sync_modes.mode_specs import (
    RATES,
    SYNC_NAMES,
    AllReduce,
    Asynchronous,
    DelayedMode,
    LocalSgd,
    ParameterServerMode,
    StaleSynchronous,
    SyncMode,
    sync_from_spec,
)

SERVERS, RATE = st.integers(1, 99), st.sampled_from(RATES)
MODES: st.SearchStrategy[SyncMode] = st.one_of(
    st.just(AllReduce()),
    st.builds(ParameterServerMode, SERVERS),
    st.builds(Asynchronous, SERVERS, RATE),
    st.builds(StaleSynchronous, st.integers(0, 99), SERVERS, RATE),
    st.builds(
        LocalSgd,
        st.integers(1, 10**6),
        st.integers(0, 10**6),
        st.floats(0, exclude_min=True, allow_infinity=False),
        st.floats(0, 1, exclude_max=True),
    ),
    st.just(DelayedMode()),
)


def with_colon(mode: SyncMode) -> str:
    return str(mode).replace("(", ":").replace(")", "")


@given(MODES)
def test_a_text_is_read_back_in_either_form(mode: SyncMode) -> None:
    assert sync_from_spec(str(mode)) == mode
    assert sync_from_spec(with_colon(mode)) == mode


@given(st.lists(st.tuples(MODES, st.booleans())), st.sampled_from([",", ", "]))
def test_a_list_is_read_back_whatever_the_forms(
    modes: list[tuple[SyncMode, bool]], comma: str
) -> None:
    text = comma.join(with_colon(mode) if colon else str(mode) for mode, colon in modes)

    specs = split_specs(text, SYNC_NAMES)

    assert [sync_from_spec(spec) for spec in specs] == [mode for mode, _ in modes]
