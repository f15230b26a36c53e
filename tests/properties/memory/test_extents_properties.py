"""Cutting, for any runs: nothing lost, nothing twice, aligned, and as few as can be."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from kvtide.memory.extents import MAX_EXTENT_BYTES, MIN_EXTENT_BYTES, Span, cap_for, cut, merge

# No test may depend on how fast the machine is.
unhurried = settings(deadline=None)
granules = st.integers(0, 600)
caps = st.integers(0, 8).map(lambda power: MIN_EXTENT_BYTES << power)
some_spans = st.lists(
    st.builds(
        lambda at, size: Span(at * MIN_EXTENT_BYTES, size * MIN_EXTENT_BYTES),
        granules,
        st.integers(1, 80),
    ),
    max_size=6,
)


def granules_of(spans: list[Span]) -> list[int]:
    return [
        at for span in spans for at in range(span.offset_bytes, span.end_bytes, MIN_EXTENT_BYTES)
    ]


def fewest(start: int, end: int, cap: int) -> int:
    """The fewest aligned powers of two that make up a range, by trying all, in granules."""
    best = {start: 0}
    for at in range(start, end):
        size = 1
        while size <= cap and at % size == 0 and at + size <= end:
            best[at + size] = min(best.get(at + size, end), best[at] + 1)
            size *= 2
    return best[end]


@unhurried
@given(some_spans, caps)
def test_extents_cover_exactly_the_spans(spans, cap_bytes):
    extents = cut(spans, cap_bytes)
    covered = granules_of(extents)
    assert covered == sorted(set(granules_of(spans)))
    for extent in extents:
        assert extent.size_bytes & (extent.size_bytes - 1) == 0
        assert MIN_EXTENT_BYTES <= extent.size_bytes <= cap_bytes
        assert extent.offset_bytes % extent.size_bytes == 0


@unhurried
@given(some_spans, caps)
def test_no_other_cut_has_fewer_extents(spans, cap_bytes):
    unit = MIN_EXTENT_BYTES
    least = sum(
        fewest(run.offset_bytes // unit, run.end_bytes // unit, cap_bytes // unit)
        for run in map(Span._make, merge(spans))
    )
    assert len(cut(spans, cap_bytes)) == least


@unhurried
@given(some_spans)
def test_merged_runs_do_not_touch(spans):
    runs = [Span(*run) for run in merge(spans)]
    assert all(a.end_bytes < b.offset_bytes for a, b in itertools.pairwise(runs))
    assert granules_of(runs) == sorted(set(granules_of(spans)))


@unhurried
@given(st.integers(0, 1 << 45))
def test_a_cap_is_an_extent_and_a_64th_at_most(total_bytes):
    cap_bytes = cap_for(total_bytes)
    assert cap_bytes & (cap_bytes - 1) == 0
    assert MIN_EXTENT_BYTES <= cap_bytes <= MAX_EXTENT_BYTES
    assert cap_bytes == MIN_EXTENT_BYTES or cap_bytes * 64 <= total_bytes
    assert cap_bytes == MAX_EXTENT_BYTES or cap_bytes * 128 > total_bytes
