"""Progress of one queue against a set of offsets."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from cometmq.client.receiving.progress import Progress


@dataclass
class FakeMessage:
    queue_offset: int


def arrive(progress: Progress, start: int, end: int, offsets: list[int]) -> None:
    progress.arrived(start, end, [FakeMessage(each) for each in offsets])  # type: ignore[misc]
    progress.delivered = end


chunks = st.lists(
    st.lists(st.booleans(), min_size=1, max_size=6), min_size=1, max_size=6
)  # per chunk, per offset: whether it is delivered


@given(chunks, st.data())
def test_progress_is_the_smallest_unacknowledged_offset(
    layout: list[list[bool]], data: st.DataObject
) -> None:
    first = data.draw(st.integers(0, 3))
    progress = Progress(first)
    delivered: list[int] = []
    end = first
    for chunk in layout:
        start = end
        offsets = [start + i for i, wanted in enumerate(chunk) if wanted]
        end = start + len(chunk)
        arrive(progress, start, end, offsets)
        delivered += offsets
    acknowledged: set[int] = set()
    runs = st.tuples(st.integers(0, len(delivered)), st.integers(0, len(delivered)))
    for begin, stop in data.draw(st.lists(runs, max_size=8)):
        wanted = delivered[min(begin, stop) : max(begin, stop)]
        if len(wanted) > 1 and data.draw(st.booleans()):
            if not progress.acknowledge_run(wanted[0], wanted[-1], len(wanted)):
                for each in wanted:
                    progress.acknowledge(each)
        else:
            for each in data.draw(st.permutations(wanted)):
                progress.acknowledge(each)
        acknowledged.update(wanted)
        left = [each for each in delivered if each not in acknowledged]
        if left:
            assert progress.done <= left[0]
            before = [each for each in delivered if each < left[0]]
            assert progress.done >= (before[-1] + 1 if before else first)
        else:
            assert progress.done == end
            assert not progress.outstanding


def test_a_run_with_holes_is_not_taken_for_whole() -> None:
    progress = Progress(0)
    arrive(progress, 0, 10, list(range(10)))
    assert not progress.acknowledge_run(0, 4, 4)
    assert progress.acknowledge_run(5, 9, 5)
    assert progress.done == 0
    assert progress.acknowledge_run(0, 4, 5)
    assert progress.done == 10


def test_offsets_without_a_message_do_not_hold_progress_back() -> None:
    progress = Progress(0)
    arrive(progress, 0, 100, [])
    assert progress.done == 100
    arrive(progress, 100, 200, [150])
    assert progress.done == 100
    progress.acknowledge(150)
    assert progress.done == 200


@given(chunks, st.data())
def test_what_comes_behind_an_offset_is_read_anew(
    layout: list[list[bool]], data: st.DataObject
) -> None:
    """By another expression, of which all are wanted: nothing is done but what was acknowledged,
    or left out where it was read."""
    progress = Progress(0)
    delivered: list[int] = []
    end = 0
    for chunk in layout:
        offsets = [end + i for i, wanted in enumerate(chunk) if wanted]
        progress.arrived(end, end + len(chunk), [FakeMessage(each) for each in offsets])  # type: ignore[misc]
        delivered += offsets
        end += len(chunk)
    handed_out = delivered[: data.draw(st.integers(0, len(delivered)))]
    for each in (acknowledged := data.draw(st.lists(st.sampled_from(handed_out or [-1])))):
        progress.acknowledge(each)
    position = max(progress.done, handed_out[-1] + 1 if handed_out else 0)
    left = sorted(set(handed_out) - set(acknowledged))
    progress.forget_from(position)
    arrive(progress, position, end + 5, list(range(position, end + 5)))
    for each in left:
        assert progress.done <= each
        progress.acknowledge(each)
    assert progress.done == position
    for each in range(position, end + 5):
        assert progress.done == each
        progress.acknowledge(each)
    assert not progress.outstanding
