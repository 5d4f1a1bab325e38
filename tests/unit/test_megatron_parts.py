"""Megatron backend without process groups: boxes of checkpoints, masks, vocabulary shards, unsupported settings."""

from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roll_core.batching.packing import PackingLimits
from roll_core.config.training.training import Packing
from roll_core.errors import UserError
from roll_core.training.megatron.checkpoint import boxes
from roll_core.training.scorer import Vocabulary
from tests.micro_batches import cut
from tests.support import random_samples, tiny_config


def test_a_flat_range_splits_into_the_end_of_a_row_whole_rows_and_the_beginning_of_one():
    assert list(boxes((4, 10), 7, 33)) == [((0, 7), (1, 3)), ((1, 0), (2, 10)), ((3, 0), (1, 3))]
    assert list(boxes((4, 10), 12, 15)) == [((1, 2), (1, 3))]
    assert list(boxes((4, 10), 10, 10)) == []


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple), st.data())
def test_boxes_hold_each_element_of_the_flat_range_once_and_in_order(shape, data):
    start = data.draw(st.integers(0, prod(shape)))
    stop = data.draw(st.integers(start, prod(shape)))
    elements = torch.arange(prod(shape)).view(shape)
    found = []
    for begin, sizes in boxes(shape, start, stop):
        box = elements[tuple(slice(b, b + s) for b, s in zip(begin, sizes, strict=True))].flatten().tolist()
        assert box == list(range(box[0], box[0] + len(box))), "a box is a run itself"
        found += box
    assert found == list(range(start, stop))


@pytest.mark.parametrize("packing", list(Packing))
def test_rows_with_one_sequence_need_no_mask(packing):
    row_tokens = None if packing is Packing.NONE else 26
    for batch in cut(random_samples(6), PackingLimits(4096, row_tokens, packing)):
        plain = torch.ones(batch.token_ids_RT.shape[1], batch.token_ids_RT.shape[1]).tril().bool()
        looks_plain = all(
            torch.equal(mask[0][:length, :length], plain[:length, :length])
            for mask, length in zip(batch.attention_mask(), (batch.segment_RT > 0).sum(1).tolist(), strict=True)
        )
        assert batch.has_one_sequence_per_row == looks_plain == (packing is Packing.NONE)


def test_a_blank_micro_batch_trains_nothing_and_has_the_same_width():
    (batch,) = cut(random_samples(3), PackingLimits(4096, None, Packing.ROWS))
    blank = batch.blank()
    assert blank.token_ids_RT.shape == (1, batch.token_ids_RT.shape[1])
    assert len(blank.target_ids_N) == blank.num_sequences == blank.num_turns == 0


REFUSED = {
    "algorithm.kind ppo has a critic": {"algorithm": {"kind": "ppo"}},
    "training.compile is for training.backend torch": {"training": {"backend": "megatron", "compile": True}},
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_settings_that_the_backend_does_not_support_are_refused_by_name(sentence, tmp_path):
    with pytest.raises(UserError, match=sentence):
        tiny_config(tmp_path, **{"training": {"backend": "megatron"}} | REFUSED[sentence])


def test_a_vocabulary_shard_locates_its_own_targets_only():
    column_C, is_here_C = Vocabulary(start=10).locate(torch.tensor([3, 10, 14, 15]), size=5)
    assert is_here_C.flatten().tolist() == [False, True, True, False]
    assert column_C.flatten().tolist() == [0, 0, 4, 4]
