"""Saves a run's weights as a Hugging Face directory, each stage its own safetensors file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

from infinipipe.ir import Header
from infinipipe.runtime.device import DTYPE_NAME
from infinipipe.runtime.model import HEAD
from infinipipe.runtime.ranks import Ranks


class _Saved(NamedTuple):
    """What one rank has written."""

    file: str
    sizes: dict[str, int]
    """Bytes of each weight in it."""


def save_weights(
    directory: Path, header: Header, ranks: Ranks, parameters: dict[str, nn.Parameter]
) -> None:
    """Write the model that all stages hold, complete or not at all; every rank calls it.

    Args:
        directory: where the model goes; it has this name only when every stage has written.
        header: of the plan.
        ranks: this process.
        parameters: by global name. A tied head is left out, as in Hugging Face's own files.
    """
    temporary = directory.with_name(directory.name + ".tmp")
    if ranks.is_writer:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    # The folder is there before any rank writes into it.
    dist.barrier()
    saved = _save_stage(temporary, header, ranks, parameters) if ranks.saves_weights else None
    everyone: list[_Saved | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, saved)
    if ranks.is_writer:
        _write_index(temporary, [one for one in everyone if one is not None])
        _write_config(temporary, header)
        temporary.replace(directory)
    dist.barrier()


def _save_stage(
    directory: Path, header: Header, ranks: Ranks, parameters: dict[str, nn.Parameter]
) -> _Saved:
    tensors: dict[str, Tensor] = {}
    for name, weight in parameters.items():
        if header.model.tied and name == HEAD:
            continue
        tensors[name] = weight.detach().cpu().contiguous()
    # Named as Hugging Face names the shards of a large model, which count from 1.
    file = f"model-{ranks.stage_index + 1:05d}-of-{len(header.stages):05d}.safetensors"
    # As transformers itself writes it; some of its versions refuse a file that does not say so.
    save_file(tensors, directory / file, metadata={"format": "pt"})
    sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
    return _Saved(file, sizes)


def _write_index(directory: Path, everyone: list[_Saved]) -> None:
    files: dict[str, str] = {}
    total_bytes = 0
    for saved in everyone:
        files |= dict.fromkeys(saved.sizes, saved.file)
        total_bytes += sum(saved.sizes.values())
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(files.items()))}
    _write_json(directory / "model.safetensors.index.json", index)


def _write_config(directory: Path, header: Header) -> None:
    config = json.loads(header.model.config) | {"dtype": DTYPE_NAME}
    _write_json(directory / "config.json", config)


def _write_json(path: Path, document: dict[str, object]) -> None:
    path.write_text(json.dumps(document, indent=2) + "\n")
