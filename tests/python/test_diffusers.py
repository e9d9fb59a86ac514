"""The processor for VAE mid-blocks and the attention backend, on tiny random models of diffusers, against torch's
attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

diffusers = pytest.importorskip("diffusers")

from diffusers import AutoencoderKL, FluxTransformer2DModel, SD3Transformer2DModel, UNet2DConditionModel  # noqa: E402
from diffusers.models.attention_processor import Attention, AttnAddedKVProcessor2_0, AttnProcessor2_0  # noqa: E402

import ffpa  # noqa: E402
import ffpa.integrations.diffusers as integration  # noqa: E402
from ffpa.integrations.diffusers import FfpaAttnProcessor, register  # noqa: E402


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """The shapes of the queries that reached ffpa."""
    seen: list[tuple[int, ...]] = []
    real = integration.scaled_dot_product_attention

    def spy(query: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        seen.append(tuple(query.shape))
        return real(query, *rest, **options)

    monkeypatch.setattr(integration, "scaled_dot_product_attention", spy)
    yield seen


def vae() -> Any:
    torch.manual_seed(0)
    model = AutoencoderKL(
        block_out_channels=(32, 512), down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",)
        * 2, layers_per_block=1, norm_num_groups=8, latent_channels=4, sample_size=16,
    )  # fmt: skip
    with torch.no_grad():  # a residual branch that matters
        for name, weight in model.named_parameters():
            if "attentions" in name and weight.dim() == 2:
                weight.normal_(std=2.0 * weight.shape[-1] ** -0.5)
    return model


def outputs(model: Any, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    out = model(x).sample
    out.square().mean().backward()
    return [out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def close(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4 * float(b.abs().max()) + 1e-7)


def test_vae_mid_block_of_512(calls: list[tuple[int, ...]]) -> None:
    model, image = vae(), torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    theirs = outputs(model, image)
    model.set_attn_processor(FfpaAttnProcessor())
    ours = outputs(model, image)
    assert calls == [(2, 1, 64, 512)] * 2  # encoder and decoder: one head, D 512
    close(ours, theirs)


def test_the_vae_attention_matters() -> None:
    model, image = vae(), torch.randn(1, 3, 16, 16)
    before = model(image).sample
    with torch.no_grad():
        model.encoder.mid_block.attentions[0].to_q.weight.zero_()
        model.decoder.mid_block.attentions[0].to_q.weight.zero_()
    assert (model(image).sample - before).abs().max() > 1e-3


def test_vae_under_the_patch() -> None:
    model, image = vae(), torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    theirs = outputs(model, image)
    with ffpa.patch_sdpa(strict=True):
        ours = outputs(model, image)
    close(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_processor_in_cross_attention_with_a_mask(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    attn = Attention(
        query_dim=32, cross_attention_dim=24, heads=4, dim_head=16, out_bias=True, qk_norm="layer_norm"
    ).to(dtype)
    x, context = torch.randn(2, 9, 32, dtype=dtype), torch.randn(2, 7, 24, dtype=dtype)
    mask = torch.zeros(2, 1, 7, dtype=dtype)
    mask[0, 0, 4:] = -10000.0
    attn.set_processor(AttnProcessor2_0())
    theirs = attn(x, encoder_hidden_states=context, attention_mask=mask)
    attn.set_processor(FfpaAttnProcessor())
    ours = attn(x, encoder_hidden_states=context, attention_mask=mask)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    other = attn(x, encoder_hidden_states=context)
    assert (other - ours).abs().max() > 10 * tolerance


def test_unet_with_the_processor(calls: list[tuple[int, ...]]) -> None:
    torch.manual_seed(0)
    model = UNet2DConditionModel(
        sample_size=8, block_out_channels=(16, 32), layers_per_block=1, cross_attention_dim=24, attention_head_dim=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=4,
    )  # fmt: skip
    x, context = torch.randn(1, 4, 8, 8), torch.randn(1, 5, 24)
    theirs = model(x, 3, context).sample
    model.set_attn_processor(FfpaAttnProcessor())
    torch.testing.assert_close(model(x, 3, context).sample, theirs, rtol=1e-3, atol=1e-4)
    assert calls


def sd3() -> tuple[Any, dict[str, Any]]:
    torch.manual_seed(0)
    model = SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=24, caption_projection_dim=32, pooled_projection_dim=24, out_channels=4,
    )  # fmt: skip
    return model, dict(
        hidden_states=torch.randn(1, 4, 8, 8), encoder_hidden_states=torch.randn(1, 5, 24),
        pooled_projections=torch.randn(1, 24), timestep=torch.tensor([3]),
    )  # fmt: skip


def flux() -> tuple[Any, dict[str, Any]]:
    torch.manual_seed(0)
    model = FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=24, pooled_projection_dim=24, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    return model, dict(
        hidden_states=torch.randn(1, 16, 4), encoder_hidden_states=torch.randn(1, 5, 24),
        pooled_projections=torch.randn(1, 24), timestep=torch.tensor([3.0]), img_ids=torch.zeros(16, 3),
        txt_ids=torch.zeros(5, 3),
    )  # fmt: skip


def test_backend_for_transformer_blocks(calls: list[tuple[int, ...]]) -> None:
    register()
    register()  # again is fine
    model, inputs = flux()
    theirs = model(**inputs).sample
    with diffusers.attention_backend("ffpa"):
        ours = model(**inputs).sample
    assert len(calls) == 2
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model(**inputs).sample, theirs)
    assert len(calls) == 2  # the context has ended
    try:
        model.set_attention_backend("ffpa")
        ours = model(**inputs).sample
        assert len(calls) == 4
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        ours.sum().backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    finally:
        model.set_attention_backend("native")


def test_transformer_whose_processor_calls_torch_is_reached_by_the_patch() -> None:
    model, inputs = sd3()
    theirs = model(**inputs).sample
    with ffpa.patch_sdpa(strict=True):
        torch.testing.assert_close(model(**inputs).sample, theirs, rtol=1e-4, atol=1e-4)


def test_backend_takes_masks_and_refuses_by_name() -> None:
    q, k = torch.randn(2, 5, 3, 16), torch.randn(2, 7, 3, 16)
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[0, 3:] = False
    ours = integration._attention(q, k, k, mask)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), k.transpose(1, 2), mask[:, None, None]
    )
    torch.testing.assert_close(ours, wanted.transpose(1, 2), rtol=1e-5, atol=1e-5)
    with pytest.raises(NotImplementedError, match="return_lse"):
        integration._attention(q, k, k, return_lse=True)
    with pytest.raises(NotImplementedError, match="parallel_config"):
        integration._attention(q, k, k, _parallel_config=object())
    with pytest.raises(RuntimeError, match="must not be one of diffusers' own attention backends, but is 'native'"):
        register("native")


def test_registration_says_so_where_diffusers_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    from diffusers.models import attention_dispatch

    monkeypatch.delattr(attention_dispatch, "_AttentionBackendRegistry")
    with pytest.raises(NotImplementedError, match="keeps its attention backends differently"):
        register("ffpa_third")


def test_processor_refuses_added_keys_and_values() -> None:
    attn = Attention(query_dim=32, heads=2, dim_head=16, added_kv_proj_dim=24, processor=AttnAddedKVProcessor2_0())
    attn.set_processor(FfpaAttnProcessor())
    with pytest.raises(NotImplementedError, match="add_k_proj must be None"):
        attn(torch.randn(1, 5, 32), encoder_hidden_states=torch.randn(1, 3, 24))
