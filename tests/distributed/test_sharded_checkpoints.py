"""Checkpoints that ranks write together: no rank gathers another one's share, any number of ranks
goes on bit for bit, and a damaged, missing or extra shard is refused with nothing changed."""

import itertools
import json
import shutil
import warnings

import pytest
import rank_checks as checks
import shard_checks
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file

import gpuaccel as ga
from gpuaccel.errors import CheckpointError
from gpuaccel.training import checkpoint_file
from gpuaccel.training.checkpoint import (
    checkpoint_path,
    is_whole,
    latest_checkpoint,
    older_whole_checkpoints,
    prune_checkpoints,
)
from gpuaccel.training.checkpoint_file import (
    MANIFEST,
    SHARD_FORMAT,
    TORCH_OFFSETS,
    read_checkpoint,
    shard_name,
)

RANKS = 4


def manifest_of(folder):
    """Step and state of a checkpoint's folder."""
    contents = read_checkpoint(folder / MANIFEST)
    return contents.step, contents.state


LOWS = [torch.float32, torch.bfloat16]


@pytest.fixture(scope="module")
def written(workers, tmp_path_factory):
    """dtype of the model -> (the folder of a run with step-00000002.sharded, which four ranks have
    written, and whole.safetensors, which one of them wrote of the gathered state; notes of each
    rank)."""
    made = {}

    def of(low=torch.float32):
        if low not in made:
            folder = tmp_path_factory.mktemp("sharded")
            made[low] = (
                folder,
                workers(shard_checks.save_shares, RANKS, low=low, folder=str(folder)),
            )
        return made[low]

    return of


@pytest.fixture
def saved(written, tmp_path):
    """A copy of the checkpoint, to be damaged."""
    return shutil.copytree(
        written()[0] / "step-00000002.sharded", tmp_path / "step-00000002.sharded"
    )


# ---- what is written -----------------------------------------------------------------------------


@pytest.mark.parametrize("low", LOWS)
def test_a_sharded_checkpoint_holds_what_a_gathered_one_holds(written, low):
    folder, _ = written(low)
    shards = read_checkpoint(folder / "step-00000002.sharded")
    whole = read_checkpoint(folder / "whole.safetensors")
    assert shards.entries.keys() == whole.entries.keys()
    for name in whole.entries.keys():
        assert shards.entries[name] == whole.entries[name], name
        assert torch.equal(shards.tensor(name), whole.tensor(name)), name
    assert shards.step == whole.step == 2 and shards.state.keys() == whole.state.keys()
    assert shards.state["optimizer"] == whole.state["optimizer"]
    assert shards.state["scheduler"] == whole.state["scheduler"]
    _, manifest = manifest_of(folder / "step-00000002.sharded")
    cut = manifest["shapes"]
    assert any("exp_avg" in name for name in cut), "no tensor lies in several files"
    assert any(name.startswith("master.") for name in cut) == (low == torch.bfloat16)


@pytest.mark.parametrize("low", LOWS)
def test_saving_gathers_nothing_and_copies_one_tensor_at_a_time(written, low):
    """Each rank writes about a quarter of everything."""
    folder, notes = written(low)
    files = [folder / "step-00000002.sharded" / shard_name(rank, RANKS) for rank in range(RANKS)]
    sizes = [file.stat().st_size for file in files]
    print("bytes of files", sizes, "notes", notes)
    for note in notes:
        assert note["allocated"] <= note["largest"]
    contents = read_checkpoint(folder / "whole.safetensors")
    largest = max(4 * contents.tensor(name).numel() for name in contents.entries)
    assert max(sizes) < sum(sizes) / RANKS + 2 * largest + 2**16


