"""What a node with a GPU is asked before roles start on it."""

import torch

from roll_core.roles.canary import gpu_faults


def test_gpus_that_are_there_and_compute_are_fit_and_missing_ones_are_counted():
    num_gpus = torch.cuda.device_count()
    assert gpu_faults(num_gpus) == []
    assert gpu_faults(num_gpus + 1) == [f"{num_gpus} GPUs are visible, cluster.devices_per_node asks for {num_gpus + 1}"]
