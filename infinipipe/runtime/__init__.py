"""The thin runtime: replays a plan on PyTorch, one process a stage."""
