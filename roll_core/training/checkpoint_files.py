"""Files of torch.distributed.checkpoint, by who wrote them."""

from pathlib import Path

import torch.distributed as dist


def written_files(folder: Path) -> list[Path]:
    """Those of this rank. The metadata, without which nothing can be read, is rank 0's and written last."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    mine = sorted(folder.glob(f"__{rank}_*.distcp"))
    return [*mine, folder / ".metadata"] if rank == 0 else mine
