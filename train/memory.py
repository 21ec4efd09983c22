"""Peak memory of one device in training, estimated from the model's config: nothing is loaded or allocated.

One forward and backward pass is run on fake tensors, which have a shape and no memory; what is alive at its widest
moment is what the pass takes. Weights, gradients and Adam's states are counted, and shared out as the launch does.

Not covered, and said as an allowance: the CUDA context, the libraries' workspaces, NCCL's buffers, and what the
allocator cannot reuse. Kernels on a GPU may keep other intermediate values than those on a CPU, by which is traced.
"""

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from peft import get_peft_model
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AutoModelForCausalLM

from headstart import model as loading
from recipes.schema import Recipe
from train.adapter import lora_config
from train.agreement import Launch
from train.distill import kl_divergence
from train.trainer import in_chunks

KEPT = {"use_reentrant": False, "preserve_rng_state": False}  # the state of a fake generator cannot be read
FLOAT32 = 4  # bytes
FOUR_BIT = 0.5 + 1 / 64 + 4 / 64 / 256  # bytes of a weight: NF4, its scales in 8 bits and the scales of those
ALLOWANCE = 2 * 1024**3  # CUDA context, library workspaces and NCCL buffers: what such runs commonly show


@dataclass(frozen=True)
class Shape:
    """A micro-batch of one process: `rows` padded to `tokens`, of which `filled` are not padding, with `labels`.

    `teacher` is what the teacher of objective=self_distill reads beside it.
    """

    rows: int
    tokens: int
    filled: int
    labels: int
    teacher: "Shape | None" = None

    @property
    def fed(self) -> int:
        """Tokens that the model reads, padding included."""
        return self.rows * self.tokens


@dataclass(frozen=True)
class Memory:
    """Bytes on one device at the widest moment of a step.

    `base`, `adapter`, `gradients` and `states` are this device's share of them; `gathered` is what the launch holds
    beside it to pass weights and gradients on; `activations` is what a forward and backward pass adds, logits included.
    """

    base: int
    adapter: int
    gradients: int
    states: int
    gathered: int
    activations: int

    @property
    def total(self) -> int:
        """Sum of the parts, without `ALLOWANCE`."""
        return sum(getattr(self, field.name) for field in fields(self))


def estimate(recipe: Recipe, config: Any, shapes: Sequence[Shape], launch: Launch, world: int) -> Memory:
    """Peak of a step over the micro-batches `shapes`, of which the widest and the most labelled are traced."""
    model = adapted(recipe, config)
    with FakeTensorMode():
        _make_fake(model)
        widest, labelled = max(shapes, key=lambda s: s.fed), max(shapes, key=lambda s: s.labels)
        activations = max(traced(model, recipe, shape) for shape in {widest, labelled})
        return shared_out(model, recipe, launch, world, activations)


def adapted(recipe: Recipe, config: Any) -> Any:
    """The recipe's model with its adapter, as training sets it up, without any weights (on the meta device)."""
    dtype = loading.torch_dtype(recipe.model.dtype)
    with torch.device("meta"):
        base: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
        return get_peft_model(base, lora_config(recipe.train, loading.family(recipe.model)))


