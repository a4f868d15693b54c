"""What parallelize leaves on a model for trainers, and that it is in nobody's way."""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

import tpplan
from tests.checkpoint.folders import shared_folder
from tests.compare import Errors, Findings, beyond, compare_parameters, error, same
from tests.models import hf
from tests.ranks import Ranks
from tests.trainers.test_trainer import trainer
from tests.trainers.training import BATCH, RATE, Texts, fresh, groups, sharded


def config_job(mesh: DeviceMesh) -> Errors:
    """The config may be that of other models too, and goes into files and copies."""
    import transformers

    found, folder = Findings(), shared_folder()
    reference = hf()
    before = reference.config.to_dict()
    model = type(reference)(reference.config)
    model.load_state_dict(reference.state_dict())
    tpplan.parallelize(model, "llama.yaml", mesh=mesh, prove=False)
    found.add("as a mapping", same(model.config.to_dict() == before))
    found.add("differences", same("distributed" not in model.config.to_json_string()))
    for name, twin in {
        "copied": copy.deepcopy(model.config),
        "pickled": pickle.loads(pickle.dumps(model.config)),
    }.items():
        sizes = twin.distributed_config
        found.add(name, same(sizes.tp_size == sizes.dp_size == 1))
        found.add(f"{name}, as a mapping", same(twin.to_dict() == before))
    if dist.get_rank() == 0:  # nobody is waited for
        reference.save_pretrained(folder)
        written = json.loads((folder / "config.json").read_text())
        found.add("written", same("distributed_config" not in written))
        loaded = transformers.LlamaForCausalLM.from_pretrained(folder)
        found.add("loaded", compare_parameters(reference, loaded))
        found.add("unsharded", same(loaded.tp_size is None and reference.tp_size is None))
    dist.barrier()
    twin = copy.deepcopy(model)
    found.add("copy", compare_parameters(reference, twin))
    return found.errors


def test_the_config(pair: Ranks) -> None:
    assert not beyond(pair.run(2, config_job), 0.0)


def saving_job(mesh: DeviceMesh) -> Errors:
    """Every rank comes to ``save_pretrained``, and one of them is the main process."""
    fresh()
    found, calls = Findings(), []
    model = sharded(mesh, sp=True)
    model.save_pretrained = lambda *args, **kwargs: calls.append((args, kwargs))
    folder = shared_folder()
    made, _ = trainer(model, folder)
    made.save_model(str(folder / "saved"))
    expected = {"state_dict": None, "is_main_process": dist.get_rank() == 0}
    found.add("calls", same(calls == [((str(folder / "saved"),), expected)]))
    return found.errors


def test_saving(pair: Ranks) -> None:
    assert not beyond(pair.run(2, saving_job))


def evaluation_job(mesh: DeviceMesh) -> Errors:
    """With a last batch that is smaller: each text counts once, whatever ranks have it."""
    fresh()
    found, texts, model = Findings(), Texts(5), hf().eval()
    made, _ = trainer(sharded(mesh, sp=True), shared_folder(), per_device_eval_batch_size=BATCH)
    made.compute_metrics = lambda had: {"texts": len(had.label_ids)}
    with torch.no_grad():
        sums = [len(b["labels"]) * model(**b).loss.item() for b in texts.batches(BATCH)]
        logits = model(texts.ids).logits
    told = made.evaluate(texts)
    found.add("texts", same(told["eval_texts"] == len(texts)))
    if groups(mesh) == 1:  # else a last batch is filled up with the first texts
        right = sum(sums) / len(texts)
        found.add("loss", abs(told["eval_loss"] - right) / right)
    predicted = made.predict(texts)
    found.add("labels", same(torch.equal(torch.as_tensor(predicted.label_ids), texts.labels)))
    found.add("predictions", error(logits, torch.as_tensor(predicted.predictions)))
    return found.errors


def test_evaluation(pair: Ranks) -> None:
    assert not beyond(pair.run(2, evaluation_job))


def test_evaluation_of_several_groups(ranks: Ranks) -> None:
    assert not beyond(ranks.run("2x2", evaluation_job))


def metrics_job(mesh: DeviceMesh) -> Errors:
    """What a loop of the user's own gathers: tensors, numbers, objects."""
    from accelerate import Accelerator

    fresh()
    found, accelerator = Findings(), Accelerator(cpu=True)
    loader = torch.utils.data.DataLoader(range(5), batch_size=3)
    _, loader = accelerator.prepare(sharded(mesh, sp=False), loader)
    tensors, objects, ends = [], [], []
    for batch in loader:
        tensors += accelerator.gather_for_metrics({"batch": batch})["batch"].tolist()
        objects += accelerator.gather_for_metrics([str(n) for n in batch.tolist()])
        ends.append(len(accelerator.gather(batch.sum())))
    nothing = accelerator.gather_for_metrics(torch.zeros(0, 3))
    found.add("nothing", same(nothing.shape == (0, 3)))
    found.add("tensors", same(tensors == [*range(5)]))
    found.add("objects", same(objects == [str(n) for n in range(5)]))
    found.add("of every process", same(ends == [dist.get_world_size()] * len(ends)))
    return found.errors


