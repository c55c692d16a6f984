"""Laws of the task graph: what may overlap does, what must wait waits, and the order of the input does not matter."""

from __future__ import annotations

import random

import pytest

from batchgen_beam.engine.layer_graph import LayerWork, Resource, Task, least_seconds, pass_tasks, schedule

C, D = Resource.COMPUTE, Resource.DISK


def seconds(layers: list[LayerWork], head: float = 0.0, buffers: int = 2) -> float:
    """Of a pass."""
    return schedule(pass_tasks(layers, head, buffers)).seconds


def test_tasks_of_one_resource_follow_each_other_and_others_overlap() -> None:
    """Two reads and a computation that needs the first: 2 + 3 on the disk, 4 beside the second."""
    line = schedule([Task("a", D, 2.0), Task("b", D, 3.0), Task("c", C, 4.0, ("a",))])
    assert (line.seconds, dict(line.starts)) == (6.0, {"a": 0.0, "b": 2.0, "c": 2.0})
    assert (line.busy[D], line.busy[C]) == (5.0, 4.0)


def test_the_longest_way_to_the_end_goes_first() -> None:
    """Of two ready reads the one that more work waits for; equal ones by name."""
    line = schedule([Task("a", D, 1.0), Task("z", D, 1.0), Task("end", C, 5.0, ("z",))])
    assert line.starts["z"] < line.starts["a"]
    assert line.seconds == 6.0
    assert schedule([Task("b", D, 1.0), Task("a", D, 1.0)]).starts == {"a": 0.0, "b": 1.0}


def test_the_order_of_the_input_does_not_matter() -> None:
    """Shuffled tasks give the same timeline."""
    work = [LayerWork(attention=0.3, sub_batches=3, restore=0.2, offload=0.1, feed_forward=0.5, chunks=2, read=0.4,
                      copy=0.3)] * 3
    tasks = list(pass_tasks(work, 0.2, 2))
    wanted = schedule(tasks)
    for seed in range(5):
        shuffled = list(tasks)
        random.Random(seed).shuffle(shuffled)
        assert schedule(shuffled) == wanted


@pytest.mark.parametrize(("tasks", "message"), [
    ([Task("a", C, 1.0), Task("a", D, 1.0)], "one name"),
    ([Task("a", C, 1.0, ("b",))], "waits for b"),
    ([Task("a", C, 1.0, ("b",)), Task("b", C, 1.0, ("a",))], "wait for each other"),
])
def test_graphs_that_are_none(tasks: list[Task], message: str) -> None:
    """A wrong graph is refused, never scheduled in part."""
    with pytest.raises(ValueError, match=message):
        schedule(tasks)


def test_weights_that_lie_there_cost_only_their_use() -> None:
    """Three layers of 2 x 1 + 0.5 + 3 and a head."""
    assert seconds([LayerWork(attention=1.0, sub_batches=2, combine=0.5, feed_forward=3.0)] * 3, 0.25) == 16.75


def test_reading_ahead_hides_behind_computing() -> None:
    """Reads of 2 s behind layers of 3 s: only the first is waited for; slower ones set the pace."""
    fast = LayerWork(attention=1.0, feed_forward=2.0, read=2.0)
    assert seconds([fast] * 4) == 2.0 + 2.0 + 3 * 3.0
    slow = LayerWork(attention=1.0, feed_forward=2.0, read=5.0)
    assert seconds([slow] * 4) == 4 * 5.0 + 2.0


def test_a_buffer_is_free_once_its_weights_were_used() -> None:
    """With one buffer nothing overlaps; with two, the second read runs beside the first use, the third waits for it."""
    work = [LayerWork(attention=0.0, feed_forward=3.0, read=2.0)] * 3
    assert seconds(work, buffers=1) == 15.0
    assert seconds(work, buffers=2) == 2.0 + 9.0


def test_chosen_experts_are_fetched_after_the_router() -> None:
    """On demand nothing is read before the layer's states are combined."""
    ahead = LayerWork(attention=2.0, feed_forward=1.0, read=2.0)
    late = LayerWork(attention=2.0, feed_forward=1.0, read=2.0, on_demand=True)
    assert seconds([ahead]) == 3.0
    assert seconds([late]) == 5.0


def test_whole_layers_wait_for_their_weights_before_attention() -> None:
    """Where attention's weights are streamed too, it waits for the first piece."""
    assert seconds([LayerWork(attention=2.0, feed_forward=1.0, read=2.0, whole=True)]) == 5.0


def test_keys_and_values_come_for_one_sub_batch_while_another_is_computed() -> None:
    """Two sub-batches' room: the third comes when the first is done."""
    work = LayerWork(attention=2.0, sub_batches=3, restore=1.0, offload=0.5, feed_forward=1.0)
    line = schedule(pass_tasks([work], 0.0, 2))
    assert line.seconds == 1.0 + 3 * 2.0 + 1.0
    assert line.starts["0000.restore.0002"] == 3.0
    assert line.busy[Resource.TO_HOST] == 1.5


def test_no_schedule_is_shorter_than_its_bound() -> None:
    """The bound that lets the planner leave choices out holds for passes of many forms."""
    draw = random.Random(1)
    for _ in range(50):
        buffers = draw.choice((1, 2, 3))
        layers = [LayerWork(attention=draw.random(), sub_batches=draw.randint(1, 3),
                            restore=draw.choice((0, draw.random())), feed_forward=draw.random(),
                            chunks=draw.randint(1, 3), read=draw.choice((0, draw.random())),
                            copy=draw.choice((0, draw.random())), on_demand=draw.random() < 0.5)
                  for _ in range(draw.randint(1, 5))]
        head = draw.random()
        assert seconds(layers, head, buffers) >= least_seconds(layers, head, buffers) - 1e-9


def test_attention_of_its_own_piece_waits_for_it() -> None:
    """With two buffers the third layer's attention is read once the first has been used; resources work in between."""
    work = [LayerWork(attention=1.0, attention_read=3.0, feed_forward=0.5)] * 3
    timeline = schedule(pass_tasks(work, 0.0, 2))
    starts = timeline.starts
    assert [starts[f"000{layer}.attention.0000"] for layer in range(3)] == [3.0, 6.0, 9.0]
    assert starts["0002.fetch"] == 6.0
    assert timeline.busy[Resource.DISK] == 9.0
    assert least_seconds(work, 0.0, 2) == 9.0
    one = schedule(pass_tasks(work, 0.0, 1)).starts
    assert one["0001.fetch"] == one["0000.attention.0000"] + 1.0
    assert least_seconds(work, 0.0, 1) == 12.0
