"""What a leg that takes over owes the next one."""

import pytest

from tasks.recover import is_checkpoint_overdue
from tests.support import tiny_config
from tests.unit.test_checkpoint_records import manifest


@pytest.mark.parametrize(
    ("iteration", "num_replayed", "is_missed"),
    [
        (5, 1, False),  # every 4: loaded 4, none due since
        (8, 4, True),  # that of 8 was being stored
        (9, 5, True),
        (4, 0, False),
        (10, 2, True),  # the last of the run, which always has one
        (10, 0, False),
    ],
)
def test_a_checkpoint_that_died_with_its_leg_is_made_again(tmp_path, iteration, num_replayed, is_missed):
    config = tiny_config(tmp_path, iterations=10, checkpoint={"every": 4})
    assert is_checkpoint_overdue(manifest("a-1", iteration), num_replayed, config) is is_missed
