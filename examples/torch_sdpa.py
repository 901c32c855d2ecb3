"""torch's `scaled_dot_product_attention` as a backend of one operation.

    bitforbit check examples/torch_sdpa.py --case 'kernel/attention/*:gauge'

It has no softcap and no sinks. A window is a mask, and so is causality, except where there are as
many queries as keys: that is `is_causal`. What is masked is read all the same, as the cases show
that have NaN where nobody looks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from conformance.operations import NotImplementedByBackendError


class Backend:
    """Attention alone, in float32 on the CPU."""

    numerics = {"accumulator": "float32"}  # noqa: RUF012

    def attention(
        self,
        q: Any,
        k: Any,
        v: Any,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Any = None,
        mode: str = "exact",
    ) -> Any:
        """Attention of q (T, Hq, D) over k and v (S, Hkv, D), heads first inside."""
        if softcap is not None or sinks is not None:
            raise NotImplementedByBackendError("softcap or sinks in torch's SDPA")
        rows, keys = len(q), len(k)
        causal = window is None and rows == keys
        t, j = torch.arange(keys - rows, keys)[:, None], torch.arange(keys)
        visible = (j <= t) & (j > t - (keys if window is None else window))
        heads_first = [torch.from_numpy(np.array(x)).transpose(0, 1)[None] for x in (q, k, v)]
        y = scaled_dot_product_attention(
            *heads_first,
            attn_mask=None if causal else visible,
            is_causal=causal,
            scale=scale,
            enable_gqa=True,
        )
        out = y[0].transpose(0, 1).contiguous().numpy()
        out[np.isnan(out)] = np.nan  # The one NaN of SPEC 1.3.
        return out
