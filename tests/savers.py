"""How other packages save a model: each function writes one and reads it into a fresh one.

The fresh model has no arena.
"""

import copy
import pickle

import pytest
import torch

import gpuaccel as ga

transformers = pytest.importorskip("transformers")
VOCAB = 32


def llama(device="cpu", dtype=torch.float32, tied=False, seed=0):
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
    )
    # Eager attention makes tensors on the host, which a capture refuses.
    config._attn_implementation = "sdpa"
    return transformers.LlamaForCausalLM(config).to(device, dtype)


def loss_of(model, tokens):
    return ga.token_loss(lambda inputs: model(inputs).logits, (tokens[:, :-1], tokens[:, 1:]))


def batch(device, seed=0):
    return torch.randint(VOCAB, (2, 9), generator=torch.Generator().manual_seed(seed)).to(device)


def bits(state):
    """name -> (dtype, shape, bytes) of a dict of tensors, in the order of the names."""

    def bits_of(t):
        data = t.detach().cpu().contiguous().view(-1).view(torch.uint8)
        return t.dtype, tuple(t.shape), data.numpy().tobytes()

    return {name: bits_of(state[name]) for name in sorted(state)}


def bytes_below(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def by_torch_state_dict(model, fresh, folder):
    torch.save(model.state_dict(), folder / "model.pt")
    fresh.load_state_dict(torch.load(folder / "model.pt", weights_only=True))
    return fresh


def by_torch_whole_model(model, fresh, folder):
    torch.save(model, folder / "model.pt")
    return torch.load(folder / "model.pt", weights_only=False)


def by_pickle(model, fresh, folder):
    (folder / "model.pickle").write_bytes(pickle.dumps(model))
    return pickle.loads((folder / "model.pickle").read_bytes())


def by_deepcopy(model, fresh, folder):
    return copy.deepcopy(model)


def by_safetensors_model(model, fresh, folder):
    from safetensors.torch import load_model, save_model

    save_model(model, folder / "model.safetensors")
    load_model(fresh, folder / "model.safetensors")
    return fresh


def by_safetensors_file(model, fresh, folder):
    from safetensors.torch import load_file, save_file

    state = dict(model.state_dict())
    # save_file refuses tensors that share memory, tied ones too.
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    save_file(state, folder / "model.safetensors")
    fresh.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    return fresh


def by_save_pretrained(model, fresh, folder):
    model.save_pretrained(folder)
    return type(model).from_pretrained(folder, dtype=fresh.dtype)


def by_accelerate_save_model(model, fresh, folder):
    accelerate = pytest.importorskip("accelerate")
    accelerate.Accelerator(cpu=fresh.device.type == "cpu").save_model(model, folder)
    accelerate.load_checkpoint_in_model(fresh, str(folder))
    fresh.tie_weights()
    return fresh


def by_distributed_checkpoint(model, fresh, folder):
    import torch.distributed.checkpoint as dcp

    dcp.save({"model": model.state_dict()}, checkpoint_id=folder, no_dist=True)
    state = fresh.state_dict()
    dcp.load({"model": state}, checkpoint_id=folder, no_dist=True)
    fresh.load_state_dict(state)
    return fresh
