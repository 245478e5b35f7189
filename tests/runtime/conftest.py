"""Stages are threads here, so one core each."""

import torch

torch.set_num_threads(1)
