"""Packages that training scripts import: which of them `--preload` takes, and what a fork does with one afterwards.

Only those that are installed are tried. The list in docs/running.md is of an environment that has them all.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.launcher.forked import Forks

pytestmark = [pytest.mark.slow, pytest.mark.process, pytest.mark.timeout(150)]

MODEL = "import torch\ntorch.manual_seed(0)\nmodel = torch.nn.Linear(4, 2)\n"
TOKENIZER = """
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
tokenizer = Tokenizer(models.BPE(unk_token="?"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
lines = ["the last step is saved", "the next step is run"] * 500
tokenizer.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=60, show_progress=False, special_tokens=["?"]))
"""
LIGHTNING = """
import logging, torch, tempfile, warnings
warnings.simplefilter("ignore")
logging.getLogger("NAME").setLevel(logging.ERROR)
import NAME as pl
print(pl.utilities.rank_zero_only.rank)
class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, number):
        return self.layer(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)
torch.manual_seed(0)
model, quiet = Model(), dict(logger=False, enable_progress_bar=False, enable_model_summary=False)
trainer = pl.Trainer(max_steps=3, accelerator="cpu", devices=1, default_root_dir=tempfile.mkdtemp(),
    enable_checkpointing=False, **quiet)
import os
os.environ["WORLD_SIZE"] = "1"
os.environ["RANK"] = os.environ["LOCAL_RANK"] = "0"
trainer.fit(model, torch.utils.data.DataLoader(torch.ones(8, 4), num_workers=2))
print(model.layer.weight.tolist())
"""

USES = {
    "PIL": """
from PIL import Image
print(Image.new("RGB", (64, 64), (9, 8, 7)).rotate(30).resize((7, 7), Image.Resampling.BICUBIC).tobytes().hex())
""",
    "accelerate": MODEL + """
import accelerate, os
for name in ("RANK", "WORLD_SIZE"):
    os.environ.pop(name, None)
one = accelerate.Accelerator(cpu=True)
model, optimizer = one.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
one.backward(model(torch.ones(3, 4)).sum())
optimizer.step()
print(model.weight.tolist())
""",
    "albumentations": """
import albumentations, numpy
flip = albumentations.Compose([albumentations.HorizontalFlip(p=1), albumentations.Resize(5, 5)])
print(flip(image=numpy.arange(300, dtype="uint8").reshape(10, 10, 3))["image"].tolist())
""",
    "bitsandbytes": """
import bitsandbytes, torch
torch.manual_seed(0)
quantized, state = bitsandbytes.functional.quantize_blockwise(torch.randn(512))
print(bitsandbytes.functional.dequantize_blockwise(quantized, state).tolist())
""",
    "cv2": """
import cv2, numpy
image = (numpy.arange(512 * 512 * 3) % 251).astype("uint8").reshape(512, 512, 3)
cv2.setNumThreads(2)
image = cv2.GaussianBlur(cv2.resize(image, (301, 299)), (9, 9), 2)
print(int(image.sum()), cv2.imencode(".png", image)[1].size)
""",
    "datasets": """
import datasets, tempfile
datasets.disable_progress_bars()
made = datasets.Dataset.from_dict({"x": list(range(100))})
print(made.map(lambda row: {"y": row["x"] * 2}, num_proc=2).shuffle(seed=1)[:9])
loader = __import__("torch").utils.data.DataLoader(made.with_format("torch"), batch_size=50, num_workers=2)
print([batch["x"].sum().item() for batch in loader])
""",
    "deepspeed": """
import logging
logging.disable()
import deepspeed, torch
from deepspeed.runtime.lr_schedules import WarmupLR
schedule = WarmupLR(torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], 0.1), warmup_num_steps=9)
print([schedule.step() or schedule.get_last_lr() for _ in range(5)])
""",
    "diffusers": """
