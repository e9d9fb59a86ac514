"""``attn_implementation="ffpa"`` for Hugging Face transformers. SPDX-License-Identifier: Apache-2.0

One line registers it, then every model takes the name as it takes "sdpa"::

    import ffpa.integrations.transformers  # registers "ffpa"; register("another name") does it again under that name

    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="ffpa")   # or
    model.set_attn_implementation("ffpa")

What is gained over "sdpa": head dims above 256 (Gemma 4) and grouped heads without repeating K and V, attention sinks
(gpt-oss) and softcap (Gemma 2) in the kernel, and a path besides eager for DeepSeek-V4. Two functions are registered,
because transformers drops every mask of an attention whose mask function it does not know: :func:`attention` and
:func:`mask`.

Logits of padding tokens may differ from eager's (both are meaningless): such a row sees no key and is 0 here, a mean
there.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, eager_mask, sdpa_mask

from .._attention import attention as _ffpa_attention

__all__ = ["attention", "mask", "register"]

# Models that append to the mask by arithmetic, and so need it additive (0 and finfo.min) rather than bool: DeepSeek-V4
# appends a float block bias with `.to(mask.dtype)`, which turns its 0 into False, hidden.
ADDITIVE_MASK = frozenset({"deepseek_v4"})

# Models whose attention layers hand on `sliding_window` exactly when their layer slides. For these the kernel applies
# the window when nothing is padded, and no N_q x N_kv mask is made. Others get the mask: some of them never pass their
# window.
WINDOW_IN_KERNEL = frozenset(
    {
        "cohere2",
        "gemma2",
        "gemma3_text",
        "gemma4_text",
        "gpt_oss",
        "ministral",
        "mistral",
        "mixtral",
        "olmo3",
        "phi3",
        "qwen2",
        "qwen3",
        "starcoder2",
        "vaultgemma",
    }
)

_PACKED = "packed_sequence_mask_function.<locals>.inner_mask"


def register(name: str = "ffpa") -> None:
    """Make ``attn_implementation=name`` known to transformers. Importing this module has done it for "ffpa"."""
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    config: Any = None,
    **kwargs: Any,
) -> Tensor | None:
    """The mask of one kind of layer: None where causality and the window, which :func:`attention` knows, say it all.

    Else bool (B, 1, N_q, N_kv), True = visible; for the models in ``ADDITIVE_MASK`` a float mask of 0 and finfo.min.
    The arguments are transformers': positions are offset by q_offset and kv_offset, ``attention_mask`` is the 2-D
    padding mask.
    """
    arguments = dict(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=allow_is_causal_skip,
        config=config,
        **kwargs,
    )
    if _model_type(config) in ADDITIVE_MASK:
        additive: Tensor | None = eager_mask(**arguments)
        return additive
    if (
        allow_is_causal_skip  # the mask is causality, window and padding alone
        and local_size is not None
        and _window_in_kernel(config)
        and local_size == getattr(config, "sliding_window", None)
        and isinstance(q_offset, int)
        and q_offset == 0
        and q_length == kv_length
        and _nothing_padded(attention_mask)
    ):
        return None
    visible: Tensor | None = sdpa_mask(**arguments)
    if (
        visible is not None
        and attention_mask is None
        and (local_size is None or _window_in_kernel(config))
        and not torch.compiler.is_compiling()
        and _is_packed_causal(mask_function)
    ):
        visible._ffpa_packed = True  # type: ignore[attr-defined]  # gone after any operation on the mask, as it must be
    return visible


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """One layer: query (B, H_q, N_q, D), key (B, H_kv, N_kv, D), value (B, H_kv, N_kv, D_v) to (B, N_q, H_q, D_v).

    ``attention_mask``: from :func:`mask` (then causality and window are inside), or None: causal from the top left if
    the module is causal and N_q > 1, as transformers means it; K and V past N_q are then an empty static cache's and
    cut off.
    ``s_aux``: sink logits (H_q,). ``position_bias``: added to the scores, broadcasts to (B, H_q, N_q, N_kv).
    ``cu_seq_lens_q``, ``cu_seq_lens_k``: sequences packed into one row of the batch; each sees only itself.
    """
    if kwargs.get("output_attentions"):
        warnings.warn(
            "attn_implementation='ffpa' does not return attention weights; use 'eager' for output_attentions=True",
            stacklevel=2,
        )
    n_q = query.shape[2]
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    if cu_seq_lens_q is not None and getattr(attention_mask, "_ffpa_packed", False):
        attention_mask = None  # it says no more than the lengths, causality and the window do
    causal = n_q > 1 and attention_mask is None and is_causal
    packed = cu_seq_lens_q is not None and cu_seq_lens_k is not None
    if causal and not packed and key.shape[2] > n_q:
        key, value = key[:, :, :n_q], value[:, :, :n_q]
        position_bias = None if position_bias is None else position_bias[..., :n_q]

    visible, bias = None, position_bias
    if attention_mask is not None:
        if attention_mask.dtype == torch.bool:
            visible = attention_mask
        else:
            bias = attention_mask if bias is None else attention_mask + bias
    options: dict[str, Any] = dict(
        mask=visible,
        bias=_fp32_unless(bias, query.dtype),
        sinks=_fp32_unless(s_aux, query.dtype),
        causal=causal,
        scale=scaling,
        softcap=softcap or 0.0,
        dropout_p=dropout,
    )
    if causal and sliding_window is not None and _window_in_kernel(getattr(module, "config", None)):
        options["window"] = (sliding_window - 1, -1)

    if packed and causal and bias is not None and key.shape[2] != n_q:
        raise NotImplementedError(
            f"position_bias: with packed causal sequences Q and K must have equal lengths, but N_q is {n_q} and N_kv "
            f"{key.shape[2]}"
        )
    if cu_seq_lens_q is None or cu_seq_lens_k is None:
        out = _ffpa_attention(query, key, value, **options)
    else:
        out = _packed(query, key, value, cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k, options)
    assert isinstance(out, Tensor)
    return out.transpose(1, 2).contiguous(), None


def _packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_lens_q: Tensor,
    cu_seq_lens_k: Tensor,
    max_length_q: int | None,
    max_length_k: int | None,
    options: dict[str, Any],
) -> Tensor:
    batch, n_q = query.shape[0], query.shape[2]
    if options["mask"] is None and options["bias"] is None:
        # [B, H, N, D] to [1, H, B * N, D]
        rows = [x.transpose(1, 2).flatten(0, 1).transpose(0, 1).unsqueeze(0) for x in (query, key, value)]
        out = _ffpa_attention(
            *rows,
            cu_seqlens_q=cu_seq_lens_q.to(torch.int32),
            cu_seqlens_kv=cu_seq_lens_k.to(torch.int32),
            max_seqlen_q=max_length_q or 0,
            max_seqlen_kv=max_length_k or 0,
            anchor="bottom_right",
            **options,
        )
        assert isinstance(out, Tensor)
        return out.squeeze(0).transpose(0, 1).reshape(batch, n_q, -1, value.shape[-1]).transpose(1, 2)
    # A mask counts rows of the whole batch row: keep it, and add that sequences do not see each other.
    same = (
        _sequence_of(cu_seq_lens_q, batch, n_q)[..., :, None]
        == _sequence_of(cu_seq_lens_k, batch, key.shape[2])[..., None, :]
    )
    visible = options["mask"]
    out = _ffpa_attention(query, key, value, **{**options, "mask": same if visible is None else same & visible})
    assert isinstance(out, Tensor)
    return out


def _sequence_of(cu_seqlens: Tensor, batch: int, n: int) -> Tensor:
    """(B, 1, N): which sequence each row of the batch belongs to."""
    rows = torch.arange(batch * n, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.bucketize(rows, cu_seqlens, right=True).view(batch, 1, n)


def _fp32_unless(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return x if x is None or x.dtype == dtype else x.float()


def _model_type(config: Any) -> str:
    return str(getattr(config, "model_type", ""))


def _window_in_kernel(config: Any) -> bool:
    return _model_type(config) in WINDOW_IN_KERNEL


def _is_packed_causal(mask_function: Callable[..., Any]) -> bool:
    """Whether a mask of transformers is causality, packed sequences kept apart and perhaps a window, no more."""
    names = set(_parts(mask_function))
    return _PACKED in names and names <= {_PACKED, "causal_mask_function", "sliding_window_overlay.<locals>.inner_mask"}


def _parts(mask_function: Callable[..., Any]) -> Iterator[str]:
    """The names of the mask functions that transformers' `and_masks` joined."""
    name = getattr(mask_function, "__qualname__", "")
    if name == "and_masks.<locals>.and_mask" and mask_function.__closure__:
        for part in mask_function.__closure__[0].cell_contents:
            yield from _parts(part)
    else:
        yield name


def _nothing_padded(attention_mask: Tensor | None) -> bool:
    """False where it cannot be known without looking at data that a graph being traced does not have."""
    if attention_mask is None:
        return True
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return False
    return bool(attention_mask.all())


register()
