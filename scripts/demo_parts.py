"""What the demo does in processes of its own: copy, flip a bit, compare, generate."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def copy(source: str, dest: str) -> None:
    """Copy every object of a checkpoint to a local folder."""
    from ckptool.storage import open_store

    store = open_store(source)
    for info in store.list():
        path = Path(dest, info.key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(store.read(info.key))


def flip(folder: str) -> None:
    """Flip one bit in the middle of the largest tensor's payload; print where."""
    from ckptool.operations.open import open_checkpoint

    index = open_checkpoint(folder).index
    entry = max(index.tensors, key=lambda tensor: tensor.num_bytes)
    item = entry.chunks[0].item
    assert item is not None
    byte = item.offset + item.length // 2
    with open(Path(folder, item.file), "r+b") as file:
        file.seek(byte)
        (value,) = file.read(1)
        file.seek(byte)
        file.write(bytes([value ^ 1]))
    print(json.dumps({"entry": entry.key, "file": item.file, "byte": byte}))


def compare(first: str, second: str) -> None:
    """Load two checkpoints with stock torch and compare every bit."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

    def load(url: str) -> dict[str, object]:
        reader = FsspecReader(url)
        metadata = reader.read_metadata()
        state: dict[str, object] = {}
        for key, entry in metadata.state_dict_metadata.items():
            if hasattr(entry, "size"):
                state[key] = torch.zeros(entry.size, dtype=entry.properties.dtype)
            else:
                state[key] = None
        dcp.load(state, storage_reader=FsspecReader(url), no_dist=True)
        return state

    def raw(tensor: torch.Tensor) -> bytes:
        return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()

    a, b = load(first), load(second)
    assert a.keys() == b.keys()
    num_tensors = num_bytes = 0
    for key, value in a.items():
        if isinstance(value, torch.Tensor):
            other = b[key]
            assert isinstance(other, torch.Tensor) and raw(value) == raw(other), key
            num_tensors += 1
            num_bytes += value.numel() * value.element_size()
        else:
            assert value == b[key], key
    print(f"stock dcp.load: {num_tensors} tensors, {num_bytes} bytes, every bit the same")


def generate(weights: str, config_file: str, step: str) -> None:
    """Load an exported file in a plain single-process model; print its loss and some text."""
    from safetensors.torch import load_file

    from trainer.config_file import load_config
    from trainer.generate import plain_model

    plain = plain_model(load_config(config_file, overrides=[]))
    state = {key: value.float() for key, value in load_file(weights).items()}
    plain.model.load_state_dict(state)
    print(f"{len(state)} tensors loaded in one plain process")
    print(f"its loss on the batch of step {step}: {plain.loss(int(step)):.4f}")
    print(f"it writes: {plain.continue_text('def ', num_tokens=60)!r}")


PARTS = {"copy": copy, "flip": flip, "compare": compare, "generate": generate}

if __name__ == "__main__":
    PARTS[sys.argv[1]](*sys.argv[2:])
