"""LLM serving with prefill and decode on separate workers, that one can trust and measure."""

__version__ = "0.1.0"
