"""attn_implementation="ffpa": tiny random models of every trait that an attention layer of transformers can have,
against eager."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers import (  # noqa: E402
    AutoModel,
    AutoModelForCausalLM,
    BertConfig,
    DeepseekV4Config,
    Gemma2Config,
    Gemma4TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    ModernBertConfig,
    StaticCache,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTModel,
)

import ffpa.integrations.transformers as integration  # noqa: E402

VOCAB = 96
COMMON: dict[str, Any] = dict(vocab_size=VOCAB, hidden_size=64, pad_token_id=0, bos_token_id=1, eos_token_id=None)
SMALL: dict[str, Any] = dict(
    COMMON, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96, num_hidden_layers=2
)


def llama() -> Any:
    return LlamaConfig(**SMALL, head_dim=32)


def mistral() -> Any:  # every layer slides
    return MistralConfig(**SMALL, head_dim=24, sliding_window=8)


def gemma2() -> Any:  # softcap, scaling of its own, sliding and full layers
    return Gemma2Config(**SMALL, head_dim=32, sliding_window=8, attn_logit_softcapping=2.0, query_pre_attn_scalar=16)


def gpt_oss() -> Any:  # sinks, sliding and full layers
    return GptOssConfig(**SMALL, head_dim=32, sliding_window=8, num_local_experts=4, num_experts_per_tok=2)


def gemma4() -> Any:  # D 256 and 512, scaling 1, K and V shared between layers
    kinds = (["sliding_attention"] * 2 + ["full_attention"]) * 2
    sizes = dict(SMALL, num_hidden_layers=6, vocab_size_per_layer_input=VOCAB, hidden_size_per_layer_input=16)
    return Gemma4TextConfig(
        **sizes, head_dim=256, global_head_dim=512, sliding_window=8, num_kv_shared_layers=2, layer_types=kinds,
        final_logit_softcapping=30.0,
    )  # fmt: skip


def deepseek_v4() -> (
    Any
):  # D 512, sinks, K is V, a mask that the model extends by arithmetic; both kinds of compression
    kinds = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
    return DeepseekV4Config(
        **COMMON, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=1, head_dim=512, q_lora_rank=32,
        o_lora_rank=16, o_groups=2, moe_intermediate_size=32, n_routed_experts=4, num_experts_per_tok=2,
        layer_types=kinds, sliding_window=16, index_n_heads=2, index_head_dim=64, index_topk=8, mlp_layer_types=["moe"]
        * 3, num_nextn_predict_layers=0,
    )  # fmt: skip


MODELS = [llama, mistral, gemma2, gpt_oss, gemma4, deepseek_v4]
LENGTH = {deepseek_v4: 270}  # beyond two of its compression blocks


def build(config: Callable[[], Any]) -> Any:
    """A random model whose attention matters, without being chaotic: weights of gain 0.7, sinks of order 1."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(), attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "sinks" in name:
                weight.normal_()
            elif weight.dim() >= 2 and "embed" not in name and "hc_" not in name:
                weight.normal_(std=0.7 * weight.shape[-1] ** -0.5)
            elif "embed" in name:
                weight.normal_(std=1.0 if "per_layer" in name else 0.2)
    return model


