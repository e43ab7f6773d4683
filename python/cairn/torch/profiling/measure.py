"""Measures the memory of a training step, stage by stage, without needing the memory of a plain step.

`MemoryPass` first runs the step under a memory meter (`step_recording.py`). Each block runs alone, and its saved
tensors are freed at once. The pass sets marks of the meter, and records which outputs of blocks exist at each mark.
Then `_evaluate` reads the memory at marks, and the peaks between them.

The step consists of *blocks* and *segments*. A segment is the code outside blocks: before the first block, between two
blocks, or after the last. Segment `i` comes before block `i`. `_evaluate` makes a `StageMeasure` of each *stage*: of
each block, and of each segment that needs memory of its own.

All sizes are in bytes. A *level* is the memory at a mark. A *rise* is a peak above a level. Many rises have two values:
one for a step that creates its gradients, and one for a step that adds to existing gradients (`accumulated`).
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Mapping, Sequence, Set

from ..base.layouts import bytes_of, without_other_holders
from ..base.stage_measure import IN_ATTRIBUTES, RETURNS_UNTRACKED, SIDE_OUTPUTS, SLACK_BYTES, StageMeasure
from ..base.stages import shown
from . import gradient_lifetimes
from .block_meter import peak_without
from .cast_copies import Copies
from .parameter_users import UsedByModel
from .step_recording import StepRecording
from .step_records import LOSS_BYTES, BlockRun, MemoryMark, Segment, StepMeasure, bytes_in, is_settled

Freed = list[tuple[int, int]]  # marks of the meter, and the bytes that are freed there


class MemoryPass(StepRecording):
    """Runs the step once, and computes the memory of each stage from the meter's readings."""

    def run(self) -> StepMeasure:
        """Run the step, and compute its stages."""
        self.record()
        return self._evaluate()

    def _evaluate(self) -> StepMeasure:
        for measured in self._runs:
            measured.block_meter.read()
            measured.arriving = [*measured.arriving, *measured.block_meter.side_output_gradients.layouts]
        self._find_main_inputs()
        for before, behind in zip(self._segments, self._runs, strict=False):
            if before.backward_begin is not None:
                input_grad_layouts = [layout for key, layout in behind.input_grad_layouts if key in behind.main]
                before.backward_begin.grads_bytes = bytes_of(input_grad_layouts)
        stages: list[StageMeasure] = []
        surroundings: list[StageMeasure | None] = []
        self._made_between = 0
        for index, segment in enumerate(self._segments):
            run = self._runs[index] if index < len(self._runs) else None
            main = run.main if run is not None else {}
            is_stage = self._is_stage(index, segment, main)
            surroundings.append(self._segment_stage(index, segment, main) if is_stage else None)
            stages += [stage for stage in surroundings[-1:] if stage is not None]
            if run is not None:
                self._finish_block(index, run)
                self._keep_untracked(run, self._runs[:index])
                stages.append(run.stage)
        self._count_rises_between(surroundings)
        self._count_pending_grads(surroundings)
        pinned: dict[str, int] = {}
        for run in self._runs:  # a block that runs twice has two outputs
            if size := bytes_in(run, run.pinned):
                output = f"output of {shown(run.stage.name)}"
                pinned[output] = pinned.get(output, 0) + size
        kept = self._kept_bytes + sum(run.block_meter.kept_bytes for run in self._runs)
        if left := kept + sum(run.left_bytes + run.stage.leftover_bytes for run in self._runs):
            pinned[SIDE_OUTPUTS] = left
        if (others := self._attribute_bytes - left) > SLACK_BYTES:
            pinned[IN_ATTRIBUTES] = others
        if self._made_between > SLACK_BYTES:
            pinned["made between blocks"] = self._made_between
        input_grad = self._runs[0].block_meter.grad_bytes(self._static) if self._runs and surroundings[0] is None else 0
        used = self._used_by_model()
        settled = all(map(is_settled, self._runs)) and used == self._parameter_users.used_by_model
        self._pass_layouts_on()
        arriving = {(run.stage.name, run.stage.call): run.arriving for run in self._runs}
        blocks = [run.stage for run in self._runs]
        excess, end_bytes = self._meter.excess, self._end_bytes()
        return StepMeasure(
            stages, pinned, blocks, input_grad, surroundings, arriving, settled, used, excess, end_bytes=end_bytes
        )

    def _end_bytes(self) -> int:
        end = self._segments[0].backward_end
        return self._meter.level(end.mark) if end is not None else 0

    def _used_by_model(self) -> UsedByModel:
        """The parameters of blocks that code outside of blocks uses, and those that their own blocks do not use."""
        places = {key: place for key, place in self._reached.items() if key not in self._left}
        unused = {(run.stage.name, run.stage.call, key) for run in self._runs for key in run.unused & places.keys()}
        return UsedByModel(places, unused)

    def _pass_layouts_on(self) -> None:
        """Predict the layouts of gradients for the next pass.

        A block in a residual stream returns its gradient in the layout in which it arrived. So the layout that arrives
        at such a block arrives at the block before it, too.
        """
        for before, run in zip(reversed(self._runs[:-1]), reversed(self._runs), strict=False):
            handed_on = run.block_meter.leaving == without_other_holders(run.block_meter.arriving)
            if before.chained_to and not is_settled(run) and handed_on:
                before.arriving = without_other_holders(run.arriving)

    def _find_main_inputs(self) -> None:
        """Find the inputs on the chain: those that no other block reads."""
        readers = collections.Counter(key for run in self._runs for key in run.inputs)
        for run in self._runs:
            run.main = {key: size for key, size in run.inputs.items() if readers[key] == 1}

    @functools.cached_property
    def _alive_at_backward(self) -> Set[int]:
        """The outputs of blocks that are alive when the backward begins."""
        begin = self._segments[-1].backward_begin
        return begin.outputs.keys() if begin is not None else set()

    @functools.cached_property
    def _pinned(self) -> set[int]:
        """The outputs of blocks that are resident to the end of the step."""
        return {key for run in self._runs for key in run.pinned}

    def _segment_bytes(self, moment: MemoryMark) -> int:
        """The level at a moment, without the outputs of blocks and the gradients that blocks get or return."""
        return self._meter.level(moment.mark) - moment.outputs_bytes - moment.grads_bytes

    def _growth(self, segment: Segment) -> int:
        """Bytes that the forward of a segment adds, less those of earlier tensors in attributes that it replaces."""
        begin, end = segment.begin, segment.end
        assert end is not None
        return self._segment_bytes(end) - self._segment_bytes(begin) - (end.replaced_bytes - begin.replaced_bytes)

    def _is_stage(self, index: int, segment: Segment, main: dict[int, int]) -> bool:
        """Whether a segment is a stage of its own. The one after the last block always is."""
        if index == len(self._runs):
            return True
        growth = self._growth(segment)
        if index and self._runs[index].chained:
            segment.saved_bytes = max(0, growth)
            self._made_between += segment.saved_bytes
            return False
        takes = growth > SLACK_BYTES or self._has_temporary_peak(index)
        return bool(index) or takes or not set(main) <= self._static

    def _has_temporary_peak(self, index: int) -> bool:
        """Whether the forward or backward of a segment has a peak above the levels before and after it."""
        segment = self._segments[index]
        ways: list[tuple[MemoryMark | None, MemoryMark | None]] = [(segment.begin, segment.end)]
        if not self._has_others_backward(index):
            ways.append((segment.backward_begin, segment.backward_end))
        there = [(first.mark, last.mark) for first, last in ways if first and last and first.mark <= last.mark]
        meter = self._meter
        return any(meter.peak(a, b) - max(meter.level(a), meter.level(b)) > SLACK_BYTES for a, b in there)

    def _has_others_backward(self, index: int) -> bool:
        """Whether the backward of a segment includes that of the next block's side outputs, which counts there."""
        return any(
            layout is not None
            for run in self._runs[index : index + 1]
            for layout in run.block_meter.side_output_gradients.layouts
        )

    def _segment_stage(self, index: int, segment: Segment, main: dict[int, int]) -> StageMeasure:
        """The stage of a segment. `main` has the bytes of the next block's inputs on the chain, by storage."""
        assert segment.end is not None
        stage = StageMeasure(self._segment_name(index), "outside", keep_reason="outside blocks")
        before = self._runs[index - 1 : index] if index else []
        new_bytes = sum(max(0, n - segment.replacing.get(key, 0)) for key, n in main.items() if key not in self._known)
        viewed = sum(
            bytes_in(run, run.viewed & self._unread_outputs(run)) for run in before
        )  # outputs of the block before, which the next block reads in addition to the segment's result
        growth = self._growth(segment)
        new_bytes = min(new_bytes, max(growth, 0))  # an input that existed before counts with the segment that made it
        stage.output_bytes = new_bytes + viewed
        copies = self._copies_of(stage, 2 * index)
        segment.saved_bytes, segment.freed_bytes = max(growth - copies.unsaved_bytes, new_bytes, 0), max(0, -growth)
        stage.saved_bytes = segment.saved_bytes + viewed
        left = sum(bytes_in(run, self._unread_outputs(run)) for run in before)  # counted here, not in the block
        self._read_segment_forward(index, segment, stage)
        stage.forward_rise_bytes += left
        stage.forward_only_rise_bytes = stage.forward_rise_bytes - stage.saved_bytes + stage.output_bytes
        if index < len(self._runs):
            stage.grad_bytes = self._runs[index].block_meter.grad_bytes(main)
        else:
            stage.held_bytes = sum(size for key, size in self._held.items() if key not in self._known)
            stage.output_bytes = stage.grad_bytes = LOSS_BYTES
        self._read_segment_backward(segment, stage)
        stage.saved_bytes += sum(
            bytes_in(run, self._unread_outputs(run) & (self._alive_at_backward - run.viewed)) for run in before
        )
        return stage

    def _copies_of(self, stage: StageMeasure, place: int) -> Copies:
        """The copies of parameters that autocast makes in a stage."""
        copies = self._copies[place] if place < len(self._copies) else Copies()
        stage.made_copies, stage.saved_copies = copies.sizes, copies.saved
        return copies

    def _unread_outputs(self, run: BlockRun) -> set[int]:
        """The outputs of a block that no block reads, only the segment after it, which may hold or return them.

        An output that the block saves itself counts only if nothing else holds it.
        """
        if run.chained_to:
            return set()
        return {ref.key for ref in run.outputs if ref.key in run.new_outputs} - run.pinned - self._also_held(run)

    def _also_held(self, run: BlockRun) -> set[int]:
        """The outputs that the block saves itself, and that the next segment holds or returns."""
        return run.saved_outputs & (self._alive_at_backward | run.viewed)

    def _read_segment_forward(self, index: int, segment: Segment, stage: StageMeasure) -> None:
        """Read the peak of a segment's forward above the level of the chain at its beginning.

        The level of the chain counts these outputs of earlier blocks:

        * Outputs that the model's own code holds, such as hidden states in a list (`listed`).
        * The output of the block before. A schedule that keeps it keeps it to the end. The input of that block is
          mostly freed at once, because the caller assigns the output to the same name.
        * Outputs that are resident to the end of the step. In a step, blocks save them. In this pass, blocks save
          nothing, so such outputs may be freed; `_freed_resident_bytes` adds them.
        """
        begin, end, returned = segment.begin, segment.end, segment.returned
        assert end is not None
        meter, middle = self._meter, returned or end
        stage.listed, level = self._held_outputs(index, segment)
        missing = self._freed_resident_bytes(begin, begin, middle)
        stage.forward_rise_bytes = meter.peak(begin.mark, middle.mark) - level + missing
        if returned is not None:
            missing = self._freed_resident_bytes(begin, returned, end)
            rest = meter.peak(returned.mark, end.mark) - level + missing + sum(stage.listed.values())
            stage.listed_slack_bytes = max(0, rest - stage.forward_rise_bytes)
            stage.forward_rise_bytes = max(rest, stage.forward_rise_bytes)

    def _held_outputs(self, index: int, segment: Segment) -> tuple[dict[str, int], int]:
        """The outputs that the model's own code holds at a segment's peak, and the level of the chain at its beginning.

        The outputs are bytes by the block that made them.
        """
        begin, middle = segment.begin, segment.returned or segment.end
        assert middle is not None
        just_made = {ref.key for run in self._runs[index - 1 : index] for ref in run.outputs}
        there = {key: size for key, size in begin.outputs.items() if key not in just_made}
        stays = {key for key in there if key in middle.outputs or self._is_at_peak(key, begin.mark, middle.mark)}
        listed, others = self._passing(there, there.keys() - stays)
        return listed, self._meter.level(begin.mark) - others

    def _passing(self, there: Mapping[int, int], gone: Set[int] = frozenset()) -> tuple[dict[str, int], int]:
        """Sort the outputs of earlier blocks that are freed before the backward begins. Returns two results.

        The first has the outputs that a plan counts with the block that made them (`_makers`): bytes by block. The
        second is the bytes of the others, and of the outputs in `gone`, which are freed too early to count.
        """
        listed: dict[str, int] = {}
        others = 0
        for key, size in there.items():
            if key in self._makers and key not in gone:
                listed[self._makers[key]] = listed.get(self._makers[key], 0) + size
            elif key not in self._alive_at_backward and key not in self._pinned:
                others += size
        return listed, others

    def _freed_resident_bytes(self, begin: MemoryMark, first: MemoryMark, last: MemoryMark) -> int:
        """Bytes of resident outputs that are alive at `begin`, but freed before the peak between two moments."""
        gone = begin.outputs.keys() & self._pinned - last.outputs.keys()
        return sum(begin.outputs[key] for key in gone if not self._is_at_peak(key, first.mark, last.mark))

    def _is_at_peak(self, key: int, first: int, last: int) -> bool:
        """Whether an output that is freed between two marks is still alive at the peak between them."""
        gone = self._gone.get(key, first)
        return first < gone <= last and self._meter.peak(first, gone) == self._meter.peak(first, last)

    @functools.cached_property
    def _makers(self) -> dict[int, str]:
        """The block of each output that is freed before the backward begins, but counts as saved by its block."""
        makers: dict[int, str] = {}
        for run in self._runs:
            left = run.new_outputs - run.unread if run.chained_to else run.new_outputs & run.saved_outputs
            makers |= dict.fromkeys(
                left - self._alive_at_backward - self._pinned, shown(run.stage.name, run.stage.call)
            )
        return makers

    def _read_segment_backward(self, segment: Segment, stage: StageMeasure) -> None:
        begin, end, meter = segment.backward_begin, segment.backward_end, self._meter
        if begin is None or end is None or end.mark < begin.mark:
            return
        base = self._segment_bytes(begin) + begin.outputs_bytes + stage.grad_bytes + segment.freed_bytes
        created, accumulated = self._freed_gradients(begin, end)
        saved = {key for run in self._runs for key in run.saved_outputs}
        gone = [(self._gone.get(key, 0), -size) for key, size in begin.outputs.items() if key in saved]
        stays = [(mark, size) for mark, size in gone if begin.mark < mark <= end.mark]  # a kept block holds them
        stage.backward_rise_bytes = peak_without(meter, begin.mark, end.mark, sorted([*created, *stays])) - base
        rise = peak_without(meter, begin.mark, end.mark, sorted([*accumulated, *stays])) - base
        stage.accumulated_backward_rise_bytes = rise

    def _count_rises_between(self, surroundings: Sequence[StageMeasure | None]) -> None:
        """Count the peaks of those segments between two blocks that are no stages of their own.

        The forward peak counts with the block after the segment, and the backward peak with the block before it. The
        tensors that such segments make count as resident during the whole step.
        """
        made_bytes = 0  # by this segment and those after it
        for index in reversed(range(len(self._runs))):
            if surroundings[index] is None:
                made_bytes += self._segments[index].saved_bytes
                self._count_forward_between(index, made_bytes)
                if index:
                    self._count_backward_between(index, made_bytes)

    def _count_forward_between(self, index: int, made_bytes: int) -> None:
        segment, behind, meter = self._segments[index], self._runs[index].stage, self._meter
        assert segment.end is not None
        peak = meter.peak(segment.begin.mark, segment.end.mark)
        if peak <= meter.level(segment.begin.mark):  # this level includes the input of the block before, freed at once
            return
        listed, level = self._held_outputs(index, segment)
        gone = sum(size for name, size in listed.items() if name not in behind.listed)
        behind.between_forward_rise_bytes = max(0, peak - level - made_bytes + gone)

    def _count_backward_between(self, index: int, made_bytes: int) -> None:
        """Read the peak of a segment's backward above the level at which the backward of the block before begins.

        The chain counts that block's output at this level. In this pass the output has been freed by then, unless the
        block holds it itself.
        """
        segment, run, meter = self._segments[index], self._runs[index - 1], self._meter
        before, gone = run.stage, bytes_in(run, run.new_outputs - run.held_outputs - run.pinned - run.unread)
        begin, end = segment.backward_begin, segment.backward_end
        if begin is None or end is None or end.mark < begin.mark or self._has_others_backward(index):
            return
        created, accumulated = self._freed_gradients(begin, end)
        rise, rise_adding = (
            peak_without(meter, begin.mark, end.mark, going) - (meter.level(end.mark) - sum(size for _, size in going))
            for going in (created, accumulated)
        )
        before.between_backward_rise_bytes = max(0, rise - made_bytes - gone)
        before.accumulated_between_backward_rise_bytes = max(0, rise_adding - made_bytes - gone)

    def _count_pending_grads(self, surroundings: Sequence[StageMeasure | None]) -> None:
        """Count gradients that wait for others: a value with two readers gets two gradients, one after the other.

        A segment that is no stage counts with the block after it. The whole (not sharded) gradients of a sharded block
        wait, too: in a step, they are reduced while the backward of the block before runs. In this pass nothing is
        reduced, so `reducing_bytes` stand for them.
        """
        changes: list[tuple[StageMeasure, int, int]] = []
        for index, (segment, outside) in enumerate(zip(self._segments, surroundings, strict=True)):
            created, accumulated = self._change_of(segment)
            if outside is not None:
                changes.append((outside, created, accumulated))
                created = accumulated = 0
            if index < len(self._runs):
                reduced = sum(run.reducing_bytes for run in self._runs[index + 1 : index + 2])
                own = self._change_at(index) + self._runs[index].reducing_bytes - reduced
                waits = self._runs[index].accumulated_change
                changes.append((self._runs[index].stage, created + own, accumulated + own + waits))
        gradient_lifetimes.count(*zip(*changes, strict=True))

    def _change_of(self, segment: Segment) -> tuple[int, int]:
        """By how much the backward of a segment changes the memory outside blocks, tensors that it saved left out.

        Two numbers: for a step that creates its gradients, and for one that adds to existing ones.
        """
        begin, end = segment.backward_begin, segment.backward_end
        if begin is None or end is None or end.mark < begin.mark:
            return 0, 0
        change = self._segment_bytes(end) - self._segment_bytes(begin) + segment.saved_bytes - segment.freed_bytes
        created, accumulated = self._freed_gradients(begin, end)
        return change - sum(size for _, size in created), change - sum(size for _, size in accumulated)

    def _freed_gradients(self, begin: MemoryMark, end: MemoryMark) -> tuple[Freed, Freed]:
        """Gradients that a step frees between two moments of its backward. This pass keeps them to its end.

        Two lists of marks and bytes: for a step that creates its gradients, and for one that adds to existing ones.
        """
        added = [addition for addition in self._added if begin.mark < addition[0] <= end.mark]
        gone = [pair for pair in self._created.gone if begin.mark < pair[0] <= end.mark]
        return [(mark, size) for mark, size, _ in added], sorted([*gone, *((mark, size) for mark, _, size in added)])

    def _change_at(self, index: int) -> int:
        """By how much the backward of a block changes the memory outside blocks.

        The change consists of gradients that arrived and wait for others, and of gradients of inputs off the chain.
        """
        before, after = self._segments[index].backward_begin, self._segments[index + 1].backward_end
        if before is None or after is None:
            return 0
        return self._segment_bytes(before) - self._segment_bytes(after)

    def _segment_name(self, index: int) -> str:
        if not self._runs:
            return "the model"
        if index == 0:
            return f"before {shown(self._runs[0].stage.name)}"
        if index == len(self._runs):
            return f"after {shown(self._runs[-1].stage.name)}"
        return f"between {shown(self._runs[index - 1].stage.name)} and {shown(self._runs[index].stage.name)}"

    def _finish_block(self, index: int, run: BlockRun) -> None:
        """Correct the measure of a block that ran alone by its surroundings in the step.

        Outputs that are resident in any case, and outputs that count with the segment after the block, are taken out of
        the bytes that keeping or dropping the block decides about.
        """
        stage = run.stage
        self._copies_of(stage, 2 * index + 1)
        stage.input_bytes = sum(run.inputs.values())
        stage.listed, held = self._passing(run.alive)
        stage.forward_rise_bytes += held
        stage.forward_only_rise_bytes += held
        # Outputs that the chain neither keeps nor drops:
        apart, left = (run.pinned | run.unread) & run.new_outputs, self._unread_outputs(run)
        if apart or (run.is_held and run.saved_outputs):
            stage.offloadable_bytes, stage.output_is_offloadable = 0, False
        elif run.is_held:  # the rest can be offloaded
            stage.output_is_held, stage.output_is_offloadable = True, False
            stage.offloadable_bytes = max(0, stage.offloadable_bytes - stage.output_bytes)
        elif left:
            gone = bytes_in(run, left - run.saved_outputs)
            stage.offloadable_bytes, stage.output_is_offloadable = max(0, stage.offloadable_bytes - gone), False
        stage.output_bytes -= bytes_in(run, apart | left)
        stage.pinned_bytes = bytes_in(run, run.pinned & run.new_outputs)
        stage.pinned_saved_bytes = bytes_in(run, run.pinned & run.new_outputs & run.saved_outputs)
        stage.left_bytes = bytes_in(run, left - apart)
        stage.left_saved_bytes = bytes_in(run, (left - apart) & run.saved_outputs)
        not_saved = bytes_in(run, (apart | left) - run.saved_outputs)  # freed before the backward was measured
        stage.saved_bytes -= not_saved
        stage.backward_rise_bytes += not_saved
        stage.accumulated_backward_rise_bytes += not_saved
        if stays := run.left_bytes + stage.leftover_bytes:
            # side outputs are resident: new ones replace those of the last step, and offloading does not free them
            stage.saved_bytes = max(stage.saved_bytes - (stays - stage.added_bytes), stage.output_bytes)
            stage.offloadable_bytes = 0
        if run.replaced_bytes:
            stage.saved_bytes += run.replaced_bytes
            stage.offloadable_bytes = 0
        if not run.chained_to:
            stage.also_held_bytes = bytes_in(run, (self._also_held(run) & run.new_outputs) - run.pinned)
        else:
            stage.grad_bytes = self._arriving_at(run, self._runs[index + 1])
            stage.passing_bytes = bytes_in(run, {key for key in run.new_outputs - apart if self._passes(index, key)})
        if run.arrived is None:
            stage.keep("has no part in the loss")

    def _passes(self, index: int, key: int) -> bool:
        """Whether an output is freed before the backward, because neither its block nor the next one holds it."""
        run, following = self._runs[index], self._runs[index + 1].block_meter
        return key in self._makers and key not in run.held_outputs | following.held_inputs

    @staticmethod
    def _arriving_at(run: BlockRun, following: BlockRun) -> int:
        """Bytes of the gradients that a block gets.

        The gradients of outputs that the next block reads have the size in which that block returns them. Those of
        other outputs have the size that they had in the step.
        """
        read = {ref.key for ref in run.outputs if ref.key in following.main}
        others = bytes_in(run, {ref.key for ref in run.outputs} - read)
        chained = following.block_meter.grad_bytes(read)
        return max(chained, min(run.stage.grad_bytes, chained + others))

    def _keep_untracked(self, run: BlockRun, before: Sequence[BlockRun]) -> None:
        """Mark blocks as kept if a later block holds their output outside autograd: no plan can drop or offload it."""
        for earlier in before:
            if bytes_in(earlier, run.block_meter.untracked):
                earlier.stage.keep(RETURNS_UNTRACKED)
                earlier.stage.offloadable_bytes, earlier.stage.output_is_offloadable = 0, False
