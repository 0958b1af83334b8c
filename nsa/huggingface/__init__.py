"""NSA as `attn_implementation="nsa"` of Hugging Face's models.

transformers is imported when a function of this room is called.
"""

from __future__ import annotations

from nsa.huggingface.interface import register
from nsa.huggingface.models import convert, from_pretrained

__all__ = ["convert", "from_pretrained", "register"]