def test_torch_reads_the_shards(written):
    folder, _ = written(torch.bfloat16)
    whole = read_checkpoint(folder / "whole.safetensors")
    values = {
        name: torch.empty(shape if name.startswith("model.") else [whole.tensor(name).numel()])
        for name, (_, shape) in whole.entries.items()
        # It cannot read a tensor without dimensions.
        if shape and not name.startswith("rng.")
    }
    values = {name: t.to(whole.tensor(name).dtype) for name, t in values.items()}
    reader = dcp.HuggingFaceStorageReader(str(folder / "step-00000002.sharded"))
    with warnings.catch_warnings():
        # That there is no process group.
        warnings.simplefilter("ignore")
        dcp.load(values, storage_reader=reader, no_dist=True)
    assert any(name.startswith("master.") for name in values)
    for name, tensor in values.items():
        assert torch.equal(tensor, whole.tensor(name).view_as(tensor)), name


def test_buffers_are_those_of_rank_0(written):
    """What forward does to buffers stays on its rank."""
    contents = read_checkpoint(written()[0] / "step-00000002.sharded")
    assert contents.tensor("model.seen").tolist() == [0.0, 1.0, 2.0]


# ---- resuming ------------------------------------------------------------------------------------


@pytest.mark.parametrize("low", LOWS)
@pytest.mark.parametrize("backend", ["torch", "simt"])
def test_4_then_2_then_1_then_3_ranks_are_bit_identical(workers, backend, low, tmp_path):
    """Each takes a step, saves, and what the next ones load is what was saved, byte for byte. The
    weights at the end are those of one process that took all steps (ordered)."""
    chain = dict(backend=backend, low=low, folder=str(tmp_path))
    for step, ranks in enumerate((4, 2, 1, 3)):
        assert workers(shard_checks.one_of_a_chain, ranks, step=step, **chain) == [True] * ranks
    assert [path.name for path in sorted(tmp_path.glob("step-*"))] == [
        "step-00000001.sharded",
        "step-00000002.sharded",
        "step-00000003.safetensors",
        "step-00000004.sharded",
    ]
    assert workers(shard_checks.end_of_a_chain, 1, steps=4, **chain) == [True]


@pytest.mark.parametrize("name", ["step-00000002.sharded", "whole.safetensors"])
def test_loading_holds_a_share_and_one_tensor(written, workers, name):
    """Two ranks, from a folder of four and from one file. Nothing is gathered."""
    for note in workers(shard_checks.load_shares, 2, path=str(written()[0] / name)):
        print(note)
        assert note["allocated"] <= note["state"] + note["counts"] + note["largest"]


# ---- folders that must be refused ----------------------------------------------------------------


def everything(step):
    tensors = [*step.model.state_dict().values(), step.arena.weights, *checks.moments(step)]
    groups = [{**group, "params": 0} for group in step.optimizers[0].param_groups]
    return (
        [tensor.tolist() for tensor in tensors],
        str(groups),
        str([each.state_dict() for each in step.schedulers]),
        torch.get_rng_state().tolist(),
    )


@pytest.fixture(scope="module")
def other_step():
    """A step of one process, into which damaged checkpoints are loaded."""
    with checks.make_step(shard_checks.Wide(seed=5)) as step:
        step([checks.micro_batch(0)])
        yield step


@pytest.fixture
def refuse(other_step):
    """Loading raises CheckpointError that names the folder, and changes nothing at all."""

    def refuse(path, match, **changes):
        before = everything(other_step)
        with pytest.raises(CheckpointError, match=match) as error:
            ga.load_checkpoint(path, **{**shard_checks.parts(other_step), **changes})
        assert str(path) in str(error.value)
        assert everything(other_step) == before
        assert not is_whole(path)

    return refuse


def ranges_in(file):
    """name -> (first, last + 1) byte in the file."""
    data = file.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    return {
        name: tuple(start + offset for offset in entry["data_offsets"])
        for name, entry in json.loads(data[8:start]).items()
        if name != "__metadata__"
    }


