"""Canary of a node with GPUs: the health check before roles start on it. `make test-gpu`."""

import torch

from roll_core.roles.canary import gpu_faults


def test_working_gpus_have_no_faults_and_missing_ones_are_counted():
    num_gpus = torch.cuda.device_count()
    assert gpu_faults(num_gpus) == []
    assert gpu_faults(num_gpus + 1) == [f"{num_gpus} GPUs are visible, cluster.devices_per_node asks for {num_gpus + 1}"]
