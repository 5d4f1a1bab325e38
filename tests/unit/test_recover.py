"""Recovery: whether a resumed leg stores a checkpoint that its predecessor could not."""

import pytest

from tasks.recover import is_checkpoint_overdue
from tests.support import tiny_config
from tests.unit.test_checkpoint_records import manifest


@pytest.mark.parametrize(
    ("iteration", "num_replayed", "is_overdue"),
    [
        (5, 1, False),  # a checkpoint every 4 iterations: 4 was loaded, and none was due since
        (8, 4, True),  # the checkpoint of 8 was being stored
        (9, 5, True),
        (4, 0, False),
        (10, 2, True),  # the last of the run, which always has one
        (10, 0, False),
    ],
)
def test_a_checkpoint_that_was_lost_with_its_leg_is_stored_again(tmp_path, iteration, num_replayed, is_overdue):
    config = tiny_config(tmp_path, iterations=10, checkpoint={"every": 4})
    assert is_checkpoint_overdue(manifest("a-1", iteration), num_replayed, config) is is_overdue