def test_a_flipped_bit_in_a_tensor_is_named_with_its_shard(saved, refuse):
    for rank in range(RANKS):
        file = saved / shard_name(rank, RANKS)
        data = file.read_bytes()
        for first, last in itertools.islice(ranges_in(file).values(), 2):
            damaged = bytearray(data)
            damaged[(first + last) // 2] ^= 4
            file.write_bytes(damaged)
            refuse(saved, f"{file.name} is damaged: it has sha256 [0-9a-f]+, expected [0-9a-f]+$")
        file.write_bytes(data)


def test_truncated_and_a_flipped_bit_of_the_manifest(saved, refuse):
    file = saved / shard_name(2, RANKS)
    data = file.read_bytes()
    for size in (0, 8, len(data) - 1, len(data) + 1):
        file.write_bytes((data + b"x")[:size])
        refuse(saved, f"{file.name} cannot be read as safetensors: .*")
    file.write_bytes(data)
    manifest = saved / MANIFEST
    text = manifest.read_bytes()
    for size in (0, 3, len(text) // 2):
        manifest.write_bytes(text[:size])
        refuse(saved, "manifest.safetensors cannot be read as safetensors")
    damaged = bytearray(text)
    damaged[len(text) // 2] ^= 1
    manifest.write_bytes(damaged)
    refuse(saved, "manifest.safetensors (is damaged|cannot be read)")
    manifest.unlink()
    refuse(saved, "manifest.safetensors is not a file; expected a checkpoint")


def test_a_missing_shard_is_named(saved, refuse):
    file = saved / shard_name(1, RANKS)
    aside = file.rename(saved / "shard")
    refuse(saved, f"shard {file.name} is missing")
    aside.rename(file)
    assert is_whole(saved)


def test_a_shard_of_another_checkpoint_is_named(saved, written, workers, tmp_path, refuse):
    """Whole by itself, of the same ranks and step and as large, but of another run."""
    workers(shard_checks.save_shares, RANKS, low=torch.float32, folder=str(tmp_path / "b"), seed=9)
    name = shard_name(3, RANKS)
    shutil.copy(tmp_path / "b" / saved.name / name, saved / name)
    refuse(saved, f"{name} is of another checkpoint: it has sha256 .*, expected ")


def test_one_shard_alone_is_no_checkpoint(saved, refuse):
    refuse(saved / shard_name(0, RANKS), "it is one of several shards; give the folder")


def test_all_ranks_refuse_what_one_of_them_finds(saved, workers):
    """Each of two ranks reads half of the files. Both name the damaged one, and neither changes."""
    file = saved / shard_name(1, RANKS)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    for message in workers(shard_checks.refuse_shares, 2, path=str(saved)):
        assert f"{file.name} is damaged: it has sha256 " in message


def test_all_ranks_refuse_a_value_of_another_kind(saved, workers):
    """Of the manifest, which all ranks read, and of a file: no rank waits for another one that has
    raised something else."""
    file = saved / shard_name(1, RANKS)
    with safe_open(saved / MANIFEST, "pt") as opened:
        metadata = opened.metadata()
    del metadata["sha256"]
    state = json.loads(metadata["state"])

    def write_manifest():
        metadata["state"] = json.dumps(state)
        checkpoint_file._write(saved / MANIFEST, {}, metadata)

    groups, state["optimizer"]["groups"] = state["optimizer"]["groups"], {}
    write_manifest()
    for message in workers(shard_checks.refuse_shares, 2, path=str(saved)):
        assert "does not fit this optimizer: its groups have [] parameters" in message
    state["optimizer"]["groups"] = groups
    offsets = {"format": SHARD_FORMAT, TORCH_OFFSETS: "[" * 100_000}
    state["files"][file.name] = checkpoint_file._write(file, load_file(file), offsets)
    write_manifest()
    for message in workers(shard_checks.refuse_shares, 2, path=str(saved)):
        assert "is damaged: its content is not what save_checkpoint" in message


def test_another_model(saved, refuse, written):
    other = checks.LargerHead()
    with pytest.raises(CheckpointError, match="does not fit this model: model.head.weight"):
        ga.load_checkpoint(saved, model=other)
    with checks.make_step(shard_checks.Wide(), kind="sgd") as step:
        with pytest.raises(CheckpointError, match="holds the state of AdamW, expected SGD"):
            ga.load_checkpoint(saved, model=step.model, optimizer=step.optimizers)


# ---- disks and kills -----------------------------------------------------------------------------


def test_an_error_of_one_ranks_disk_is_an_error_of_all(workers, tmp_path):
    """A full disk on rank 1: both ranks say so, what was there stays, nothing is left beside it."""
    messages = workers(shard_checks.full_disk_of_a_rank, 2, folder=str(tmp_path))
    for message in messages:
        assert "cannot be written (No space left on device); what was there before is" in message
    assert "rank 1: " in messages[0]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001.sharded"]
    assert is_whole(tmp_path / "step-00000001.sharded")


@pytest.mark.slow
def test_a_rank_killed_while_saving_leaves_the_old_checkpoint(tmp_path):
    """Two ranks of ga.launch, sharded. In the second checkpoint rank 0 is killed while it writes
    its share, then rank 1, then rank 0 before the renaming. The first checkpoint stays, and a run
    that goes on with it ends as one that nobody stopped."""

    def train(folder, *fault):
        options = dict(backend="gloo", timeout=60, start=600)
        ga.launch(shard_checks.train_and_die_in_a_save, 2, (folder, *fault), **options)

    killed, left_alone = tmp_path / "killed", tmp_path / "left alone"
    unfinished = []
    for who, at in ((0, 2), (1, 9), (0, "rename")):
        with pytest.raises(ga.errors.RankError, match=f"rank {who} was killed by SIGKILL"):
            train(killed, who, at)
        newest = latest_checkpoint(killed)
        assert newest.name == "step-00000002.sharded" and is_whole(newest)
        unfinished += [len(list(killed.glob("step-00000004.sharded.tmp-*")))]
    # Rank 0 removes what it began where it lives. The end of the run removes the rest.
    assert unfinished == [1, 1, 2]
    train(killed)
    train(left_alone)
    assert not list(killed.glob("*.tmp-*"))
    a, b = (read_checkpoint(latest_checkpoint(folder)) for folder in (killed, left_alone))
    assert a.step == b.step == 6 and a.entries.keys() == b.entries.keys()
    assert all(torch.equal(a.tensor(name), b.tensor(name)) for name in a.entries)
    assert checks.logged_losses(killed) == checks.logged_losses(left_alone)


def test_a_damaged_folder_names_the_older_whole_ones(saved, workers, tmp_path):
    """Of both forms; ga.train on two ranks, and the choice of the newest."""
    for step in (1, 3):
        shutil.copytree(saved, tmp_path / f"step-{step:08d}.sharded")
    model = checks.Net()
    one = ga.save_checkpoint(checkpoint_path(tmp_path, 2), model=model, step=2)
    newest = latest_checkpoint(tmp_path)
    assert newest.name == "step-00000003.sharded"
    (newest / shard_name(0, RANKS)).unlink()
    (tmp_path / "step-00000001.sharded" / MANIFEST).unlink()
    assert older_whole_checkpoints(newest) == [saved, one]
    for message in workers(shard_checks.resume_damaged, 2, folder=str(tmp_path)):
        assert f"older ones that are whole: {saved.name}, {one.name}" in message


def test_prune_deletes_folders_and_the_other_form_of_a_step(saved, tmp_path):
    for step in (4, 6, 8):
        shutil.copytree(saved, tmp_path / f"step-{step:08d}.sharded")
    for name in ("step-00000006.sharded.tmp-7", "step-00000008.sharded.tmp-0"):
        (tmp_path / name).mkdir()
    whole = ga.save_checkpoint(checkpoint_path(tmp_path, 8), model=checks.Net(), step=8)
    gone = {path.name for path in prune_checkpoints(whole, 2)}
    assert gone == {
        "step-00000002.sharded",
        "step-00000004.sharded",
        "step-00000006.sharded.tmp-7",
        "step-00000008.sharded",
        "step-00000008.sharded.tmp-0",
    }
    assert latest_checkpoint(tmp_path) == whole
    assert {path.name for path in tmp_path.iterdir()} == {whole.name, "step-00000006.sharded"}
