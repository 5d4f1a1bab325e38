"""A small slice of `make fuzz`: changed stores are read the same, or refused in one sentence."""

from tests.fuzz.stores import try_many


def test_no_change_of_a_store_gives_a_traceback_or_is_read_silently(tmp_path):
    outcomes, findings = try_many(tmp_path, 25, first_seed=5000)
    assert findings == []
    assert sum(outcomes.values()) == 25
