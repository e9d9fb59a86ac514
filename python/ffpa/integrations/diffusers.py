"""ffpa for Hugging Face diffusers. SPDX-License-Identifier: Apache-2.0

Three ways, from the narrowest to the widest::

    from ffpa.integrations.diffusers import FfpaAttnProcessor, register

    pipe.vae.set_attn_processor(FfpaAttnProcessor())       # the VAE's mid-block: one head, D = its last channel count,
    often 512

    register()                                             # then, for transformer blocks,
    pipe.transformer.set_attention_backend("ffpa")         # or `with diffusers.attention_backend("ffpa"):`

    with ffpa.patch_sdpa():                                # whatever calls torch's SDPA, also VAEs without processors
        image = pipe(...)

``set_attention_backend`` does not reach the VAE of AutoencoderKL, which calls torch directly: use the processor there.
The VAEs of Wan, QwenImage, HunyuanVideo 1.5 and Cosmos have no processor: use ``ffpa.patch_sdpa()``.
"""

from __future__ import annotations

from typing import Any

import diffusers
from diffusers.models.attention_processor import Attention
from torch import Tensor

from .._sdpa import scaled_dot_product_attention

__all__ = ["FfpaAttnProcessor", "register"]


class FfpaAttnProcessor:
    """Takes the place of diffusers' AttnProcessor2_0 in an ``Attention`` module: the same result, computed by ffpa.

    Input (B, C, height, width) or (B, N, C); with ``encoder_hidden_states`` (B, N_kv, C_kv) cross-attention.
    ``attention_mask``: as ``Attention.prepare_attention_mask`` takes it, added to the scores. Projections for added
    keys and values (``add_k_proj``) have processors of their own: refused here.
    """

    def __call__(
        self,
        attn: Attention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        temb: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        if getattr(attn, "add_k_proj", None) is not None:
            raise NotImplementedError(
                "FfpaAttnProcessor: attn.add_k_proj must be None; use register() or ffpa.patch_sdpa()"
            )
        residual = hidden_states
        if attn.spatial_norm is not None:
            hidden_states = attn.spatial_norm(hidden_states, temb)
        image_shape = hidden_states.shape if hidden_states.dim() == 4 else None
        if image_shape is not None:
            hidden_states = hidden_states.flatten(2).transpose(1, 2)  # (B, height * width, C)
        source = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        batch, n_kv = source.shape[0], source.shape[1]
        if attention_mask is not None:
            attention_mask = attn.prepare_attention_mask(attention_mask, n_kv, batch)
            attention_mask = attention_mask.view(batch, attn.heads, -1, attention_mask.shape[-1])
        if attn.group_norm is not None:
            hidden_states = attn.group_norm(hidden_states.transpose(1, 2)).transpose(1, 2)
        if encoder_hidden_states is None:
            source = hidden_states
        elif attn.norm_cross:
            source = attn.norm_encoder_hidden_states(encoder_hidden_states)

        query, key, value = (
            projection(x).unflatten(-1, (attn.heads, -1)).transpose(1, 2)
            for projection, x in ((attn.to_q, hidden_states), (attn.to_k, source), (attn.to_v, source))
        )
        query = query if attn.norm_q is None else attn.norm_q(query)
        key = key if attn.norm_k is None else attn.norm_k(key)
        out = scaled_dot_product_attention(query, key, value, attn_mask=attention_mask)
        out = out.transpose(1, 2).flatten(2).to(query.dtype)

        for layer in attn.to_out:  # projection, dropout
            out = layer(out)
        if image_shape is not None:
            out = out.transpose(1, 2).reshape(image_shape)
        if attn.residual_connection:
            out = out + residual
        result: Tensor = out / attn.rescale_output_factor
        return result


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
) -> Tensor:
    """The attention backend "ffpa": tensors (B, N, H, D), semantics of torch's SDPA; ``attn_mask`` may also be (B,
    N_kv)."""
    if return_lse:
        raise NotImplementedError("return_lse: the attention backend 'ffpa' does not return the lse")
    if _parallel_config is not None:
        raise NotImplementedError("parallel_config: the attention backend 'ffpa' has no context parallelism")
    if attn_mask is not None and attn_mask.dim() == 2 and attn_mask.shape == (query.shape[0], key.shape[1]):
        attn_mask = attn_mask[:, None, None, :]
    out = scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=attn_mask,
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
    )
    return out.transpose(1, 2)


def register(name: str = "ffpa") -> None:
    """Make ``set_attention_backend(name)`` and ``attention_backend(name)`` of diffusers known.

    diffusers has no public way to add a backend: its names are a closed enum. This extends that enum and its private
    registry, as they are in diffusers 0.42; NotImplementedError, with nothing changed, where they look different.
    """
    try:
        from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

        names, members, by_value = (
            AttentionBackendName._member_names_,
            AttentionBackendName._member_map_,
            AttentionBackendName._value2member_map_,
        )
        add = _AttentionBackendRegistry.register
    except (ImportError, AttributeError) as missing:
        raise NotImplementedError(
            f"register: diffusers {diffusers.__version__} keeps its attention backends differently ({missing}); "
            "use FfpaAttnProcessor or ffpa.patch_sdpa()"
        ) from missing
    if name in by_value:
        if _AttentionBackendRegistry._backends.get(by_value[name]) is not _attention:
            raise RuntimeError(f"name: must not be one of diffusers' own attention backends, but is {name!r}")
        return
    member = str.__new__(AttentionBackendName, name)
    member._name_, member._value_ = name.upper(), name
    names.append(member._name_)
    members[member._name_] = member
    by_value[name] = member
    add(member)(_attention)