def tokens(config: Callable[[], Any], batch: int = 2) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randint(2, VOCAB, (batch, LENGTH.get(config, 24)))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """What reached ffpa.attention: the options of each call, with the shapes of q and k."""
    seen: list[dict[str, Any]] = []
    real = integration._ffpa_attention

    def spy(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
        seen.append(dict(options, q=tuple(q.shape), k=tuple(k.shape)))
        return real(q, k, v, **options)

    monkeypatch.setattr(integration, "_ffpa_attention", spy)
    yield seen


def logits_and_gradients(
    model: Any, implementation: str, **inputs: Any
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.set_attn_implementation(implementation)
    model.zero_grad()
    logits = model(**inputs, use_cache=False).logits
    keep = inputs.get("attention_mask")
    wanted = logits if keep is None else logits[keep.bool()]
    (wanted.float().tanh().square().sum()).backward()
    return wanted.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def compare(model: Any, **inputs: Any) -> None:
    eager, eager_grads = logits_and_gradients(model, "eager", **inputs)
    ours, our_grads = logits_and_gradients(model, "ffpa", **inputs)
    torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-4 * eager.abs().max().item())
    assert our_grads.keys() == eager_grads.keys()
    largest = max(g.abs().max().item() for g in eager_grads.values())
    for name, gradient in eager_grads.items():
        torch.testing.assert_close(our_grads[name], gradient, rtol=1e-3, atol=1e-3 * largest, msg=name)


@pytest.mark.parametrize("config", MODELS)
def test_logits_and_gradients(config: Callable[[], Any], calls: list[dict[str, Any]]) -> None:
    model = build(config)
    compare(model, input_ids=tokens(config))
    assert len(calls) == model.config.num_hidden_layers
    assert all(c["k"][1] == model.config.num_key_value_heads or config is gemma4 for c in calls), (
        "K was repeated for GQA"
    )
    if config in (gemma2, gpt_oss, deepseek_v4):
        trait = "softcap" if config is gemma2 else "sinks"
        assert all(c[trait] is not None and (trait != "softcap" or c[trait] == 2.0) for c in calls)


@pytest.mark.parametrize("config", [c for c in MODELS if c is not deepseek_v4])
def test_left_and_right_padding(config: Callable[[], Any]) -> None:
    ids = tokens(config, 3)
    padding = torch.ones_like(ids)
    padding[0, :7] = 0
    padding[1, -5:] = 0
    compare(build(config), input_ids=ids, attention_mask=padding)


def test_deepseek_v4_padding_after() -> None:
    ids = tokens(deepseek_v4)
    padding = torch.ones_like(ids)
    padding[0, -40:] = 0
    compare(build(deepseek_v4), input_ids=ids, attention_mask=padding)


@pytest.mark.parametrize("config", MODELS)
def test_the_comparison_can_fail(config: Callable[[], Any]) -> None:
    """The first token moves the last logits by far more than the tolerance, so a wrong attention would be seen."""
    model, ids = build(config), tokens(config)
    other = ids.clone()
    other[:, -4] = (other[:, -4] + 1) % VOCAB
    with torch.no_grad():
        change = (model(ids).logits[:, -1] - model(other).logits[:, -1]).abs().max()
    assert change > 1e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("config", [llama, gemma4])
def test_half_precision(config: Callable[[], Any], dtype: torch.dtype) -> None:
    """No further from the fp32 model than eager in the same dtype is, up to a factor."""
    model, ids = build(config), tokens(config)
    with torch.no_grad():
        exact = model(ids).logits
        model.to(dtype)
        eager = model(ids).logits
        model.set_attn_implementation("ffpa")
        ours = model(ids).logits
    assert ours.dtype == dtype
    assert (ours - exact).norm() <= 1.5 * (eager - exact).norm() + 1e-3


@pytest.mark.parametrize("config", [mistral, gemma2, gpt_oss, gemma4])
def test_window_without_a_mask(config: Callable[[], Any], calls: list[dict[str, Any]]) -> None:
    """Nothing padded: no N_q x N_kv mask is made, the kernel applies causality and the window."""
    model = build(config)
    model.set_attn_implementation("ffpa")
    for padding in (None, torch.ones(2, 24, dtype=torch.long)):
        calls.clear()
        with torch.no_grad():
            model(tokens(config), attention_mask=padding, use_cache=False)
        assert all(c["mask"] is None and c["bias"] is None and c["causal"] for c in calls)
        kinds = getattr(model.config, "layer_types", ["sliding_attention"] * len(calls))
        assert [c.get("window", (-1, -1)) for c in calls] == [
            (7, -1) if kind == "sliding_attention" else (-1, -1) for kind in kinds
        ]


def generated(model: Any, implementation: str, **arguments: Any) -> torch.Tensor:
    model.set_attn_implementation(implementation)
    model.generation_config.disable_compile = True
    with torch.no_grad():
        return model.generate(do_sample=False, max_new_tokens=12, pad_token_id=0, **arguments)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "left-padded"])
