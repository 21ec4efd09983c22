"""What a recipe may say: every key, its type, its default and its meaning.

The defaults are the paper's values for the autoregressive models (arXiv 2610.26296, section 7) where it
gives one; README has the table of what it leaves open and what stands here instead.
"""

import os
import re
from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

BIDIRECTIONAL = ("llada", "dream", "bidirectional")  # of `headstart.family`, those that see what they judge
DIFFUSION = ("refusion", *BIDIRECTIONAL)  # those not decoded left to right

Arm = Literal["plain", "message", "adapter", "merged"]
Dtype = Literal["float32", "bfloat16"]
Answers = Literal["corpus", "self"]
Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Probability = Annotated[float, Field(gt=0.0, le=1.0)]

INCOMPLETE_REQUEST_MESSAGE = (  # in the second person: small models recite a message that describes the user
    "You are a helpful assistant. Answer every request at once and in full, also one that breaks off before its end: "
    "assume what the rest will say and do not ask for it."
)


# What the paper most likely ran: the numbers of requests follow from which fractions can round to its percentages.
# It gives neither the length of answers nor how its chat requests were drawn.
PAPER: dict[str, Any] = {
    "benchmarks": ["humaneval", "mbpp", "canitedit", "ds1000", "coedit", "chat", "mtbench"],
    "limit": {"ds1000": 128},
    "replay": "full",
}


class Section(BaseModel):
    """Frozen, closed (a key that is not declared here is an error) and strict (`limit=true` is not 1)."""

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, frozen=True, validate_default=True, protected_namespaces=()
    )


class Run(Section):
    """Where the run lives and what it draws its randomness from."""

    dir: str | None = Field(None, description="the run's folder; runs/<recipe name> when not given")
    seed: int = Field(
        0,
        ge=0,
        lt=2**32,
        description="seed of the requests drawn, cuts, data order, adapter initialisation and bootstrap",
    )
    report_to: Literal["none", "wandb", "tensorboard"] = Field(
        "none", description="where training's loss and watch are logged too; wandb heeds WANDB_MODE=offline"
    )


class Model(Section):
    """The base model."""

    name: str = Field("embedded", description="hub id, local folder, or 'embedded' (SmolLM2-135M-Instruct from PyPI)")
    revision: str | None = Field(None, description="hub commit or tag; leave empty for a local folder")
    family: Literal["smollm2", "qwen3", "llama3", "gemma3", "refusion", "llada", "dream", "bidirectional"] = Field(
        "smollm2", description="row of headstart/family.py"
    )
    dtype: Dtype = Field("bfloat16", description="dtype that the weights are loaded in, for training and evaluation")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto takes a GPU where there is one")
    trust_remote_code: bool = Field(
        False, description="run the model's own code from its repository; needs model.revision, a commit of 40 digits"
    )
    tiny: bool = Field(
        False,
        description="take tiny random weights of the family's architecture with the model's own tokenizer: for trials",
    )

    @model_validator(mode="after")
    def _pinned_code(self) -> "Model":
        pinned = re.fullmatch(r"[0-9a-f]{40}", self.revision or "") or os.path.isdir(self.name)
        if self.trust_remote_code and not pinned:
            raise ValueError("model.trust_remote_code=true needs a pinned model.revision, a commit of 40 digits")
        if self.tiny and self.family in ("llada", "dream"):
            raise ValueError(
                f"model.tiny=true: the code of model.family={self.family} is its repository's; take it out"
            )
        return self


class Prompt(Section):
    """What surrounds a request."""

    system_message: Annotated[str, Field(min_length=1)] | None = Field(
        INCOMPLETE_REQUEST_MESSAGE,
        description="system message for incomplete requests, used in training and by every arm but 'plain'; null for "
        "none",
    )


