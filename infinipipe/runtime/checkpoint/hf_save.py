"""Saves a run's weights as a Hugging Face directory, each stage its own safetensors file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

from infinipipe.ir import Header
from infinipipe.runtime.model import HEAD


def save_weights(
    directory: Path, header: Header, stage: int | None, parameters: dict[str, nn.Parameter]
) -> None:
    """Write the model that all stages hold, complete or not at all; every rank calls it.

    Args:
        directory: where the model goes; it appears under this name when every stage has written.
        stage: the stage whose weights this rank writes, None if another replica does.
        parameters: by global name. A tied head is left out, as in Hugging Face's own files.
    """
    temporary = directory.with_name(directory.name + ".tmp")
    if dist.get_rank() == 0:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    dist.barrier()
    sizes: dict[str, int] = {}
    if stage is not None:
        names = [name for name in parameters if not (header.model.tied and name == HEAD)]
        tensors = {name: parameters[name].detach().cpu().contiguous() for name in names}
        sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
        save_file(
            tensors, temporary / _file_name(stage, len(header.stages)), metadata={"format": "pt"}
        )
    everyone: list[tuple[int | None, dict[str, int]]] = [(None, {})] * dist.get_world_size()
    dist.all_gather_object(everyone, (stage, sizes))
    if dist.get_rank() == 0:
        files = {
            name: _file_name(s, len(header.stages))
            for s, own in everyone
            if s is not None
            for name in own
        }
        _write_index(temporary, files, sum(sum(own.values()) for _, own in everyone))
        config = json.loads(header.model.config) | {
            "dtype": str(torch.float32).removeprefix("torch.")
        }
        (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        temporary.replace(directory)
    dist.barrier()


def _file_name(stage: int, num_stages: int) -> str:
    return f"model-{stage + 1:05d}-of-{num_stages:05d}.safetensors"


def _write_index(directory: Path, files: dict[str, str], total_bytes: int) -> None:
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(files.items()))}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
