"""One training: text, draft, training loop, saved folder and card."""

from dataclasses import replace

import torch

from paceline.core.clock import Clock
from paceline.core.errors import IncompatibleDraft, InvalidConfig
from paceline.core.machine import usable_cores
from paceline.models.loading import open_checkpoint
from paceline.tools.progress import Stopped, StopRequest, TrainingLog
from paceline.tools.train.card import Record, make_record, write_card
from paceline.tools.train.drafts import (
    DistilledDraft,
    Draft,
    EagleDraft,
    MedusaDraft,
    add_lora,
    default_capture,
    merge_lora,
    widen,
)
from paceline.tools.train.layers import DraftVocabulary, LayerShape, most_frequent
from paceline.tools.train.plan import TrainPlan
from paceline.tools.train.saved_draft import WEIGHTS, load_draft, save_draft
from paceline.tools.train.target import Target, identity
from paceline.tools.train.text import TrainingText
from paceline.tools.train.text_files import TextFile
from paceline.tools.train.trainer import MAX_POINTS, LearningRate, Trainer, TrainStatus

CHECKPOINT = "checkpoint.pt"
EVALUATION_SHARE = 0.2
"""Most of the training time that evaluations during it take."""
CPU_NOTE = (
    "training on a CPU ({cores} cores): a useful draft takes minutes on a GPU and days here; expect some hundred tokens of "
    "text a second, and steps of many seconds. For a trial give --length 128 --rows 2. Ctrl-C saves; the same command resumes."
)


def train(
    plan: TrainPlan, command: str, clock: Clock, progress: TrainingLog, stop: StopRequest | None = None
) -> Record | None:
    """Train a draft. None if `stop` was requested before the end, and the same plan resumes. `command` is for the card."""
    plan.check()
    started = clock.now()
    if pick_device(plan.device).type == "cpu":
        progress.note(CPU_NOTE.format(cores=usable_cores()))
    is_trained = (plan.out / WEIGHTS).exists() and not (plan.out / CHECKPOINT).exists()
    is_continued = any(path is not None and path.resolve() == plan.out.resolve() for path in (plan.lora, plan.start))
    if is_trained and not is_continued:
        raise InvalidConfig(
            f"{plan.out} holds a trained draft: give another folder, or continue it with --start {plan.out}"
        )
    try:
        return _train(plan, command, clock, started, progress, stop or StopRequest())
    except Stopped:
        return None