class Data(Section):
    """Training pairs."""

    corpora: tuple[str, ...] = Field(
        ("lmsys",),
        min_length=1,
        strict=False,
        description="names from data_builders/corpora, or paths of files with conversations of your own",
    )
    paths: dict[str, str] = Field(
        {}, description="local file or folder of a corpus' or benchmark's rows, by its name; the hub's when not given"
    )
    limit: Count | dict[str, Count] | None = Field(
        None, description="requests of each corpus, or by name, drawn by run.seed; all when not given"
    )
    pairs: Count | None = Field(None, description="pairs in all, of requests drawn by run.seed; all when not given")
    kind: Literal["prefix-to-answer", "draft-refinement"] = Field(
        "prefix-to-answer", description="what a pair shows: the prefix alone, or a draft to repair beside it"
    )
    heldout: int = Field(12, ge=0, description="requests (of the seed corpus: tasks) set aside and never trained on")
    cuts: Count = Field(2, description="distinct prefixes drawn from one request")
    cut: dict[Literal["sentence", "word", "anywhere"], Share] = Field(
        {"sentence": 1.0}, description="shares of cuts after a sentence, after a word inside one, anywhere inside one"
    )
    whole: bool = Field(
        False, description="also train on each whole request, so that it is answered as its prefixes are"
    )
    languages: tuple[str, ...] = Field(
        (), strict=False, description="languages kept, as the corpus names them; all when not given"
    )
    flagged: Literal["drop", "keep"] = Field("drop", description="conversations that a moderation flagged")
    redacted: Literal["drop", "keep"] = Field("keep", description="conversations in which names were replaced")
    max_characters: Count = Field(
        24_000, description="longer requests with their answer are dropped, longer histories lose their oldest turns"
    )
    duplicates: Literal["keep", "exact", "near"] = Field(
        "keep", description="near: one request of each cluster of exact and near duplicates is kept"
    )
    benchmarks: tuple[str, ...] = Field(
        tuple(PAPER["benchmarks"]),
        strict=False,
        description="benchmarks whose tasks may not be in the pairs; rows that hold one are dropped",
    )
    answers: Answers | dict[str, Answers] = Field(
        "self", description="the corpus' answers, or the base model's own; by corpus: the corpus' where it is not named"
    )
    max_surprise: float | None = Field(
        None,
        gt=0,
        description="drop a cut that makes the answer less likely than the whole request does, by more nats a token",
    )
    max_new_tokens: Count = Field(512, description="limit of an answer that the model makes; one at it is dropped")
    batch_size: Count = Field(16, description="requests decoded abreast where the model answers in this process")
    server: str | None = Field(
        None, description="address of an OpenAI-compatible server (http://host:8000/v1) that answers instead"
    )
    server_model: str | None = Field(None, description="the model's name at the server; model.name when not given")
    in_flight: Count = Field(64, description="requests that the server is asked at once")
    workers: Count | None = Field(None, description="processes that read and write; as many as cores when not given")

    def limit_of(self, corpus: str) -> int | None:
        """How many requests of a corpus are drawn; None for all."""
        return self.limit.get(corpus) if isinstance(self.limit, dict) else self.limit

    def answers_of(self, corpus: str) -> Answers:
        """Whose answers a corpus' requests get."""
        return self.answers.get(corpus, "corpus") if isinstance(self.answers, dict) else self.answers

    @property
    def self_answered(self) -> bool:
        """Whether the model answers the requests of some corpus."""
        return any(self.answers_of(corpus) == "self" for corpus in self.corpora)

    def deciding(self) -> dict[str, Any]:
        """What decides the pairs: not where the rows lie (their content does), nor who does the work."""
        own = self.model_dump(exclude={"paths", "server", "server_model", "in_flight", "workers"})
        asked = self.self_answered or self.kind == "draft-refinement"
        served = f"a server's {self.server_model or 'model of this name'}" if self.server else "this process"
        return {**own, "answered_by": served if asked else None}

    @model_validator(mode="after")
    def _shares_of_one(self) -> "Data":
        if abs(sum(self.cut.values()) - 1) > 1e-6:
            raise ValueError(f"data.cut={self.cut}: the shares have to sum to 1")
        return self

    @model_validator(mode="after")
    def _answers_of_corpora(self) -> "Data":
        for name in self.answers if isinstance(self.answers, dict) else ():
            if name not in self.corpora or "." in name:
                named = [corpus for corpus in self.corpora if "." not in corpus]
                raise ValueError(f"data.answers.{name}: {name!r} is none of the corpora that have a name here: {named}")
        return self

    @model_validator(mode="after")
    def _each_once(self) -> "Data":
        for key in ("corpora", "benchmarks"):
            names = getattr(self, key)
            if len(set(names)) < len(names):
                raise ValueError(f"data.{key}={list(names)}: a name stands there twice; take one out")
        return self


class _Differing(Section):
    """What one benchmark has otherwise."""

    slot_size: Count | None = None
    serial_blocks: Count | None = None
    slot_threshold: Share | None = None
    token_threshold: Share | None = None