def trainable(model: nn.Module) -> int:
    """Number of parameters that are trained."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def traced(model: Any, recipe: Recipe, shape: Shape) -> int:
    """Bytes that one forward and backward pass adds to weights and gradients at its widest moment."""
    model.train()
    if recipe.train.gradient_checkpointing:
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=KEPT)
        model.enable_input_require_grads()
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    with _Alive(model) as alive:
        _pass(model, shape)
    return alive.peak


def shared_out(model: Any, recipe: Recipe, launch: Launch, world: int, activations: int) -> Memory:
    """The parts of one of `world` devices."""
    weights, gradients, states = (world if launch.stage >= stage else 1 for stage in (3, 2, 1))
    base = _frozen(model, recipe.train.base_4bit)
    adapter = trainable(model) * FLOAT32
    return Memory(
        base=math.ceil(base / weights),
        adapter=math.ceil(adapter / weights + (adapter / states if launch.stage else 0)),  # ZeRO steps a copy
        gradients=math.ceil(adapter / gradients),
        states=math.ceil(2 * adapter / states),
        gathered=_gathered(model, launch, world, base, adapter),
        activations=activations,
    )


def _make_fake(model: nn.Module) -> None:
    """Replace weights and buffers by fake tensors on the CPU, in the fake mode that is on; what was one stays one."""
    made = dict[int, Any]()
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            fake = nn.Parameter(torch.empty(weight.shape, dtype=weight.dtype, device="cpu"), weight.requires_grad)
            setattr(module, name, made.setdefault(id(weight), fake))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu"))


def _gathered(model: Any, launch: Launch, world: int, base: int, adapter: int) -> int:
    """Bytes of the weights of others, and of gradients under way."""
    text = model.config.get_text_config()
    if launch.kind == "FSDP":  # the layer at work, the next one, and the largest of all, the embedding
        return 2 * base // text.num_hidden_layers + max(parameter.nbytes for parameter in model.parameters())
    if launch.stage == 0:
        return adapter if world > 1 else 0
    bucket = (text.hidden_size**2 if launch.bucket is None else launch.bucket) * FLOAT32
    weights = sum(parameter.numel() for parameter in model.parameters())
    return bucket + (base * min(launch.live, weights) // weights if launch.stage == 3 else 0)


def _frozen(model: nn.Module, four_bit: bool) -> int:
    """Bytes of everything that is not trained."""
    total = sum(buffer.nbytes for buffer in model.buffers())
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            quantised = four_bit and parameter.dim() == 2 and ".layers." in name
            total += int(parameter.numel() * FOUR_BIT) if quantised else parameter.nbytes
    return total


def _pass(model: Any, shape: Shape) -> None:
    """Forward and backward of one micro-batch of fake tokens, with the loss of train/trainer.py or train/distill.py."""
    teacher = None
    if shape.teacher is not None:
        with torch.no_grad(), model.disable_adapter():
            teacher = _logits(model, shape.teacher)
    student = _logits(model, shape)
    targets = torch.zeros(len(student), dtype=torch.long)
    if teacher is not None:
        loss = in_chunks(partial(_divergence, teacher), student, targets)
    else:
        loss = in_chunks(_likelihood, student, targets)
    loss.backward()


def _logits(model: Any, shape: Shape) -> Tensor:
    """Logits of about `shape.labels` positions, of the model's dtype and shape (labels, vocabulary)."""
    ids = torch.zeros(shape.rows, shape.tokens, dtype=torch.long)
    mask = None if shape.filled == shape.fed else torch.ones_like(ids)  # without padding the kernel needs no mask
    places = torch.arange(math.ceil(shape.labels / shape.rows))
    logits: Tensor = model(input_ids=ids, attention_mask=mask, use_cache=False, logits_to_keep=places).logits
    return logits.flatten(0, 1)


def _likelihood(logits: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(logits.float(), targets, reduction="sum")


def _divergence(teacher: Tensor, student: Tensor, said_by: Tensor) -> Tensor:
    return kl_divergence(teacher[said_by], student).sum()


class _Alive(TorchDispatchMode):
    """Bytes of the storages that were made since it began and are alive still, and the most that they ever were."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known = WeakIdKeyDictionary()
        for parameter in model.parameters():
            for tensor in (parameter, parameter.grad):
                if tensor is not None:
                    self._known[tensor.untyped_storage()] = True
        for buffer in model.buffers():
            self._known[buffer.untyped_storage()] = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tree_map_only(Tensor, self._see, result)
        return result

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage not in self._known:
            self._known[storage] = True
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._gone, storage.nbytes())

    def _gone(self, size: int) -> None:
        self.now -= size
