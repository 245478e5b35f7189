"""InfiniPipe: plan and run pipeline-parallel training of LLMs on sequences of all lengths."""

__all__ = ["__version__"]
__version__ = "0.1.0"