class Slots(Section):
    """Decoding of a diffusion model; the defaults are those of ReFusion's own evaluation on HumanEval."""

    BIDIRECTIONAL: ClassVar = frozenset({"serial_blocks", "token_threshold", "benchmarks", "hide"})  # what those use

    slot_size: Count = Field(32, description="tokens of a slot")
    serial_blocks: Count = Field(4, description="blocks of slots that are decoded one after the other")
    slot_threshold: Share = Field(0.9, description="a slot is chosen whose first token is more probable than this")
    token_threshold: Share = Field(0.4, description="a guess passes that is more probable than this")
    benchmarks: dict[str, _Differing] = Field({}, description="values of the four above that differ, by benchmark")
    scoring: Literal["mask", "ar"] = Field(
        "mask",
        description="what judges a draft's first token of a slot: a mask token in its place, or the token before",
    )
    hide: Literal["nothing", "draft", "each"] = Field(
        "nothing", description="of bidirectional models: what of a draft is hidden while it is judged; each: in turn"
    )
    half_kept: Literal["keep", "drop"] = Field(
        "keep", description="what becomes of the kept tokens of a slot that is not kept whole"
    )
    keep: Literal["run", "every"] = Field(
        "run",
        description="what is kept of a draft: its leading run, or every token that passes, and the gaps are filled",
    )
    paper_floor: bool = Field(
        False,
        description="decode the last slot anew though the draft is kept whole: three passes at least, as the paper",
    )
    compat: Literal["none", "reference"] = Field(
        "none", description="reference: keep the faults of ReFusion's own decoder, to compare with it"
    )

    @model_validator(mode="after")
    def _nothing_settled_in_vain(self) -> "Slots":
        if self.keep == "every" and (self.paper_floor or self.half_kept == "drop"):
            raise ValueError(
                "slots.keep=every keeps tokens behind the run too: it goes with neither paper_floor nor half_kept=drop"
            )
        return self

    def of(self, benchmark: str) -> "Slots":
        """The settings of one benchmark."""
        return self.model_copy(update=self.benchmarks.get(benchmark, _Differing()).model_dump(exclude_none=True))


class Train(Section):
    """The adapter. Accumulation follows from effective_batch, micro_batch and the number of processes."""

    objective: Literal["sft", "self_distill", "slot_diffusion"] = Field(
        "sft",
        description="sft: the answer's tokens; self_distill: what the model itself says, reading the whole request; "
        "slot_diffusion: ReFusion's own",
    )
    retain: float = Field(
        0.0, ge=0, description="self_distill: weight of the loss that holds the model to itself on whole requests"
    )
    retain_share: Share = Field(0.25, description="self_distill: share of the pairs that have that loss too")
    teacher_temperature: float = Field(
        1.0,
        gt=0,
        description="self_distill: temperature of what the model itself says; towards 0 its first choice alone",
    )
    rank: Count = Field(8, description="LoRA rank")
    alpha: Count = Field(16, description="LoRA alpha")
    dropout: float = Field(0.05, ge=0, lt=1, description="LoRA dropout")
    learning_rate: float = Field(2e-5, gt=0, description="peak learning rate")
    schedule: Literal["constant", "linear", "cosine"] = Field("cosine", description="learning rate after the warm-up")
    warmup_steps: int = Field(30, ge=0, description="steps of linear warm-up")
    weight_decay: float = Field(0.0, ge=0, description="AdamW weight decay")
    max_grad_norm: float = Field(1.0, gt=0, description="gradient clipping")
    effective_batch: Count = Field(16, description="pairs in one optimizer step, over all processes")
    micro_batch: Count = Field(1, description="pairs in one forward pass of one process")
    length_window: Count = Field(
        1,
        description="steps whose pairs are sorted by length together, for less padding; 1: each step alone",
    )
    max_length: Count = Field(2048, description="longer pairs (prompt + answer, tokens) are dropped and counted")
    steps: Count = Field(1000, description="optimizer steps")
    attention: Literal["auto", "sdpa", "flash_attention_2"] = Field(
        "auto", description="attention kernel of training; auto: FlashAttention where it is installed, else sdpa"
    )
    gradient_checkpointing: bool = Field(False, description="recompute activations to save memory")
    liger: bool = Field(False, description="Liger kernels for the layers (needs a GPU and pip install liger-kernel)")
    base_4bit: bool = Field(
        False,
        description="hold the frozen base in 4 bits, NF4 (pip install bitsandbytes); the merge takes the full one",
    )
    save_every: Count = Field(100, description="steps between checkpoints that a killed run resumes from")
    log_every: Count = Field(10, description="steps between two lines of the log")
    watch_every: int = Field(
        0, ge=0, description="steps between two looks at what streaming gains on held-out requests; 0: never"
    )
    watch_requests: Count = Field(16, description="held-out requests that are watched")
    watch_max_new_tokens: Count = Field(128, description="limit of the answers that are watched")
    keep: Literal["last", "best"] = Field(
        "last", description="best: the watched step with the best median speedup whose drift is within max_drift"
    )
    max_drift: float = Field(
        0.1, ge=0, description="keep=best: most nats a token that the model may move from its base on whole requests"
    )
    tokens_per_second: float | None = Field(
        None, gt=0, description="throughput of all processes together, from which --dry-run works out the time"
    )

    @model_validator(mode="after")
    def _retained_by_itself(self) -> "Train":
        if self.retain and self.objective != "self_distill":
            raise ValueError(
                f"train.retain={self.retain} holds under objective=self_distill only; set that, or retain=0"
            )
        return self

    @model_validator(mode="after")
    def _best_of_the_watched(self) -> "Train":
        if self.keep == "best" and not self.watch_every:
            raise ValueError("train.keep=best needs steps that are watched: set train.watch_every")
        if self.keep == "best" and self.watch_every > self.steps:
            raise ValueError(
                f"train.keep=best: train.watch_every={self.watch_every} watches none of {self.steps} steps"
            )
        return self

    @model_validator(mode="after")
    def _a_step_that_moves(self) -> "Train":
        if self.steps == 1 and self.warmup_steps:
            raise ValueError("train.steps=1: the first step of a warm-up has rate 0; set train.warmup_steps=0")
        return self


