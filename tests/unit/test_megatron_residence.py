"""Memory that is taken from under its views, and given back."""

import torch

from roll_core.training.megatron.offload import MegatronOffloader


def test_views_are_read_on_the_host_and_are_what_they_were_afterwards():
    buffer, gradients = torch.arange(12.0), torch.arange(6.0)
    matrix, part, hidden = torch.nn.Parameter(buffer[2:8].view(2, 3)), buffer[4:6], buffer[3:5]
    memory = buffer.untyped_storage()
    residence = MegatronOffloader(torch.device("cpu"))
    for _ in range(2):
        residence.offload([matrix, part, matrix], emptied=[gradients])
        assert memory.nbytes() == gradients.untyped_storage().nbytes() == 0
        assert matrix.tolist() == [[2, 3, 4], [5, 6, 7]]
        assert part.tolist() == [4, 5]
        residence.offload([matrix], emptied=[])  # they are away already
        residence.reload()
        residence.reload()
    assert gradients.tolist() == [0] * 6
    with torch.no_grad():
        matrix += 10
    assert part.tolist() == [14, 15]  # one memory again, also for a view that nobody told of
    assert hidden.tolist() == [13, 14]


def test_what_changed_while_it_was_away_is_what_comes_back():
    tensor = torch.zeros(4)
    residence = MegatronOffloader(torch.device("cpu"))
    residence.offload([tensor], emptied=[])
    tensor += 1
    residence.reload()
    assert tensor.tolist() == [1, 1, 1, 1]


def test_places_on_the_host_are_used_again_and_new_ones_made_where_sizes_differ():
    residence, first, second = MegatronOffloader(torch.device("cpu")), torch.ones(3), torch.ones(5)
    for tensors in ([first], [first, second], [second], [second, first]):
        residence.offload(tensors, emptied=[])
        assert all(bool((tensor == 1).all()) for tensor in tensors)
        residence.reload()
    assert first.tolist() == [1] * 3
    assert second.tolist() == [1] * 5
