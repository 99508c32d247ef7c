"""One rank of a script that starts a save or an export, and ends without ``close()``."""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist

from ckptool.torch import Checkpointer, LiveExporter

if __name__ == "__main__":
    what, url, options, groups = sys.argv[1:]
    dist.init_process_group("gloo")
    state = {"w": torch.arange(4e6).reshape(4000, 1000), "b": torch.ones(3)}
    if what == "save":
        Checkpointer(url, storage_options=json.loads(options)).save(1, state)
    else:
        exporter = LiveExporter()
        exporter.export(state, f"{url}/model.safetensors", storage_options=json.loads(options))
    if groups == "destroyed":
        dist.destroy_process_group()
