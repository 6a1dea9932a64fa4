"""A whole optimizer step of models of transformers: python benchmarks/transformers_step.py

Needs a GPU, transformers, peft and six minutes. Nothing is downloaded.

LlamaForCausalLM with the sizes of llama-350m, batch 4, and GPT2LMHeadModel with those of gpt2-124m
(12 layers, 50,304 tokens, no dropout), batch 8; then the same Llama with frozen bf16 weights and
adapters of peft, of rank 8, on q_proj and v_proj. 4 micro-batches, T = 1024, AdamW with decay of
matrices, clipped at 1.0. Attention is transformers' `sdpa` under another name, without the mask
that transformers makes for `sdpa` when it is compiled, which only adds is_causal to is_causal and
keeps torch from its flash kernels. As in step.py (step_variants.py):

torch: fp32 weights, bf16 autocast, compiled, foreach clip, AdamW fused and capturable, one CUDA
graph.
torch, bf16 weights: the same with bf16 weights, fp32 masters and fp32 sums.
Ours: bf16 weights with fp32 masters, compiled, replayed. GPT-2's layers are Conv1D.
Then steps that are launched from Python: ours, and torch's with bf16 weights.

The dtypes are those of what is trained: of all weights, or of the adapters. Llama's table has the
limit of its step (limits.py), which knows no other kind of model.
"""

import functools

import torch
from common import DEVICE, Clock, record
from limits import Limit
from step import BF16, OURS, PEER, step_tables
from step_variants import Bf16Peer, Ours, Peer, Task, launched, measured
from workers import Workers

from gpuaccel.training.models import Config, preset

T = 1024
# transformers makes no mask for an attention whose mask it does not know.
ATTENTION = "causal_sdpa"
LIMIT = "limit"
# Model -> (its sizes, sequences of a micro-batch).
SIZES = {
    "Llama": (preset("llama-350m"), 4),
    "GPT-2": (preset("gpt2-124m"), 8),
    "Llama, peft": (preset("llama-350m"), 4),
}


def llama(config: Config, dtype=torch.float32):
    from transformers import LlamaConfig, LlamaForCausalLM

    return built(
        LlamaForCausalLM,
        LlamaConfig(
            vocab_size=config.vocab,
            hidden_size=config.hidden,
            intermediate_size=config.intermediate,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.T,
            use_cache=False,
        ),
        dtype,
    )


def llama_peft(config: Config, dtype=torch.float32):
    """Frozen bf16 weights with adapters of `dtype`."""
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"])
    model = llama(config, torch.bfloat16)
    return get_peft_model(model, settings, autocast_adapter_dtype=dtype == torch.float32)


def gpt2(config: Config, dtype=torch.float32):
    from transformers import GPT2Config, GPT2LMHeadModel

    return built(
        GPT2LMHeadModel,
        GPT2Config(
            vocab_size=config.vocab,
            n_positions=config.T,
            n_embd=config.hidden,
            n_layer=config.layers,
            n_head=config.heads,
            n_inner=config.intermediate,
            resid_pdrop=0,
            embd_pdrop=0,
            attn_pdrop=0,
            bos_token_id=0,
            eos_token_id=1,
            use_cache=False,
        ),
        dtype,
    )


def built(make, config, dtype):
    """The same weights each time, made where they are used."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register(ATTENTION, sdpa_attention_forward)
    config._attn_implementation = ATTENTION
    torch.manual_seed(0)
    with torch.device(DEVICE):
        return make(config).to(dtype).train()


def logits(model, tokens):
    return model(input_ids=tokens).logits


MAKERS = {"Llama": llama, "GPT-2": gpt2, "Llama, peft": llama_peft}


def task(name: str, config: Config, rows: int, T: int) -> Task:
    return Task(functools.partial(MAKERS[name], config), config.vocab, rows, T, logits=logits)


def measure(sizes=SIZES, T: int = T, here=False) -> dict:
    """Model -> variant -> measurement, with what one step is of; Llama's with the step's limit."""
    tasks = {name: task(name, config, rows, T) for name, (config, rows) in sizes.items()}
    variants = {}
    for name, what in tasks.items():
        variants[PEER, name] = (Peer, what)
        variants[BF16, name] = (Bf16Peer, what)
        variants[OURS, name] = (Ours, what)
        config, rows = sizes[name]
        if name == "Llama":
            variants[LIMIT, name] = (Limit, config, rows, T, what.micro_batches)
    clock = Clock()
    results = {}
    with Workers(variants, here) as workers:
        workers.ready()
        clock.say("compiled")
        for name, what in tasks.items():
            keys = [(kind, name) for kind in (PEER, BF16, OURS)]
            rows, _ = measured(dict.fromkeys(keys, workers), what.tokens, clock)
            results[name] = {"batch": what.rows, "T": T, "rows": rows}
            if (LIMIT, name) in variants:
                limit = results[name]["limit"] = workers.ask((LIMIT, name), "measure")
                for row in rows.values():
                    row["of_limit"] = limit["ms"] / row["ms"]
    for name, what in tasks.items():
        results[name]["launched"] = launched(what, clock, here)
    return results


def tables(results: dict) -> dict:
    steps, limits = {}, {}
    for name, r in results.items():
        label = f"{name}, {r['batch']} x {r['T']}"
        steps[label] = r["rows"]
        if "limit" in r:
            limits[label] = r["limit"]
        if "launched" in r:
            steps[f"{label}, launched"] = r["launched"]
    return step_tables(steps, limits)


def main():
    record("transformers_step", measure, tables)


if __name__ == "__main__":
    main()