def test_metrics(pair: Ranks) -> None:
    assert not beyond(pair.run(2, metrics_job))


def test_metrics_of_several_groups(ranks: Ranks) -> None:
    assert not beyond(ranks.run("2x2", metrics_job))


def message(call: Any) -> str:
    """What is said where a call is refused."""
    with pytest.raises(ValueError) as caught:
        call()
    return str(caught.value)


def unaveraged_job(mesh: DeviceMesh) -> list[str]:
    """What trainers say of a model whose gradients nothing averages over dp."""
    from accelerate import Accelerator

    said = []
    for refused in ("trainer", "accelerator"):
        fresh()
        model = tpplan.parallelize(hf(), "llama.yaml", mesh=mesh, prove=False)
        if refused == "trainer":
            said.append(message(lambda model=model: trainer(model, shared_folder())))
        else:
            said.append(message(lambda model=model: Accelerator(cpu=True).prepare(model)))
    return said


def test_gradients_must_be_averaged(ranks: Ranks) -> None:
    for trainer_says, accelerator_says in ranks.run("2x2", unaveraged_job):
        assert "apply fully_shard(model" in trainer_says
        assert "apply fully_shard(model" in accelerator_says


def alone_job(mesh: DeviceMesh) -> list[str]:
    """What is said where accelerate does not see the other processes."""
    from accelerate import Accelerator, ParallelismConfig

    fresh()
    model = tpplan.parallelize(hf(), "llama.yaml", mesh=mesh, prove=False)
    by_prepare = message(lambda: Accelerator().prepare(model))
    fresh()
    return [
        by_prepare,
        message(lambda: Accelerator(parallelism_config=ParallelismConfig(tp_size=2))),
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="accelerate sees all processes with GPUs")
def test_processes_must_be_seen(pair: Ranks) -> None:
    for said in pair.run(2, alone_job):
        assert all("each of the 2 processes for the only one" in text for text in said)


def state_job(mesh: DeviceMesh) -> str:
    from accelerate import Accelerator

    fresh()
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(sharded(mesh, sp=False))
    return message(lambda: accelerator.save_state(str(shared_folder()), safe_serialization=False))


def test_no_state_of_one_rank(pair: Ranks) -> None:
    assert all("would write one rank's part" in said for said in pair.run(2, state_job))


def wrapped_job(mesh: DeviceMesh) -> list[str]:
    model = tpplan.parallelize(hf(), "llama.yaml", mesh=mesh, prove=False)
    by_group = message(lambda: DistributedDataParallel(model, process_group=mesh["dp"].get_group()))
    return [by_group, message(lambda: DistributedDataParallel(model, device_mesh=mesh["dp"]))]


def test_distributed_data_parallel(ranks: Ranks) -> None:
    for said in ranks.run("2x2", wrapped_job):
        assert all("apply fully_shard(model" in text for text in said)


class Scored(nn.Module):
    """Not of transformers; the loss is its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


def plain_job(mesh: DeviceMesh, told: bool, precision: str) -> Errors:
    """A module that is not of transformers in an Accelerator, which may be told of tp, or not."""
    from accelerate import Accelerator, ParallelismConfig

    fresh()
    found = Findings()
    rules = {"first": "colwise", "second": "rowwise"}
    plan = {"tpplan": 1, "sequence_parallel": False, "rules": rules}
    inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    reference = Scored()
    model = tpplan.parallelize(Scored(), plan, mesh=mesh, inputs=(inputs,))
    chosen = ParallelismConfig(tp_size=2) if told else None
    accelerator = Accelerator(cpu=True, parallelism_config=chosen, mixed_precision=precision)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs), batch_size=4)
    optimizers = [torch.optim.SGD(m.parameters(), lr=RATE) for m in (model, reference)]
    model, optimizers[0], loader = accelerator.prepare(model, optimizers[0], loader)
    met = []
    for (batch,) in loader:
        met.append(batch)
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            expected = reference(batch).float().square().mean()
        loss = model(batch).square().mean()
        accelerator.backward(loss)
        expected.backward()
        found.add(f"loss {len(met)}", abs(loss.item() - expected.item()) / expected.item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found.add("batches", same(torch.equal(torch.cat(met), inputs)))
    found.add("parameters", compare_parameters(reference, model))
    return found.errors


@pytest.mark.parametrize("told", [False, True])
def test_a_module_of_ones_own(pair: Ranks, told: bool) -> None:
    assert not beyond(pair.run(2, plain_job, told, "no"))


def test_mixed_precision(pair: Ranks) -> None:
    assert not beyond(pair.run(2, plain_job, False, "bf16"), 1e-2)
