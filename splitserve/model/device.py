"""Whether a device that was asked for is there: asked at once, before anything is loaded."""

from __future__ import annotations

from splitserve.errors import ConfigError

_ADVICE = "Use --device cpu."


def require_device(device: str) -> None:
    """Raise ConfigError, saying why, if torch can't compute on `device` here.

    Does not initialise CUDA, so that a process may still fork workers that do: torch counts devices
    through NVML. torch is not even imported for `cpu`.
    """
    if device == "cpu":
        return
    import torch

    if device == "cuda":
        if torch.version.cuda is None and torch.version.hip is None:
            raise ConfigError(
                f"--device cuda: torch {torch.__version__} is built without CUDA.",
                advice="Install a build of torch with CUDA, or use --device cpu.",
            )
        if torch.cuda.device_count() < 1:
            raise ConfigError("--device cuda: no CUDA device is to be found.", advice=_ADVICE)
    if device == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("--device mps: there is no Metal device here.", advice=_ADVICE)
