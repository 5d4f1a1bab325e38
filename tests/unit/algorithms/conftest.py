import pytest
import torch


@pytest.fixture(scope="package", autouse=True)
def _one_thread():
    """Tensors of a few numbers: threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