def _train(
    plan: TrainPlan, command: str, clock: Clock, started: float, progress: TrainingLog, stop: StopRequest
) -> Record | None:
    checkpoint = open_checkpoint(plan.model)
    tokenizer = checkpoint.read_tokenizer()
    device = pick_device(plan.device)
    target = Target(checkpoint, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    target.check_length(plan.length)
    plan.out.mkdir(parents=True, exist_ok=True)
    target_identity = identity(target.name, tokenizer)

    source = TrainingText(plan, target, tokenizer, clock, progress, stop)
    text = source.text()
    evaluated = source.evaluated()
    trainer = _make_trainer(plan, target, target_identity, text, clock, progress)
    if plan.minutes is not None:
        _share_time(trainer, started + 60 * plan.minutes, evaluated is not None, clock, stop)
    progress.show(0.0, "first step")
    trainer.run(lambda status: _show(progress, status), stop)
    if not trainer.is_done:
        return None
    merge_lora(trainer.draft)
    save_draft(plan.out, trainer.draft, trainer.vocabulary, target, target_identity)
    progress.begin("evaluating")
    progress.show(0.0, "the saved draft")
    # The evaluation uses the saved draft: bfloat16, with scales and low-rank terms folded in.
    trainer.draft = load_draft(plan.out).draft.to(device)
    record = make_record(
        trainer,
        plan,
        text,
        held_out=trainer.evaluate(text.held_out),
        evaluated=None if evaluated is None else trainer.evaluate(evaluated),
        command=command,
    )
    write_card(plan.out, record, progress)
    (plan.out / CHECKPOINT).unlink(missing_ok=True)
    return record


def _make_trainer(
    plan: TrainPlan,
    target: Target,
    target_identity: dict[str, str],
    text: TextFile,
    clock: Clock,
    progress: TrainingLog,
) -> Trainer:
    """The trainer of the plan's draft. Its `run` resumes an interrupted training."""
    compiled = plan.compile and _compiles(target.device, progress)
    if compiled:
        target.compile_for((plan.rows, plan.length))
    torch.manual_seed(plan.seed)
    draft, vocabulary = make_draft(plan, target, target_identity, text.train.ids)
    trainer = Trainer(
        draft,
        target,
        vocabulary,
        replace(text.train, trained=text.train.answer),
        text.held_out,
        LearningRate(plan.learning_rate, plan.steps),
        rows=plan.rows,
        seed=plan.seed,
        checkpoint=plan.out / CHECKPOINT,
        clock=clock,
        compiled=compiled,
        is_fresh=plan.start is None and plan.lora is None,
    )
    progress.begin(f"training {plan.kind}")
    progress.note(f"{plan.kind}: {draft.num_parameters / 1e6:.2f} M parameters, {len(text.train):,} rows of text")
    if (plan.out / CHECKPOINT).exists():
        progress.note(f"resuming the interrupted training in {plan.out}")
    return trainer


def _share_time(trainer: Trainer, end: float, has_prompts: bool, clock: Clock, stop: StopRequest) -> None:
    """Divide the time until `end` between training and evaluation, after one evaluation that shows how long it takes."""
    before = clock.now()
    with stop.interruptible():
        trainer.evaluate(trainer.held_out)
    each = clock.now() - before
    left = max(1.0, end - clock.now() - (3 if has_prompts else 2) * each)
    points = MAX_POINTS if each == 0 else min(MAX_POINTS, int(EVALUATION_SHARE * left / each))
    trainer.set_time(left, points)


def make_draft(
    plan: TrainPlan, target: Target, target_identity: dict[str, str], text: torch.Tensor
) -> tuple[Draft, DraftVocabulary]:
    """The draft to train, which is new or the draft that the plan continues. Raises `IncompatibleDraft`."""
    trained = plan.lora or plan.start
    if trained is not None:
        saved = load_draft(trained)
        vocabulary_id = saved.config["target"]["vocabulary"]
        if saved.draft.kind != plan.kind or vocabulary_id != target_identity["vocabulary"]:
            raise IncompatibleDraft(
                f"{trained} is {saved.draft.kind!r} for {saved.config['target']['name']} (vocabulary {vocabulary_id}), "
                f"not {plan.kind!r} for {target_identity['name']} ({target_identity['vocabulary']})"
            )
        if plan.lora is not None:
            add_lora(saved.draft, plan.lora_rank)
            return saved.draft, saved.vocabulary
        if plan.ffn_size is not None and isinstance(saved.draft, EagleDraft | DistilledDraft):
            size = saved.draft.shape.ffn_size
            if plan.ffn_size < size:
                raise InvalidConfig(f"--ffn-size {plan.ffn_size} is below the {size} of {trained}: a draft only grows")
            saved.draft.shape = widen(saved.draft, saved.draft.shape, plan.ffn_size)
        if plan.draft_vocab is not None:
            return saved.draft, most_frequent(text, target.config.vocab_size, plan.draft_vocab)
        return saved.draft, saved.vocabulary
    shape = LayerShape.of(target.config)
    plain = replace(shape, heads=replace(shape.heads, has_bias=False, has_qk_norm=False))
    vocabulary = most_frequent(text, target.config.vocab_size, plan.draft_vocab)
    if plan.kind == "medusa":
        return MedusaDraft(shape.hidden_size, plan.medusa_heads), vocabulary
    if plan.kind == "eagle":
        wide = replace(plain, ffn_size=plan.ffn_size or shape.ffn_size)
        return EagleDraft(wide, default_capture(target.config.num_layers)), vocabulary
    narrow = replace(plain, ffn_size=plan.ffn_size or shape.ffn_size // 2)
    return DistilledDraft(narrow, plan.layers), vocabulary


def pick_device(name: str) -> torch.device:
    """`auto` is CUDA where there is a device."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise InvalidConfig("--device cuda: torch finds no CUDA device; give --device cpu")
    return torch.device(name)


def _compiles(device: torch.device, progress: TrainingLog) -> bool:
    try:
        torch.compile(lambda x: x + 1)(torch.zeros(4, device=device))
    except Exception as error:  # a missing compiler raises many types
        progress.note(f"not compiled: {str(error).splitlines()[0]}")
        return False
    return True


def _show(progress: TrainingLog, status: TrainStatus) -> None:
    agreement = " ".join(f"{share:.3f}" for share in status.agreement)
    progress.show(
        status.done, f"step {status.step}, {status.tokens:,} tokens, loss {status.loss:.3f}, agreement {agreement}"
    )
    if status.point is not None:
        alphas = " ".join(f"{alpha:.3f}" for alpha in status.point.alphas)
        progress.note(
            f"held out after {status.tokens:,} tokens: alpha {alphas}, tokens per round "
            f"{status.point.tokens_per_round:.3f} as a chain, {status.point.tree_tokens_per_round:.3f} as a tree"
        )
