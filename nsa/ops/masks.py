"""Which tokens the chosen blocks hold, as a boolean mask.

B batch, T query tokens, S key tokens, G kv heads, J selection blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor


def token_mask(blocks_BTGN: Tensor, num_keys: int, sel_block: int, position_BT: Tensor) -> Tensor:
    """Boolean [B, G, T, S]: the key's block was chosen and the key is not in the future."""
    B, T, G, _ = blocks_BTGN.shape
    J = -(-num_keys // sel_block)
    index = blocks_BTGN.transpose(1, 2).long()
    if torch.compiler.is_compiling() and index.device.type == "cpu":
        # No token is divided by l' here. Inductor (torch 2.13, CPU) splits the loop over S tokens
        # where one is into S // l' times l': the mask of the last S % l' keys was never written.
        token_S = torch.arange(num_keys, device=index.device)
        begin_BGTN1 = (index * sel_block)[..., None]
        inside_BGTNS = (token_S >= begin_BGTN1) & (token_S < begin_BGTN1 + sel_block)
        return inside_BGTNS.any(3) & (token_S <= position_BT[..., None])[:, None]
    # slot J takes the padding
    chosen_BGTJ = index.new_zeros(B, G, T, J + 1, dtype=torch.bool)
    chosen_BGTJ.scatter_(3, torch.where(index < 0, J, index.clamp(max=J)), True)
    # Slot J is spread out as well, so that the cut always drops something: were it nothing where l'
    # divides S, torch.compile would make such lengths a graph of their own. (A gather by token
    # needs no cut, but takes 4 times as long on a CPU.)
    mask_BGTL = chosen_BGTJ[..., None].expand(-1, -1, -1, -1, sel_block).flatten(3)
    past_BTL = (
        torch.arange(mask_BGTL.shape[-1], device=blocks_BTGN.device) <= position_BT[..., None]
    )
    return (mask_BGTL & past_BTL[:, None])[..., :num_keys]