@pytest.mark.parametrize("config", [llama, mistral, gemma2, gpt_oss, gemma4])
def test_generate(config: Callable[[], Any], padded: bool, cache: str) -> None:
    model, ids = build(config), tokens(config)
    padding = torch.ones_like(ids)
    if padded:
        padding[0, :9] = 0
        ids[0, :9] = 0
    arguments = dict(input_ids=ids, attention_mask=padding, cache_implementation=cache)
    assert torch.equal(generated(model, "ffpa", **arguments), generated(model, "eager", **arguments))


def test_generate_deepseek_v4() -> None:
    model, ids = build(deepseek_v4), tokens(deepseek_v4)
    assert torch.equal(generated(model, "ffpa", input_ids=ids), generated(model, "eager", input_ids=ids))


def test_continued_prefill() -> None:
    """A second prompt after a filled cache: N_q > 1 and N_kv > N_q, with everything before visible."""
    for config in (llama, gemma2, gemma4):
        model, ids = build(config), tokens(config)
        results = []
        for implementation in ("eager", "ffpa"):
            model.set_attn_implementation(implementation)
            with torch.no_grad():
                cache = model(ids[:, :13], use_cache=True).past_key_values
                results.append(model(ids[:, 13:], past_key_values=cache, use_cache=True).logits)
        torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4 * results[0].abs().max().item())


@pytest.mark.parametrize("given", ["positions", "positions and lengths", "lengths"])
@pytest.mark.parametrize("config", [llama, gemma2, gemma4])
def test_packed_sequences(config: Callable[[], Any], given: str, calls: list[dict[str, Any]]) -> None:
    """Three sequences in one row give what each gives alone, logits and gradients."""
    model = build(config)
    lengths, ids = [11, 1, 12], tokens(config, 1)
    cu = torch.tensor([0, 11, 12, 24], dtype=torch.int32)
    inputs: dict[str, Any] = dict(input_ids=ids)
    if "positions" in given:
        inputs["position_ids"] = torch.cat([torch.arange(n) for n in lengths])[None]
    if "lengths" in given:
        inputs |= dict(cu_seq_lens_q=cu, cu_seq_lens_k=cu, max_length_q=12, max_length_k=12)
    packed, packed_grads = logits_and_gradients(model, "ffpa", **inputs)
    if "lengths" in given:
        assert all(c.get("cu_seqlens_q") is not None for c in calls), "lengths were given, but not used by the kernel"
    alone, begin, gradients = [], 0, []
    for n in lengths:
        piece: dict[str, Any] = dict(input_ids=ids[:, begin : begin + n])
        if given == "lengths":  # the model then counts positions through
            piece["position_ids"] = torch.arange(begin, begin + n)[None]
        logits, grads = logits_and_gradients(model, "eager", **piece)
        alone.append(logits)
        gradients.append(grads)
        begin += n
    torch.testing.assert_close(packed, torch.cat(alone, 1), rtol=1e-4, atol=2e-4)
    for name, gradient in packed_grads.items():
        together = sum(g.get(name, torch.zeros(())) for g in gradients)
        torch.testing.assert_close(gradient, together, rtol=1e-3, atol=1e-3 * float(together.abs().max()) + 1e-5)


