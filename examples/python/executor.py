"""An executor in plain Python: replays a schedule on real values, and counts the memory that it holds.

The model is y = tanh(w * tanh(w * ... x)) with vectors as lists: a[l] = tanh(w[l] * a[l-1]). A stage saves its output
and its pre-activation. The gradients must be those of storing everything, to the bit, and the memory that is counted
must be what the simulator said.
"""

import math
import random

import cairn

NUMBER_BYTES = 8
WIDTH = 32
STAGES = 20
VECTOR_BYTES = WIDTH * NUMBER_BYTES

Vector = list[float]


class Executor:
    """Does what the operations of a verified chain schedule say. Values are named as in the format: a, A and d."""

    def __init__(self, weights: Vector, x: Vector) -> None:
        self.weights = [0.0, *weights]  # w[1] is the first stage's
        self.outputs: dict[int, Vector] = {0: x}  # a[l]
        self.saved: dict[int, tuple[Vector, Vector]] = {}  # A[l]: pre-activation and output
        self.grads: dict[int, Vector] = {STAGES: [1.0] * WIDTH}  # d[l]
        self.weight_grads: dict[int, float] = {}
        self.forwards = 0
        self.peak_bytes = 0

    def run(self, verified: cairn.Verified) -> None:
        for name, *arguments in verified.schedule.ops:
            getattr(self, name)(*arguments)

    def _measure(self) -> None:
        """What is held where an operation has its result and still all that it read."""
        vectors = len(self.outputs) + 2 * len(self.saved) + len(self.grads)
        held = vectors * VECTOR_BYTES + len(self.weight_grads) * NUMBER_BYTES
        self.peak_bytes = max(self.peak_bytes, held)

    def _input(self, stage: int) -> Vector:
        return self.outputs[stage - 1] if stage - 1 in self.outputs else self.saved[stage - 1][1]

    def _forward(self, stage: int) -> tuple[Vector, Vector]:
        self.forwards += 1
        before = [self.weights[stage] * value for value in self._input(stage)]
        return before, [math.tanh(value) for value in before]

    def forward_save(self, stage: int, option: int) -> None:
        assert option == 0
        self.saved[stage] = self._forward(stage)
        self._measure()

    def forward_keep(self, stage: int) -> None:
        self.outputs[stage] = self._forward(stage)[1]
        self._measure()

    def forward_drop(self, stage: int) -> None:
        self.forward_keep(stage)
        del self.outputs[stage - 1]

    def backward(self, stage: int) -> None:
        inner = [d * (1 - y * y) for d, y in zip(self.grads[stage], self.saved[stage][1], strict=True)]
        self.weight_grads[stage] = math.fsum(g * x for g, x in zip(inner, self._input(stage), strict=True))
        self.grads[stage - 1] = [self.weights[stage] * g for g in inner]
        self._measure()
        del self.grads[stage], self.saved[stage]
        if stage > 1:  # the chain's input stays
            self.outputs.pop(stage - 1, None)

    def drop(self, value: str, stage: int) -> None:
        del (self.outputs if value == "output" else self.saved)[stage]


def main() -> None:
    """Trains one step with everything stored and one within half the memory, and compares."""
    generator = random.Random(0)
    weights = [generator.uniform(0.5, 1.5) for _ in range(STAGES)]
    x = [generator.uniform(-1, 1) for _ in range(WIDTH)]
    stage = cairn.Stage(
        VECTOR_BYTES, saved_bytes=2 * VECTOR_BYTES, forward_ns=2, backward_ns=3, weight_grad_bytes=NUMBER_BYTES
    )
    chain = cairn.Chain([stage] * STAGES, input_bytes=VECTOR_BYTES)
    limits = cairn.limits(chain)

    plain = None
    for solution in cairn.solve_many(chain, [None, (limits.least_bytes + limits.store_all_bytes) // 2]):
        executor = Executor(weights, x)
        verified = cairn.verify(chain, solution.require())
        executor.run(verified)
        print(
            f"{solution.solver}: {executor.forwards} forwards, at most {executor.peak_bytes} bytes held"
            f" (predicted: {solution.peak_bytes})"
        )
        plain = plain or executor
        assert executor.weight_grads == plain.weight_grads and executor.grads == plain.grads
        assert executor.peak_bytes == verified.replay.peak_bytes
        assert executor.forwards * 2 == STAGES * 2 + solution.recompute_ns
    assert executor.forwards > plain.forwards and executor.peak_bytes < plain.peak_bytes


if __name__ == "__main__":
    main()
