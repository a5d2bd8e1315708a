"""Decides what the next graph step computes, and when the host submits it.

`GraphScheduler` schedules a token of every slot, its drafts, and prompts in the same pass. `SubmitPacer` delays the submit for
as long as the device allows, so that requests that arrive meanwhile are in the step.
"""

from collections import deque
from collections.abc import Collection, Hashable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from paceline.core.sequence import BLOCK_SIZE, Sequence
from paceline.engine import Scheduler, Speculator
from paceline.engine.graph.batch import IN_FLIGHT, GraphBatch
from paceline.engine.graph.batches import GraphBatches
from paceline.engine.graph.chain_drafter import ChainDrafter
from paceline.engine.graph.drafter import NO_DRAFTS, DraftShape
from paceline.engine.graph.eligibility import GraphEligibility
from paceline.engine.graph.inflight import InflightStep
from paceline.engine.graph.mixed import InflightMixed
from paceline.engine.graph.slots import SlotTable
from paceline.engine.step.step import HostReason, Schedule, needs_logits
from paceline.policy.depth.probing import SEQUENCES as PROBED
from paceline.policy.depth.prompt_load import MANY_ROWS, may_draft_with_prompts
from paceline.policy.step import padded_size, prompt_budget
from paceline.requests import RequestValidator


@dataclass(frozen=True, slots=True)
class GraphSchedule(Schedule):
    """One committed token of every slot, with drafts of one shape. `items` are the prompts computed in the same pass."""

    shape: DraftShape = NO_DRAFTS
    num_ahead: int = 1
    """Tokens by which a sequence may have grown when the step ends, steps in flight included."""
    catching_up: tuple[Sequence, ...] = ()
    """Sequences in slots whose draft prefill runs at the same time as the step. They draft from the next step on."""


