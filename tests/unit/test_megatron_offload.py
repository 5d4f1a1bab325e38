"""Offload of Megatron's tensors: their device memory is freed, and restored for all views of it."""

import torch

from roll_core.training.megatron.offload import MegatronOffloader


def test_views_can_be_read_while_offloaded_and_are_restored_by_a_reload():
    buffer, gradients = torch.arange(12.0), torch.arange(6.0)
    matrix, part, hidden = torch.nn.Parameter(buffer[2:8].view(2, 3)), buffer[4:6], buffer[3:5]
    memory = buffer.untyped_storage()
    offloader = MegatronOffloader(torch.device("cpu"))
    for _ in range(2):
        offloader.offload([matrix, part, matrix], emptied=[gradients])
        assert memory.nbytes() == gradients.untyped_storage().nbytes() == 0
        assert matrix.tolist() == [[2, 3, 4], [5, 6, 7]]
        assert part.tolist() == [4, 5]
        offloader.offload([matrix], emptied=[])  # offloaded already
        offloader.reload()
        offloader.reload()
    assert gradients.tolist() == [0] * 6
    with torch.no_grad():
        matrix += 10
    assert part.tolist() == [14, 15]  # views share one storage again, also the view that was not passed to offload
    assert hidden.tolist() == [13, 14]


def test_changes_while_offloaded_survive_the_reload():
    tensor = torch.zeros(4)
    offloader = MegatronOffloader(torch.device("cpu"))
    offloader.offload([tensor], emptied=[])
    tensor += 1
    offloader.reload()
    assert tensor.tolist() == [1, 1, 1, 1]


def test_host_buffers_are_reused_and_new_ones_are_made_for_other_sizes():
    offloader, first, second = MegatronOffloader(torch.device("cpu")), torch.ones(3), torch.ones(5)
    for tensors in ([first], [first, second], [second], [second, first]):
        offloader.offload(tensors, emptied=[])
        assert all(bool((tensor == 1).all()) for tensor in tensors)
        offloader.reload()
    assert first.tolist() == [1] * 3
    assert second.tolist() == [1] * 5