def test_packed_lengths_with_a_padding_mask() -> None:
    """Lengths and a 2-D mask together: both hold."""
    model, ids = build(llama), tokens(llama, 1)
    cu = torch.tensor([0, 11, 24], dtype=torch.int32)
    padding = torch.ones_like(ids)
    padding[0, 11:14] = 0  # the second sequence begins with padding
    positions = torch.cat([torch.arange(11), torch.arange(13)])[None]
    lengths = dict(cu_seq_lens_q=cu, cu_seq_lens_k=cu, max_length_q=13, max_length_k=13)
    model.set_attn_implementation("ffpa")
    with torch.no_grad():
        packed = model(ids, attention_mask=padding, position_ids=positions, **lengths).logits[0, 14:]
        alone = model(ids[:, 14:], position_ids=positions[:, 14:]).logits[0]
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize(
    ("config", "backend"), [(c, "aot_eager") for c in (llama, gemma2, gpt_oss, gemma4)] + [(llama, "inductor")]
)
def test_compile_fullgraph(config: Callable[[], Any], backend: str) -> None:
    torch._dynamo.reset()
    model, ids = build(config), tokens(config)
    train = config is not gpt_oss  # whose experts have a data-dependent backward that torch.compile refuses
    results = {}
    for implementation in ("eager", "ffpa"):
        model.set_attn_implementation(implementation)
        run = torch.compile(model, fullgraph=True, backend=backend) if implementation == "ffpa" else model
        model.zero_grad()
        with torch.set_grad_enabled(train):
            logits = run(ids, use_cache=False).logits
        if train:
            logits.tanh().sum().backward()
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        results[implementation] = [logits.detach(), *gradients]
    largest = max(float(x.abs().max()) for x in results["eager"][1:] or [torch.zeros(())])
    for i, (ours, eager) in enumerate(zip(results["ffpa"], results["eager"], strict=True)):
        scale = largest if i else float(eager.abs().max())
        torch.testing.assert_close(ours, eager, rtol=1e-3, atol=1e-3 * scale)


@pytest.mark.parametrize("config", [llama, gemma2, gpt_oss, gemma4])
def test_compiled_decode_with_a_static_cache(config: Callable[[], Any]) -> None:
    torch._dynamo.reset()
    model, ids = build(config), tokens(config)
    decoded = {}
    for implementation in ("eager", "ffpa"):
        model.set_attn_implementation(implementation)
        step = torch.compile(model, fullgraph=True, backend="aot_eager") if implementation == "ffpa" else model
        cache = StaticCache(config=model.config, max_cache_len=32)
        with torch.no_grad():
            logits = [model(ids, past_key_values=cache, use_cache=True).logits[:, -1:]]
            for i in range(4):
                positions = torch.full((2, 1), 24 + i)
                out = step(logits[-1].argmax(-1), past_key_values=cache, use_cache=True, position_ids=positions)
                logits.append(out.logits)
        decoded[implementation] = torch.cat(logits, 1)
    largest = float(decoded["eager"].abs().max())
    torch.testing.assert_close(decoded["ffpa"], decoded["eager"], rtol=1e-3, atol=1e-4 * largest)


def test_training_follows_eager() -> None:
    losses = {}
    for implementation in ("eager", "ffpa"):
        model, ids = build(gemma4), tokens(gemma4)
        model.set_attn_implementation(implementation)
        model.train()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        losses[implementation] = []
        for _ in range(4):
            loss = model(ids, labels=ids).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses[implementation].append(loss.item())
    assert losses["eager"][-1] < losses["eager"][0]
    assert losses["ffpa"] == pytest.approx(losses["eager"], rel=5e-4)


def test_attention_dropout_is_applied_in_training(calls: list[dict[str, Any]]) -> None:
    model = build(lambda: LlamaConfig(**SMALL, head_dim=32, attention_dropout=0.5))
    model.set_attn_implementation("ffpa")
    ids = tokens(llama)
    still = model(ids).logits
    assert [c["dropout_p"] for c in calls] == [0.0, 0.0]
    model.train()
    torch.manual_seed(3)
    first = model(ids).logits
    torch.manual_seed(3)
    again, third = model(ids).logits, model(ids).logits
    assert torch.equal(first, again)
    assert not torch.allclose(first, third, atol=1e-3) and not torch.allclose(first, still, atol=1e-3)


