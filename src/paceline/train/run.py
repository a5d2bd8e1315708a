"""One training from end to end: text, draft, loop, folder, card."""

from collections.abc import Callable
from dataclasses import replace

import torch

from paceline.core.clock import Clock
from paceline.core.errors import IncompatibleDraft, InvalidConfig
from paceline.models.loading.load import open_checkpoint
from paceline.train.card import Record, record_of, write_card
from paceline.train.data.material import Material
from paceline.train.drafts.distilled import DistilledDraft
from paceline.train.drafts.draft import Draft
from paceline.train.drafts.eagle import EagleDraft, default_capture
from paceline.train.drafts.lora import add_lora, merge_lora
from paceline.train.drafts.medusa import MedusaDraft
from paceline.train.drafts.reduced_vocab import DraftVocabulary, most_frequent
from paceline.train.drafts.target import Target, identity, layer_shape
from paceline.train.folder import WEIGHTS, load_draft, save_draft
from paceline.train.interrupt import Stopped
from paceline.train.plan import TrainPlan
from paceline.train.progress import Progress
from paceline.train.schedule import Schedule
from paceline.train.trainer import Look, Trainer

CHECKPOINT = "checkpoint.pt"


def train(
    plan: TrainPlan, command: str, clock: Clock, progress: Progress, stop: Callable[[], bool] = lambda: False
) -> Record | None:
    """None when `stop` said so before the end: the same plan goes on from there. `command` is for the card."""
    plan.check()
    is_trained = (plan.out / WEIGHTS).exists() and not (plan.out / CHECKPOINT).exists()
    goes_on = any(path is not None and path.resolve() == plan.out.resolve() for path in (plan.lora, plan.start))
    if is_trained and not goes_on:
        raise InvalidConfig(
            f"{plan.out} holds a trained draft: name another folder, or train it on with --start {plan.out}"
        )
    try:
        return _train(plan, command, clock, progress, stop)
    except Stopped:
        return None


def _train(plan: TrainPlan, command: str, clock: Clock, progress: Progress, stop: Callable[[], bool]) -> Record | None:
    schedule = Schedule(plan.learning_rate, plan.steps, None if plan.minutes is None else 60 * plan.minutes)
    checkpoint = open_checkpoint(plan.model)
    tokenizer = checkpoint.read_tokenizer()
    device = _device(plan.device)
    target = Target(checkpoint, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    target.check_length(plan.length)
    plan.out.mkdir(parents=True, exist_ok=True)
    whose = identity(target.name, tokenizer)

    material = Material(plan, target, tokenizer, clock, progress, stop)
    text = material.text()
    judged = material.judged()
    compiled = plan.compile and _compiles(device, progress)
    if compiled:
        target.compile_for((plan.rows, plan.length))
    torch.manual_seed(plan.seed)
    draft, vocabulary = _draft(plan, target, whose, text.train.ids)
    trainer = Trainer(
        draft,
        target,
        vocabulary,
        text.train,
        text.held_out,
        schedule,
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
        progress.note(f"going on with the training that was interrupted in {plan.out}")
    trainer.run(lambda look: _show(progress, look), stop)
    if not trainer.is_done:
        return None
    merge_lora(draft)
    save_draft(plan.out, draft, vocabulary, target, whose)
    # What is judged is what was saved: bfloat16, scales and additions folded in.
    trainer.draft = load_draft(plan.out).draft.to(device)
    record = record_of(
        trainer,
        plan,
        text,
        held_out=trainer.evaluate(text.held_out),
        judged=None if judged is None else trainer.evaluate(judged),
        command=command,
    )
    write_card(plan.out, record, progress)
    (plan.out / CHECKPOINT).unlink(missing_ok=True)
    return record


def _draft(plan: TrainPlan, target: Target, whose: dict[str, str], text: torch.Tensor) -> tuple[Draft, DraftVocabulary]:
    known = plan.lora or plan.start
    if known is not None:
        saved = load_draft(known)
        theirs = saved.config["target"]["vocabulary"]
        if saved.draft.kind != plan.kind or theirs != whose["vocabulary"]:
            raise IncompatibleDraft(
                f"{known} is {saved.draft.kind!r} for {saved.config['target']['name']} (vocabulary {theirs}), "
                f"asked for is {plan.kind!r} for {whose['name']} ({whose['vocabulary']})"
            )
        if plan.lora is not None:
            add_lora(saved.draft, plan.lora_rank)
        return saved.draft, saved.vocabulary
    shape = layer_shape(target.config)
    plain = replace(shape, attention_bias=False, qk_norm=False)
    vocabulary = most_frequent(text, target.config.vocab_size, plan.draft_vocab)
    if plan.kind == "medusa":
        return MedusaDraft(shape.hidden_size, plan.medusa_heads), vocabulary
    if plan.kind == "eagle":
        wide = replace(plain, ffn_size=plan.ffn_size or shape.ffn_size)
        return EagleDraft(wide, default_capture(target.config.num_layers)), vocabulary
    narrow = replace(plain, ffn_size=plan.ffn_size or shape.ffn_size // 2)
    return DistilledDraft(narrow, plan.layers), vocabulary


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise InvalidConfig("--device cuda: torch sees no CUDA device here; give --device cpu")
    return torch.device(name)


def _compiles(device: torch.device, progress: Progress) -> bool:
    try:
        torch.compile(lambda x: x + 1)(torch.zeros(4, device=device))
    except Exception as error:  # whatever its tools say is missing
        progress.note(f"not compiled: {str(error).splitlines()[0]}")
        return False
    return True


def _show(progress: Progress, look: Look) -> None:
    agreement = " ".join(f"{share:.3f}" for share in look.agreement)
    progress.show(look.done, f"step {look.step}, {look.tokens:,} tokens, loss {look.loss:.3f}, agree {agreement}")
    if look.point is not None:
        alphas = " ".join(f"{alpha:.3f}" for alpha in look.point.alphas)
        progress.note(
            f"held out after {look.tokens:,} tokens: alpha {alphas}, tokens a round "
            f"{look.point.tokens_a_round:.3f} as a chain, {look.point.tree_tokens_a_round:.3f} as a tree"
        )
