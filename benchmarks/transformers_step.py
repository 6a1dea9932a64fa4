"""Whole optimizer steps of models that transformers defines: python benchmarks/transformers_step.py

Needs a GPU, transformers and peft, and about two minutes for each model: `--only BERT ViT` measures
these two. Nothing is downloaded: the models are made from configs, with random weights.

4 micro-batches, AdamW with decay of matrices, clipped at 1.0. Replayed from a CUDA graph, and
compiled and launched from Python; what both sides are given is in step_variants.py. "Llama, peft"
has frozen bf16 weights, and adapters of rank 8 on q_proj and v_proj; dtypes are then those of the
adapters.

Attention is transformers' `sdpa` under another name, without the mask that transformers makes for
`sdpa` when it is compiled, which only adds is_causal to is_causal and keeps torch from its flash
kernels.
"""

import dataclasses
import functools

import torch
from common import DEVICE, Clock, record
from models import of_transformers
from step import steps_table
from step_variants import KINDS, LAUNCHED, PEER, REPLAYED, Task, makers, measured
from tables import Table
from training import token_batch
from workers import Workers

# transformers makes no mask for an attention whose mask it does not know.
ATTENTION = "plain_sdpa"


@dataclasses.dataclass(frozen=True)
class Model:
    """A model of transformers and the batch of its step.

    task, kind, sizes: of models.of_transformers
    rows: sequences or images of a micro-batch
    T: tokens of a sequence; 0: images
    adapters: of peft, on frozen weights"""

    task: str
    kind: str
    rows: int
    sizes: dict
    T: int = 0
    adapters: bool = False

    def make(self, dtype: torch.dtype):
        """The same weights each time, made where they are used."""
        from transformers import AttentionInterface
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        AttentionInterface.register(ATTENTION, sdpa_attention_forward)
        options = {} if self.kind in CONVOLUTIONS else {"attn_implementation": ATTENTION}
        torch.manual_seed(0)
        with torch.device(DEVICE):
            model = of_transformers(self.task, self.kind, options, **self.sizes).train()
        if not self.adapters:
            return model.to(dtype)
        from peft import LoraConfig, get_peft_model

        settings = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"])
        return get_peft_model(
            model.to(torch.bfloat16), settings, autocast_adapter_dtype=dtype == torch.float32
        )

    def make_batch(self) -> tuple:
        rows = self.rows * Task.micro_batches
        if self.T:
            return token_batch(self.sizes["vocab_size"], rows, self.T)
        generator = torch.Generator().manual_seed(1)
        size, labels = self.sizes.get("image_size", 224), self.sizes["num_labels"]
        images = torch.randn(rows, 3, size, size, generator=generator)
        classes = torch.randint(labels, (rows,), generator=generator)
        return images.to(DEVICE, torch.bfloat16), classes.to(DEVICE)

    def logits(self, model, inputs):
        return model(**{"input_ids" if self.T else "pixel_values": inputs}).logits

    @property
    def step(self) -> Task:
        return Task(self.make, self.make_batch, self.logits)

    @property
    def words(self) -> str:
        return f"{self.rows} x {self.T}" if self.T else f"{self.rows} images"


CONVOLUTIONS = ("convnextv2", "resnet")
NO_DROPOUT = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
WIDE = dict(num_hidden_layers=12, hidden_size=1024, num_attention_heads=16, vocab_size=32768)
LLAMA = dict(
    **WIDE,
    intermediate_size=4096,
    num_key_value_heads=4,
    max_position_embeddings=1024,
    use_cache=False,
)
GPT2 = dict(vocab_size=50304, n_positions=1024, n_embd=768, n_layer=12, n_head=12, use_cache=False)
GPT2 |= dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=1)
# The layers of Qwen3-0.6B, 12 of 28.
QWEN3 = dict(
    **WIDE,
    intermediate_size=3072,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=1024,
    tie_word_embeddings=True,
    use_cache=False,
)
# Others are the sizes of their papers: BERT-base, ViT-B/16, ResNet-50. ConvNeXtV2 has the depths of
# its tiny model and the widths of its large one.
CONVNEXT = dict(depths=[3, 3, 9, 3], hidden_sizes=[192, 384, 768, 1536], num_labels=1000)
IMAGES = "ImageClassification"
MODELS = {
    "Llama": Model("CausalLM", "llama", 4, LLAMA, T=1024),
    "GPT-2": Model("CausalLM", "gpt2", 8, GPT2, T=1024),
    "Qwen3": Model("CausalLM", "qwen3", 4, QWEN3, T=1024),
    "BERT": Model("MaskedLM", "bert", 16, dict(vocab_size=30592, **NO_DROPOUT), T=512),
    "ViT": Model(IMAGES, "vit", 64, dict(image_size=224, num_labels=1000, **NO_DROPOUT)),
    "ConvNeXt": Model(IMAGES, "convnextv2", 16, CONVNEXT),
    "ResNet": Model(IMAGES, "resnet", 64, dict(num_labels=1000)),
    "Llama-peft": Model("CausalLM", "llama", 4, LLAMA, T=1024, adapters=True),
}


def measure(name: str, here: bool = False) -> dict:
    """ "rows" and "launched": variant -> measurement; what one step is of."""
    model, clock = MODELS[name], Clock()
    with Workers(makers(model.step), here) as workers:
        workers.ready()
        clock.say(f"{name}: compiled")
        kinds = {kind: measured(workers, kind, clock) for kind in KINDS}
    return {
        "step": model.words,
        "parameters": kinds[REPLAYED][PEER]["parameters"],
        "rows": kinds[REPLAYED],
        "launched": kinds[LAUNCHED],
    }


def tables(results: dict) -> dict[str, Table]:
    steps = {}
    for words, kind in (("", "rows"), (", launched", "launched")):
        for name, r in results.items():
            if kind in r:
                steps[f"{name} {r['parameters'] / 1e6:.0f}M, {r['step']}{words}"] = r[kind]
    # Those of one model are like those of the others.
    return {"steps": steps_table(steps), "costs": steps_table(dict([*steps.items()][:1]))}


def main():
    record(
        "transformers_step",
        {name: functools.partial(measure, name) for name in MODELS},
        tables,
    )


if __name__ == "__main__":
    main()