class GraphScheduler:
    """Schedules steps of the sequences in the slots, behind the steps in flight."""

    def __init__(
        self,
        scheduler: Scheduler,
        speculator: Speculator,
        eligibility: GraphEligibility,
        slots: SlotTable,
        batches: GraphBatches,
        inflight: Collection[InflightStep | InflightMixed],
        validator: RequestValidator,
    ) -> None:
        self._scheduler, self._speculator, self._eligibility = scheduler, speculator, eligibility
        self._slots, self._batches, self._inflight = slots, batches, inflight
        self._validator = validator

    def schedule(self, can_prefill: bool) -> GraphSchedule | HostReason:
        """The next step, with its blocks reserved, or the reason why the host executor has to take it. `can_prefill` is true if
        the step may compute prompts too."""
        has_prompts = self._has_prompts
        prompt_rows = self._prompt_rows if has_prompts else 0
        if has_prompts and not (can_prefill and self._can_join_batch):
            reason = self.host_prefill_reason(self._num_prompts)
            if reason is not None:
                return reason
            has_prompts = False  # they wait
        decoding = self._schedule_decoding(has_prompts, prompt_rows)
        if isinstance(decoding, HostReason) or not has_prompts:
            return decoding
        return self._schedule_prompts(decoding, prompt_rows)

    @property
    def may_all_end(self) -> bool:
        """Whether the step in flight may give every sequence its last token, and no prompt waits: a step behind it would most
        likely be for nothing, and the next request would wait for it."""
        num_tokens = self._num_inflight_tokens
        if not num_tokens or self._has_prompts:
            return False
        return all(self._validator.remaining(sequence) <= num_tokens for sequence in self._slots.members())

    def load_reason(self, decoding: Seq[Sequence], can_prefill: bool) -> HostReason | None:
        """Why the running sequences that decode cannot be loaded into the slots, which are empty. None if they can."""
        if not decoding:
            return HostReason.PREFILL
        if self._eligibility.draft_on_host(decoding):
            return HostReason.PROPOSER
        if can_prefill and (self._batches.can_join or not any(sequence.depth for sequence in decoding)):
            return None
        return self.host_prefill_reason(len(self._scheduler.running) - len(decoding))

    def host_prefill_reason(self, num_prompts: int) -> HostReason | None:
        """Why the host computes prompts now. None if there are no prompts, or if they wait. `num_prompts` is the number of
        sequences that have begun their prompts."""
        if num_prompts:
            return HostReason.PREFILL
        return HostReason.ADMISSION if self._eligibility.admits() else None

    @property
    def _num_prompts(self) -> int:
        """Running sequences with prompt tokens to submit."""
        inflight = self.inflight_prompts
        return sum(
            [sequence not in self._slots and sequence.id not in inflight for sequence in self._scheduler.running]
        )

    @property
    def _has_prompts(self) -> bool:
        return self._scheduler.may_admit or self._num_prompts > 0

    @property
    def _prompt_rows(self) -> int:
        """Prompt tokens of sequences that wait, or that have none in flight."""
        return self._scheduler.prompt_rows(self.inflight_prompts)

    @property
    def _can_join_batch(self) -> bool:
        """Whether sequences can join without the host: what drafts can take them over, or nothing drafts."""
        drafter = self._batches.current.drafter
        if drafter is None or self._batches.can_join:
            return True
        return drafter.is_idle and not any(sequence.depth for sequence in self._slots.members())

    @property
    def _chunk_rows(self) -> int:
        """Prompt tokens of sequences with a chunk in flight that does not complete the prompt, this chunk included."""
        inflight = self.inflight_prompts
        if not inflight:
            return 0
        running = self._scheduler.running
        return sum(
            [sequence.num_uncomputed for sequence in running if sequence.id in inflight and sequence not in self._slots]
        )

    def _schedule_prompts(self, decoding: GraphSchedule, prompt_rows: int) -> GraphSchedule | HostReason:
        """Adds prompts to `decoding`, or returns why the host has to take the step. `prompt_rows` is the number of prompt
        tokens that wait."""
        scheduler, num_decoding = self._scheduler, self._slots.num_used
        rows = num_decoding * (1 + decoding.shape.nodes)
        budget = min(prompt_budget(num_decoding, prompt_rows), scheduler.max_batched_tokens - rows)
        prompts = scheduler.schedule_prompts(budget, self._can_join)
        if prompts:
            return replace(decoding, items=prompts)
        # Without a sequence that needs the host, the first waits for blocks or for a prompt in flight
        return (self.host_prefill_reason(0) if scheduler.barred is not None else None) or decoding

    def _can_join(self, sequence: Sequence) -> bool:
        if sequence in self._slots or sequence.id in self.inflight_prompts:
            return False
        return self._eligibility.reason((sequence,)) is None

    def _schedule_decoding(self, has_prompts: bool, prompt_rows: int) -> GraphSchedule | HostReason:
        """Decide the depths, choose the draft shape and reserve the target's blocks for the step. `prompt_rows` is the number
        of prompt tokens that wait. `has_prompts` is true if the step computes some of them."""
        members, rows_in_step = self._slots.members(), prompt_rows if has_prompts else 0
        if may_draft_with_prompts(rows_in_step, len(members)):
            self._speculator.decide(members, prompt_rows + self._chunk_rows)
        else:
            self._speculator.skip(members)
        self._eligibility.skip_rejection(members)
        if self._eligibility.draft_on_host(members):
            return HostReason.PROPOSER
        batch = self._batches.current
        most_rows = self._batches.max_rows(batch.size)
        if has_prompts:  # drafts leave them half a pass
            most_rows = min(most_rows, self._scheduler.max_batched_tokens // 2)
        drafter, most = batch.drafter, max(0, most_rows // batch.size - 1)
        for sequence in members:  # the host could not draft for it either: the batch stays in the graph
            if sequence.depth and drafter is not None and not drafter.has_room(sequence):
                sequence.depth = 0
        depth = min(most, max([sequence.depth for sequence in members]))
        catching_up: tuple[Sequence, ...] = ()
        if depth > 0 and (drafter is None or not drafter.can_draft(members)):
            if isinstance(drafter, ChainDrafter) and len(self._inflight) < IN_FLIGHT:
                catching_up = drafter.next_behind(members) if rows_in_step < MANY_ROWS else ()
                depth = min(depth, self._wait_for_drafts(drafter, members))
            elif not has_prompts or self._eligibility.can_continue(self._scheduler.running):
                return HostReason.DRAFT_BEHIND
            else:  # many prompts wait: the host would have no room for drafts in its next steps
                for sequence in members:
                    sequence.depth = 0
                depth = 0
        if depth > 0 and self.is_for_few(members):
            return HostReason.FEW_DRAFTS
        shape = self._shape(batch, depth, most)
        # A step computes its nodes, and commits a path of them and one token more
        num_ahead = self._num_inflight_tokens + shape.nodes + 1
        reason = self._reserve(members, num_ahead)
        return GraphSchedule((), (), shape, num_ahead, catching_up) if reason is None else reason

    def _wait_for_drafts(self, drafter: ChainDrafter, members: Seq[Sequence]) -> int:
        """Let the sequences without an up-to-date draft decode plainly, or all sequences if most have none. Returns the depth
        of the sequences that draft."""
        behind = drafter.behind(members)
        drafting = [sequence for sequence in members if sequence.depth]
        for sequence in behind if 2 * len(behind) <= len(drafting) else drafting:
            sequence.depth = 0
        return max([sequence.depth for sequence in members])

    def _shape(self, batch: GraphBatch, depth: int, most: int) -> DraftShape:
        """The shape for drafts of `depth` tokens, with up to `most` nodes."""
        drafter = batch.drafter
        # The next larger shape may have too many rows for a pass
        shapes = [drafter.shape(less) for less in range(depth, 0, -1)] if drafter else []
        return next((shape for shape in shapes if shape.nodes <= most), NO_DRAFTS)

    @property
    def inflight_prompts(self) -> set[int]:
        """Sequences of which prompt tokens are in flight."""
        return {sequence_id for step in self._inflight for sequence_id in step.prompt_ids}

    @property
    def _num_inflight_tokens(self) -> int:
        """Tokens by which the steps in flight may extend a sequence."""
        return sum(step.max_tokens for step in self._inflight)

    def _reserve(self, members: Seq[Sequence], num_ahead: int) -> HostReason | None:
        """Reserve the target's blocks for `num_ahead` more tokens of every sequence."""
        lengths = [len(sequence.ids) for sequence in members]
        if max(lengths, default=0) + num_ahead > self._validator.limits.max_model_len:
            return HostReason.WINDOW
        grow = self._scheduler.tables.grow
        for slot, blocks in enumerate(self._slots.blocks):
            sequence = self._slots.sequences[slot]
            if sequence is not None:
                num_tokens = len(sequence.ids) + num_ahead
                if num_tokens > len(blocks) * BLOCK_SIZE and not grow(sequence.id, num_tokens):
                    return HostReason.BLOCKS
        return None

    def postpone_drafts(self) -> None:
        """Before a step of the host that only prefills: no sequence drafts in it. The graph drafts cheaper, and it measures
        what drafting costs."""
        running = self._scheduler.running
        decoding = [sequence for sequence in running if sequence.num_uncomputed == 1]
        if self._eligibility.draft_on_host(decoding):
            return
        if self._eligibility.can_continue(running) and not self.is_for_few(decoding):
            for sequence in decoding:
                sequence.depth = 0

    def is_for_few(self, decoding: Seq[Sequence]) -> bool:
        """Whether the ragged pass of the host is cheaper: a graph step has as many rows for every slot as for the deepest
        draft. A probe of one node stays in the graph: twice the rows cost less than leaving it. The host is slower where it has
        to modify logits or return them."""
        depths = [sequence.depth for sequence in decoding if sequence.depth]
        if not depths or 2 * sum(depths) >= max(depths) * len(decoding) or any(map(needs_logits, decoding)):
            return False
        drafter = self._batches.of(padded_size(len(decoding))).drafter
        is_small = drafter is not None and drafter.shape(max(depths)).nodes == 1
        return not (is_small and len(depths) <= PROBED)


RECENT_STEPS = 8
"""Steps of one kind whose shortest time is expected of the next one."""
RECENT_SUBMITS = 32
"""Submits whose longest time is expected of the next one."""
LEAD_SHARE = 0.3
"""Least part of the running step that is left when the next one is submitted: a step may be shorter than expected."""
LEAD_SECONDS = 0.0005
"""The same in seconds, in addition to the time of a submit."""


class SubmitPacer:
    """Learns how long steps take on the device and how long the host needs to submit one.

    If a step is submitted as soon as its predecessor has started, a request that arrives then waits for the two steps. A step
    that is submitted just before the device needs it computes the request too.
    """

    def __init__(self) -> None:
        self._steps: dict[Hashable, deque[float]] = {}
        self._submits = {has_prompts: deque[float](maxlen=RECENT_SUBMITS) for has_prompts in (False, True)}

    def observe_step(self, kind: Hashable, seconds: float) -> None:
        """A step of this kind took `seconds` on the device. Steps of one kind take about the same time."""
        self._steps.setdefault(kind, deque(maxlen=RECENT_STEPS)).append(seconds)

    def observe_submit(self, has_prompts: bool, seconds: float) -> None:
        """The host needed `seconds` to schedule and submit a step."""
        self._submits[has_prompts].append(seconds)

    def seconds_to_spare(self, kind: Hashable, running_for: float, has_prompts: bool) -> float:
        """How long the host can wait before it submits the next step, with prompts or without, while a step of this kind has
        run for `running_for` seconds. 0 while either is not known."""
        steps, submits = self._steps.get(kind), self._submits[has_prompts]
        if not steps or not submits:
            return 0.0
        expected = min(steps)
        lead = max(LEAD_SHARE * expected, max(submits) + LEAD_SECONDS)
        return max(0.0, expected - lead - running_for)
