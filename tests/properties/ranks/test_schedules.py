"""Random schedules of engines with many ranks and faults; `ranks_schedules.py` runs thousands."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ranks_schedules import run_schedule


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 1 << 40))
def test_no_schedule_breaks_an_invariant(seed):
    run_schedule(seed, moves=100)