import diffusers, torch
torch.manual_seed(0)
schedule = diffusers.DDPMScheduler(num_train_timesteps=10)
print(schedule.add_noise(torch.ones(1, 2), torch.randn(1, 2), torch.tensor([5])).tolist())
model = diffusers.UNet2DModel(8, 1, 1, block_out_channels=(8, 8), norm_num_groups=2,
    down_block_types=("DownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "UpBlock2D"))
print(model(torch.ones(1, 1, 8, 8), 3).sample.sum().item())
""",
    "einops": "import einops, torch\nprint(einops.rearrange(torch.arange(12), '(a b) -> b a', a=3).tolist())",
    "evaluate": "import evaluate\nprint(evaluate.EvaluationModule.__name__, evaluate.__version__)",
    "fsspec": """
import fsspec
with fsspec.open("memory://a", "w") as file: file.write("text")
print(fsspec.open("memory://a").open().read())
""",
    "google.protobuf": """
from google.protobuf import struct_pb2
one = struct_pb2.Struct()
one["step"] = 3
print(one.SerializeToString())
""",
    "gymnasium": """
import gymnasium
world = gymnasium.make("CartPole-v1")
print(world.reset(seed=1)[0].tolist(), [world.step(1)[0].tolist() for _ in range(3)])
""",
    "h5py": """
import h5py, io
with h5py.File(io.BytesIO(), "w") as file:
    file["x"] = [1.0, 2.0]
    print(file["x"][:].tolist())
""",
    "hydra": """
import hydra, pathlib, tempfile
folder = pathlib.Path(tempfile.mkdtemp())
(folder / "config.yaml").write_text("lr: 0.1")
with hydra.initialize_config_dir(str(folder), version_base=None):
    print(hydra.compose("config", ["+steps=3"]))
""",
    "jax": """
import jax
print(jax.jit(jax.grad(lambda x: (x @ x.T).sum()))(jax.numpy.ones((64, 64))).sum())
print(jax.random.normal(jax.random.key(1), (3,)).tolist())
""",
    "lightgbm": """
import lightgbm, numpy
x = numpy.arange(400.0).reshape(100, 4) % 7
print(lightgbm.train({"verbose": -1, "num_threads": 2}, lightgbm.Dataset(x, x.sum(1)), 5).predict(x)[:3].tolist())
""",
    "lightning": LIGHTNING.replace("NAME", "lightning.pytorch"),
    "matplotlib": """
import matplotlib, io
matplotlib.use("Agg")
from matplotlib import pyplot
pyplot.plot([1, 3, 2])
pyplot.savefig(file := io.BytesIO(), format="png", metadata={"Software": None})
import hashlib
print(hashlib.sha256(file.getvalue()).hexdigest())
""",
    "mlflow": """
import logging, mlflow, tempfile
logging.disable()
mlflow.set_tracking_uri(f"sqlite:///{tempfile.mkdtemp()}/runs.db")
with mlflow.start_run():
    for step in range(3): mlflow.log_metric("loss", 1 / (step + 1), step=step)
    run = mlflow.active_run().info.run_id
print(mlflow.get_run(run).data.metrics)
""",
    "networkx": "import networkx\nprint(networkx.pagerank(networkx.karate_club_graph())[3])",
    "nltk": "import nltk\nprint(nltk.stem.PorterStemmer().stem('running'), nltk.edit_distance('fork', 'spawn'))",
    "numba": """
import numba, numpy
@numba.njit(parallel=True)
def total(x):
    found = 0.0
    for i in numba.prange(len(x)): found += x[i]
    return found
print(total(numpy.ones(100_000)))
""",
    "numexpr": """
import numexpr, numpy
numexpr.set_num_threads(2)
x = numpy.arange(1_000_000.0)
print(numexpr.evaluate("sum(2 * x + 1)"))
""",
    "omegaconf": "import omegaconf\nprint(omegaconf.OmegaConf.create({'a': 1, 'b': '${a}'}).b)",
    "optuna": """
import optuna
optuna.logging.disable_default_handler()
study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=1))
study.optimize(lambda trial: trial.suggest_float("x", -1, 1) ** 2, n_trials=12, n_jobs=1)
print(study.best_value)
""",
    "pandas": """