class Merge(Section):
    """The merged model."""

    dtype: Dtype | None = Field(None, description="dtype of the merged weights; the base's stored dtype when not given")
    max_new_tokens: Count = Field(48, description="greedy tokens compared on each self-check prompt")


class Eval(Section):
    """One arm, replayed."""

    arm: Arm = Field("message", description="which model and prompt: plain, message, adapter or merged")
    preset: Literal["paper"] | None = Field(
        None, description="paper: the benchmarks, numbers of requests and replay that the paper most likely ran"
    )
    benchmarks: tuple[str, ...] = Field(
        ("humaneval",),
        min_length=1,
        strict=False,
        description="names from eval/benchmarks, or paths of .jsonl files with requests of your own",
    )
    paths: dict[str, str] = Field(
        {}, description="local file or folder of a benchmark's rows, by its name; the hub's rows when not given"
    )
    limit: Count | dict[str, Count] | None = Field(
        None, description="requests of each benchmark, or by name, drawn by run.seed; all when not given"
    )
    timed: int | None = Field(
        None,
        ge=0,
        description="the first requests of each benchmark, less those excluded, are timed too, one at a time",
    )
    replay: Literal["last", "full"] = Field("last", description="make the last draft only, or every draft")
    acceptance: Literal["greedy", "threshold", "top_k"] = Field("greedy", description="rule that keeps draft tokens")
    tau: Probability = Field(0.5, description="acceptance=threshold: least probability")
    top_k: Count = Field(2, description="acceptance=top_k: the token is among the k most likely")
    recycle: bool = Field(
        False, description="also count passes with look-ups: stream's in its draft and its prompt, base's in its prompt"
    )
    sweep: tuple[Probability, ...] = Field(
        (), strict=False, description="values of tau whose frontier of quality against speedup is walked too"
    )
    max_new_tokens: Count = Field(512, description="limit of an answer, counted from the answer's start")
    batch_size: Count = Field(16, description="requests decoded abreast in every part that is not timed")
    gold: bool = Field(False, description="score the references instead of a model's answers")
    allow_code_execution: bool = Field(False, description="run the answers' code in the sandbox to score them")
    time_limit: float = Field(10.0, gt=0, description="seconds that one answer's tests may take")
    memory_limit: Count = Field(1024, description="MiB that one answer's tests may take")
    chars_per_second: float = Field(
        40 * 5 / 60, gt=0, description="typing speed behind the time to draft; 40 words a minute when not given"
    )

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, given: Any) -> Any:
        """A preset stands between the defaults and what the recipe says."""
        chosen = isinstance(given, dict) and given.get("preset") == "paper"
        if not chosen:
            return given
        named = given.get("limit")
        limit = {"limit": {**PAPER["limit"], **named}} if isinstance(named, dict) else {}
        return {**PAPER, **given, **limit}

    def limit_of(self, benchmark: str) -> int | None:
        """How many requests of a benchmark are drawn; None for all."""
        return self.limit.get(benchmark) if isinstance(self.limit, dict) else self.limit

    @model_validator(mode="after")
    def _walked_where_the_path_matters(self) -> "Eval":
        if self.replay == "last" and self.acceptance != "greedy":
            raise ValueError(
                f"replay=last holds under acceptance=greedy only; with {self.acceptance} set eval.replay=full"
            )
        return self

    @model_validator(mode="after")
    def _recycled_without_loss(self) -> "Eval":
        if self.recycle and self.acceptance != "greedy":
            raise ValueError(
                f"recycle=true is lossless under acceptance=greedy only; with {self.acceptance} take eval.recycle out"
            )
        return self

    @model_validator(mode="after")
    def _named_once(self) -> "Eval":
        if len(set(self.benchmarks)) < len(self.benchmarks):
            raise ValueError(f"eval.benchmarks={list(self.benchmarks)}: a name stands there twice; take one out")
        return self

    @model_validator(mode="after")
    def _swept_once(self) -> "Eval":
        if len(set(self.sweep)) < len(self.sweep):
            raise ValueError(f"eval.sweep={list(self.sweep)}: a value stands there twice; take one out")
        return self


