"""The learning rate of a step: warm-up, then cosine, a late linear decay, or nothing."""

from __future__ import annotations

import math

from nsa.train.config import LoopConfig


def learning_rate(step: int, config: LoopConfig) -> float:
    """Of the step that follows ``step`` finished ones, so 0 is the first.

    Warm-up is linear from lr / (warmup_steps + 1) to lr, which step ``warmup_steps`` has. "cosine"
    falls from there as half a cosine to lr x min_lr_ratio at step ``steps``; "wsd" is lr and falls
    linearly to the same over the last ``decay_steps`` (warm-up, stable, decay; arXiv 2404.06395).
    Beyond ``steps`` the rate stays. Pure; ValueError for a negative step.
    """
    if step < 0:
        raise ValueError(f"step={step} must be >= 0: the number of finished steps")
    warm = min(1.0, (step + 1) / (config.warmup_steps + 1))
    return config.lr * min(warm, _decay(min(step, config.steps), config))


def _decay(step: int, config: LoopConfig) -> float:
    low = config.min_lr_ratio
    if config.schedule == "cosine":
        done = max(0, step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
        return low + (1 - low) * 0.5 * (1 + math.cos(math.pi * done))
    if config.schedule == "wsd":
        left = min(1.0, (config.steps - step) / config.decay_steps)
        return low + (1 - low) * left
    return 1.0