import pandas
frame = pandas.DataFrame({"a": [1, 2, 1], "b": [3.0, 4.0, 5.0]})
print(frame.groupby("a").b.mean(), frame.to_csv())
""",
    "peft": MODEL + """
import peft
model = peft.get_peft_model(torch.nn.Sequential(model), peft.LoraConfig(r=2, target_modules=["0"]))
model(torch.ones(1, 4)).sum().backward()
print(sorted(name for name, one in model.named_parameters() if one.grad is not None))
""",
    "polars": """
import polars
frame = polars.DataFrame({"a": [1, 2] * 50_000, "b": range(100_000)})
print(frame.lazy().group_by("a").agg(polars.col("b").sum()).sort("a").collect().rows(), polars.thread_pool_size() > 0)
""",
    "pyarrow": """
import pyarrow, pyarrow.compute, pyarrow.dataset, pyarrow.parquet, tempfile
table = pyarrow.table({"a": [1, 2] * 50_000, "b": list(range(100_000))})
pyarrow.parquet.write_table(table, path := tempfile.mkdtemp() + "/x.parquet")
print(pyarrow.parquet.read_table(path).group_by("a").aggregate([("b", "sum")]).sort_by("a").to_pydict())
print(pyarrow.dataset.dataset(path).to_table(filter=pyarrow.compute.field("b") > 99_990).num_rows)
""",
    "pytorch_lightning": LIGHTNING.replace("NAME", "pytorch_lightning"),
    "ray": """
import ray
one = ray.cloudpickle.dumps(lambda: 3)
print(ray.cloudpickle.loads(one)(), ray.is_initialized())
""",
    "safetensors": """
import torch
from safetensors.torch import load, save
print(load(save({"w": torch.arange(3)})))
""",
    "scipy": """
import numpy, scipy.linalg, scipy.optimize, scipy.signal, scipy.sparse.linalg, scipy.stats
matrix = numpy.arange(250_000.0).reshape(500, 500) % 17 + 500 * numpy.eye(500)
print(round(scipy.linalg.solve(matrix, numpy.ones(500)).sum(), 9))
print(scipy.optimize.minimize(lambda x: (x**2).sum(), [3, 4]).x)
""",
    "sentence_transformers": """
import sentence_transformers, torch
print(sentence_transformers.util.cos_sim(torch.ones(1, 2), torch.tensor([[1.0, 0.0]])).item())
""",
    "sentencepiece": """
import io, sentencepiece
sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(["the last step is saved"] * 99), vocab_size=16,
    model_writer=(model := io.BytesIO()), minloglevel=9, num_threads=2)
print(sentencepiece.SentencePieceProcessor(model_proto=model.getvalue()).encode("the step"))
""",
    "sklearn": """
import numpy, sklearn.cluster, sklearn.ensemble, sklearn.datasets
x, y = sklearn.datasets.load_digits(return_X_y=True)
print(sklearn.ensemble.RandomForestClassifier(20, random_state=1, n_jobs=2).fit(x, y).predict(x[:9]))
print(sklearn.cluster.KMeans(5, n_init=1, random_state=1).fit(x).labels_[:9])
print(sklearn.ensemble.HistGradientBoostingClassifier(max_iter=3).fit(x, y).predict(x[:9]))
""",
    "spacy": """
import spacy
language = spacy.blank("en")
language.add_pipe("sentencizer")
print([str(one) for one in language("It forks. It runs.").sents], len([*language.pipe(["a b"] * 9, n_process=2)]))
""",
    "tokenizers": TOKENIZER + """
print([one.ids for one in tokenizer.encode_batch(lines)][:2])
import os
if not (child := os.fork()):
    print([one.ids for one in tokenizer.encode_batch(lines)][:2], flush=True)
    os._exit(0)
os.waitpid(child, 0)
""",
    "torch.utils.tensorboard": """