def test_position_bias_of_t5() -> None:
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=VOCAB, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    model = T5ForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "relative_attention_bias" in name:
                weight.normal_(std=2.0)
    ids = tokens(llama)
    padding = torch.ones_like(ids)
    padding[0, -6:] = 0
    results = {}
    for implementation in ("eager", "ffpa"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        out = model(input_ids=ids, attention_mask=padding, decoder_input_ids=ids[:, :9])
        out.logits.square().sum().backward()
        results[implementation] = [out.logits.detach()] + [
            p.grad.clone() for p in model.parameters() if p.grad is not None
        ]
        with torch.no_grad():
            results[implementation].append(
                model.generate(ids, attention_mask=padding, max_new_tokens=6, do_sample=False)
            )
    for ours, eager in zip(results["ffpa"], results["eager"], strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-3, atol=1e-4 * float(eager.abs().max()))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", ["bert", "modernbert", "vit"])
def test_encoders_see_both_ways(kind: str, padded: bool, calls: list[dict[str, Any]]) -> None:
    torch.manual_seed(0)
    sizes = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96)
    if kind == "vit":
        model = ViTModel(ViTConfig(**sizes, image_size=16, patch_size=4), add_pooling_layer=False)
        inputs: dict[str, torch.Tensor] = dict(pixel_values=torch.randn(2, 3, 16, 16))
    else:
        config = BertConfig(**sizes, vocab_size=VOCAB) if kind == "bert" else None
        config = config or ModernBertConfig(**sizes, vocab_size=VOCAB, local_attention=8, pad_token_id=0)
        model = AutoModel.from_config(config)
        inputs = dict(input_ids=tokens(llama))
        if padded:
            inputs["attention_mask"] = torch.ones(2, 24, dtype=torch.long)
            inputs["attention_mask"][0, -6:] = 0
    model.eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2 and "embed" not in name:
                weight.normal_(std=weight.shape[-1] ** -0.5)
        model.set_attn_implementation("eager")
        eager = model(**inputs).last_hidden_state
        model.set_attn_implementation("ffpa")
        ours = model(**inputs).last_hidden_state
    assert len(calls) == 2 and not any(c["causal"] for c in calls)
    keep = inputs.get("attention_mask", torch.ones(eager.shape[:2])).bool()
    torch.testing.assert_close(ours[keep], eager[keep], rtol=1e-4, atol=1e-4)


def test_another_name_and_output_attentions() -> None:
    integration.register("ffpa_again")
    model, ids = build(llama), tokens(llama)
    model.set_attn_implementation("ffpa_again")
    padding = torch.ones_like(ids)
    padding[:, :5] = 0
    with torch.no_grad():
        ours = model(ids, attention_mask=padding).logits
        model.set_attn_implementation("eager")
        eager = model(ids, attention_mask=padding).logits
    torch.testing.assert_close(ours[:, 5:], eager[:, 5:], rtol=1e-4, atol=1e-4)
    with pytest.warns(UserWarning, match="does not return attention weights"):
        integration.attention(
            model.model.layers[0].self_attn, *(torch.randn(1, 2, 3, 8),) * 3, None, output_attentions=True
        )


SOURCES = Path(transformers.__file__).parent / "models"


@pytest.mark.parametrize("model_type", sorted(integration.WINDOW_IN_KERNEL))
def test_models_hand_on_their_window(model_type: str) -> None:
    """The premise of WINDOW_IN_KERNEL, read from this transformers' source: the window is passed, and only by sliding
    layers."""
    name = model_type.removesuffix("_text")
    source = (SOURCES / name / f"modeling_{name}.py").read_text()
    assert "create_sliding_window_causal_mask" in source
    passed = re.findall(r"sliding_window=(.+?),(?: *#.*)?\n", source)
    assert passed and all(p in ("self.sliding_window", 'getattr(self.config, "sliding_window", None)') for p in passed)
    if "self.sliding_window" in passed:
        assigned = re.findall(r"self\.sliding_window = \(?\s*(config\.sliding_window[^)]*?)\)?\n", source)
        assert assigned and all(" if " in a and a.rstrip().endswith("else None") for a in assigned)


def test_models_that_need_an_additive_mask() -> None:
    """The premise of ADDITIVE_MASK: no other model of this transformers appends floats to the mask in its own dtype."""
    found = {
        path.parent.name
        for path in SOURCES.glob("*/modeling_*.py")
        if re.search(r"cat\(\[attention_mask, \w+\.to\(attention_mask\.dtype\)\]", path.read_text())
    }
    assert found == integration.ADDITIVE_MASK