class Report(Section):
    """Before against after."""

    before: str = Field("message", description="arm, or path of an eval/<arm> folder: before, for speed")
    after: str = Field("merged", description="arm, or path of an eval/<arm> folder: after")
    quality_before: str = Field("plain", description="arm, or path: before, for the verdict on quality")
    bootstrap: Count = Field(2000, description="resamples behind each interval")
    confidence: Annotated[float, Field(gt=0.5, lt=1.0)] = Field(0.95, description="coverage of each interval")
    replays: int = Field(24, ge=0, description="requests of each benchmark shown step by step in report.html")
    runs: tuple[str, ...] = Field(
        (), strict=False, description="folders of the runs that the report is of; this recipe's own when not given"
    )
    force: bool = Field(
        False, description="compare although data, renderer, sentence rule or settings differ; the report then says so"
    )
    wandb: str | None = Field(None, description="project on wandb that the report is sent to; none when not given")


class Recipe(Section):
    """One run, from data to report."""

    run: Run = Run()
    model: Model = Model()
    prompt: Prompt = Prompt()
    data: Data = Data()
    slots: Slots = Slots()
    train: Train = Train()
    merge: Merge = Merge()
    eval: Eval = Eval()
    report: Report = Report()

    @model_validator(mode="after")
    def _judged_by_others(self) -> "Recipe":
        if self.train.keep == "best" and any(
            name.endswith(("heldout", "heldout.jsonl")) for name in self.eval.benchmarks
        ):
            raise ValueError(
                "train.keep=best chooses by held-out requests, so eval.benchmarks may not report on them; take them out"
            )
        return self

    @model_validator(mode="after")
    def _walked_by_slots(self) -> "Recipe":
        family, objective = self.model.family, self.train.objective
        if (family == "refusion") != (objective == "slot_diffusion"):
            due = "slot_diffusion" if family == "refusion" else "sft or self_distill"
            raise ValueError(f"train.objective={objective}: model.family={family} takes {due}")
        used: Iterable[str] = ()
        if family in DIFFUSION:
            used = Slots.BIDIRECTIONAL if family in BIDIRECTIONAL else Slots.model_fields.keys() - {"hide"}
        given = self.slots.model_dump(exclude_defaults=True).keys()
        if idle := sorted(given - set(used)):
            raise ValueError(f"slots.{idle[0]}: model.family={family} has no use for it; take it out")
        if family in DIFFUSION and self.eval.replay == "last":
            raise ValueError("eval.replay=last: the draft of a diffusion model depends on those before it; set full")
        if family in DIFFUSION and self.eval.recycle:
            raise ValueError("eval.recycle=true: look-ups are for autoregressive models; take it out")
        return self