import tempfile, pathlib
from torch.utils.tensorboard import SummaryWriter
with SummaryWriter(folder := tempfile.mkdtemp()) as writer:
    for step in range(9): writer.add_scalar("loss", 1 / (step + 1), step)
(file,) = pathlib.Path(folder).iterdir()
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
print([one.step for one in EventFileLoader(str(file)).Load()])
""",
    "torchdata": """
from torchdata.stateful_dataloader import StatefulDataLoader
loader = StatefulDataLoader([*range(20)], batch_size=5, num_workers=2)
print([batch.tolist() for batch in loader])
""",
    "torchmetrics": """
import torch, torchmetrics
print(torchmetrics.utilities.prints.rank_zero_only.rank)
metric = torchmetrics.Accuracy("multiclass", num_classes=3)
print(metric(torch.tensor([0, 1, 2]), torch.tensor([0, 1, 1])).item(), metric.compute().item())
""",
    "tqdm": """
import sys, tqdm
with tqdm.tqdm(total=3, file=open("/dev/null", "w")) as bar:
    for _ in range(3): bar.update()
    print(bar.n, tqdm.tqdm.monitor is not None)
""",
    "transformers": TOKENIZER + """
import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?", pad_token="?")
torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=60, n_positions=32, n_embd=8, n_layer=1, n_head=2))
rows = fast(lines[:4], return_tensors="pt", padding=True)
print(model(**rows, labels=rows["input_ids"]).loss.item())
""",
    "trl": "import trl\nprint(trl.SFTConfig.__name__, trl.SFTTrainer.__mro__[1].__name__)",
    "wandb": """
import os, tempfile
os.environ.update(WANDB_MODE="offline", WANDB_SILENT="true", WANDB_DIR=tempfile.mkdtemp())
import wandb
run = wandb.init(project="p")
for step in range(3): run.log({"loss": 1 / (step + 1)})
print(run.summary["loss"])
run.finish()
""",
    "webdataset": """
import io, tempfile, webdataset
path = tempfile.mkdtemp() + "/x.tar"
with webdataset.TarWriter(path) as writer:
    for i in range(9): writer.write({"__key__": str(i), "cls": i})
print([row["cls"] for row in webdataset.WebDataset(path, shardshuffle=False).decode()])
""",
    "xgboost": """
import numpy, xgboost
x = numpy.arange(400.0).reshape(100, 4) % 7
print(xgboost.train({"nthread": 2}, xgboost.DMatrix(x, x.sum(1)), 5).predict(xgboost.DMatrix(x))[:3].tolist())
""",
    "zarr": """
import numpy, zarr
array = zarr.create_array(store=zarr.storage.MemoryStore(), shape=(100,), chunks=(10,), dtype="f8")
array[:] = numpy.arange(100.0)
print(array[3:6].tolist())
""",
}  # fmt: skip
"""Package -> a program that uses it, and prints what comes out."""

THREAD = "polars-ooc-clea"
WITH_THREAD = ("deepspeed", "mlflow", "polars")
"""They import polars where it is installed. Without its thread, what it spills to disk stays there."""


def installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name.removeprefix("torch.utils.")) is not None
    except ModuleNotFoundError:
        return False


@pytest.mark.parametrize("package", USES)
def test_a_fork_does_with_a_preloaded_package_what_a_new_process_does(
    package: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if not installed(package):
        pytest.skip(f"{package} is not installed")
    script = tmp_path / "script.py"
    script.write_text(USES[package])
    with Forks.anywhere([package]) as forks:
        forks.ready()
        assert len(caplog.messages) == (package in WITH_THREAD and installed("polars")), caplog.messages
        assert all(THREAD in line for line in caplog.messages)
        forked, plain = (
            forks.run(str(script), threads=2, LOCAL_RANK="1"),
            forks.plain(str(script), OMP_NUM_THREADS="2", LOCAL_RANK="1"),
        )
    assert forked.code == plain.code == 0, f"{forked.err}\n{plain.err}"
    assert forked.out == plain.out
