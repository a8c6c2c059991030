"""Training problems for tests: a tape of layers, differentiated in the way captured steps look."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from rematplan.ir import Op, Tensor, TrainingGraph


class Tape:
    """Builds a forward half layer by layer, then its backward half in reverse.

    Values are tensor names. Sizes are bytes of the layer's output; costs follow sizes (a convolution 10 units
    a KiB).
    """

    def __init__(self, name: str = "tape", batch: int = 4096) -> None:
        self.name = name
        self.tensors: list[Tensor] = []
        self.inputs: list[str] = []
        self.outputs: list[str] = []
        self.ops: list[Op] = []
        self.ordered: list[str] = []
        self.tape: list[Callable[[], None]] = []
        self.grad: dict[str, str] = {}
        self.size: dict[str, int] = {}
        self.count = 0
        self.x = self.put("x", batch, as_input=True)

    def put(self, name: str, size: int, as_input: bool = False) -> str:
        self.tensors.append(Tensor(name, size))
        self.size[name] = size
        if as_input:
            self.inputs.append(name)
        return name

    def run(
        self, kind: str, reads: list[str], writes: list[tuple[str, int]], unit: float = 1, back: bool = False
    ) -> list[str]:
        self.count += 1
        name = f"{kind}_{self.count}"
        made = [self.put(f"{name}.{w}", size) for w, size in writes]
        cost = unit * max(1, sum(size for _, size in writes) // 1024)
        phase = "backward" if back else "forward"
        self.ops.append(Op(name, tuple(dict.fromkeys(reads)), tuple(made), float(cost), 0, phase))
        return made

    def pull(self, value: str, grad: str) -> None:
        """Add a gradient to a value's gradient."""
        if value == self.x:
            return
        if value in self.grad:
            reads = [self.grad[value], grad]
            (grad,) = self.run("acc", reads, [("g", self.size[value])], back=True)
        self.grad[value] = grad

    def conv(self, x: str, size: int, weight: int = 512, workspace: int = 0) -> str:
        w = self.put(f"w{self.count}", weight, as_input=True)
        (y,) = self.run("conv", [x, w], [("y", size)], unit=10)
        if workspace:
            op = self.ops[-1]
            self.ops[-1] = Op(op.name, op.reads, op.writes, op.cost, workspace, op.phase)

        def back() -> None:
            writes = [("dx", self.size[x]), ("dw", weight)]
            dx, dw = self.run("dconv", [self.grad[y], x, w], writes, unit=10, back=True)
            self.outputs.append(dw)
            self.pull(x, dx)

        self.tape.append(back)
        return y

    def norm(self, x: str) -> str:
        """Batch norm: saved statistics, and running ones updated by little ops that nothing reads."""
        running = self.put(f"running{self.count}", 64, as_input=True)
        y, mean, invstd = self.run("bn", [x], [("y", self.size[x]), ("mean", 64), ("invstd", 64)])
        (scaled,) = self.run("scale", [mean], [("y", 64)])
        (new,) = self.run("update", [running, scaled], [("y", 64)])
        self.outputs.append(new)

        def back() -> None:
            reads = [self.grad[y], x, mean, invstd]
            (dx,) = self.run("dbn", reads, [("dx", self.size[x])], back=True)
            self.pull(x, dx)

        self.tape.append(back)
        return y

    def relu(self, x: str) -> str:
        (y,) = self.run("relu", [x], [("y", self.size[x])])

        def back() -> None:
            (dx,) = self.run("drelu", [self.grad[y], y], [("dx", self.size[x])], back=True)
            self.pull(x, dx)

        self.tape.append(back)
        return y

    def dropout(self, x: str) -> str:
        mask, y = self.run("dropout", [x], [("mask", self.size[x] // 4), ("y", self.size[x])])
        self.ordered.append(self.ops[-1].name)

        def back() -> None:
            (dx,) = self.run("ddropout", [self.grad[y], mask], [("dx", self.size[x])], back=True)
            self.pull(x, dx)

        self.tape.append(back)
        return y

    def pool(self, x: str) -> str:
        size = self.size[x] // 4
        y, index = self.run("pool", [x], [("y", size), ("index", 2 * size)])

        def back() -> None:
            (dx,) = self.run("dpool", [self.grad[y], x, index], [("dx", self.size[x])], back=True)
            self.pull(x, dx)

        self.tape.append(back)
        return y

    def up(self, x: str) -> str:
        (y,) = self.run("up", [x], [("y", 4 * self.size[x])])

        def back() -> None:
            (dx,) = self.run("dup", [self.grad[y]], [("dx", self.size[x])], back=True)
            self.pull(x, dx)

        self.tape.append(back)
        return y

    def add(self, a: str, b: str) -> str:
        (y,) = self.run("add", [a, b], [("y", self.size[a])])

        def back() -> None:
            self.pull(a, self.grad[y])
            self.pull(b, self.grad[y])

        self.tape.append(back)
        return y

    def cat(self, *parts: str) -> str:
        (y,) = self.run("cat", list(parts), [("y", sum(self.size[p] for p in parts))])

        def back() -> None:
            for p in parts:
                (dp,) = self.run("slice", [self.grad[y]], [("g", self.size[p])], back=True)
                self.pull(p, dp)

        self.tape.append(back)
        return y

    def block(self, x: str, size: int) -> str:
        """Convolution, batch norm, ReLU."""
        return self.relu(self.norm(self.conv(x, size)))

    def finish(self, y: str) -> TrainingGraph:
        (loss,) = self.run("loss", [y], [("y", 4)])
        self.outputs.append(loss)
        (self.grad[y],) = self.run("dloss", [y], [("dx", self.size[y])], back=True)
        for back in reversed(self.tape):
            back()
        return TrainingGraph(
            name=self.name,
            tensors=tuple(self.tensors),
            inputs=tuple(self.inputs),
            outputs=tuple(dict.fromkeys(self.outputs)),
            ops=tuple(self.ops),
            ordered=tuple(self.ordered),
        )


def chain(layers: int, size: int = 4096) -> TrainingGraph:
    """A plain chain of convolutions."""
    tape = Tape("chain")
    y = tape.x
    for _ in range(layers):
        y = tape.conv(y, size)
    return tape.finish(y)


def residual(stages: tuple[int, ...] = (3, 4, 6, 3), size: int = 1 << 20) -> TrainingGraph:
    """Like a ResNet of bottleneck blocks, a projection at the head of each stage."""
    tape = Tape("residual")
    y = tape.pool(tape.block(tape.x, 4 * size))
    for stage, blocks in enumerate(stages):
        width = (size >> stage) // 2
        for i in range(blocks):
            inner = tape.block(tape.block(y, width), width)
            out = tape.norm(tape.conv(inner, 4 * width))
            skip = tape.norm(tape.conv(y, 4 * width)) if i == 0 else y
            y = tape.relu(tape.add(out, skip))
    return tape.finish(tape.conv(y, 4096))


def towers(long: int, heavy: int) -> TrainingGraph:
    """Two branches from the input to the loss: a short one of large tensors, and a long one of small tensors but for
    its last, whose backward half runs first, while all is held that the other one keeps."""
    t = Tape("towers")
    large = t.conv(t.x, 16384)
    for _ in range(heavy):
        large = t.relu(t.conv(large, 16384))
    small = t.conv(t.x, 1024)
    for _ in range(long):
        small = t.relu(small)
    return t.finish(t.cat(large, t.conv(t.relu(t.conv(small, 16384)), 1024)))


def unet(levels: int = 4, size: int = 1 << 22) -> TrainingGraph:
    """Like a U-Net: two convolution blocks a level, skips by concatenation."""
    tape = Tape("unet")
    skips = []
    y = tape.x
    for level in range(levels):
        skips.append(tape.block(tape.block(y, size >> level), size >> level))
        y = tape.pool(skips[-1])
    y = tape.block(tape.block(y, size >> levels), size >> levels)
    for level in reversed(range(levels)):
        y = tape.cat(skips[level], tape.conv(tape.up(y), size >> level))
        y = tape.block(tape.block(y, size >> level), size >> level)
    return tape.finish(tape.conv(y, size >> 3))


def wide(branches: int, depth: int = 4) -> TrainingGraph:
    """Parallel branches of squares: (depth + 1) ** branches lower sets and more."""
    tape = Tape("wide")
    stem = tape.block(tape.x, 4096)
    ends = []
    for _ in range(branches):
        y = stem
        for _ in range(depth):
            y = tape.conv(y, 4096)
        ends.append(y)
    return tape.finish(tape.cat(*ends))


def random_training(rng: Random, layers: int) -> TrainingGraph:
    """Random layers on random earlier values, dropout and skips included."""
    tape = Tape("random", batch=rng.choice([0, 64, 4096]))
    values = [tape.conv(tape.x, rng.choice([0, 1024, 4096]), workspace=rng.choice([0, 777]))]
    for _ in range(layers):
        x = rng.choice(values[-3:])
        kind = rng.choice(["conv", "norm", "relu", "dropout", "pool", "up", "add", "cat"])
        same = [v for v in values if tape.size[v] == tape.size[x]]
        made = {
            "conv": lambda x=x: tape.conv(x, rng.choice([512, 1024, 4096])),
            "norm": lambda x=x: tape.norm(x),
            "relu": lambda x=x: tape.relu(x),
            "dropout": lambda x=x: tape.dropout(x),
            "pool": lambda x=x: tape.pool(x),
            "up": lambda x=x: tape.up(x),
            "add": lambda x=x, same=same: tape.add(x, rng.choice(same)),
            "cat": lambda x=x: tape.cat(x, rng.choice(values)),
        }[kind]()
        values.append(made)
    ends = [v for v in values if not any(v in op.reads for op in tape.ops)]
    return tape.finish(ends[0] if len(ends) == 1 else tape.cat(*ends))


def scrambled(rng: Random, ops: int) -> TrainingGraph:
    """A valid problem with phases and no further sense: any op reads anything written before it.

    Holds what tapes do not: inputs as outputs, forward outputs, ops that read or write nothing, tensors that
    nothing reads, forward ops after the first backward op, backward ops that read several blocks or nothing,
    no phase at all.
    """
    tensors = [Tensor(f"in{i}", rng.choice([0, 3, 100])) for i in range(rng.randint(0, 3))]
    known = [t.name for t in tensors]
    inputs = tuple(known)
    turn = rng.randint(0, ops)
    made = []
    for i in range(ops):
        back = i >= turn or rng.random() < 0.05
        if i >= turn and rng.random() < 0.1:
            back = False
        writes = [
            Tensor(f"t{i}.{j}", rng.choice([0, 1, 10, 100, 1000])) for j in range(rng.choice([0, 1, 1, 1, 2]))
        ]
        recent = known if rng.random() < 0.2 else known[-6:]
        reads = rng.sample(recent, min(len(recent), rng.choice([0, 1, 1, 2, 3])))
        phase = ("backward" if back else "forward") if rng.random() < 0.95 else None
        cost = rng.choice([0.0, 1.0, 2.5, 10.0])
        made.append(
            Op(f"op{i}", tuple(reads), tuple(t.name for t in writes), cost, rng.choice([0, 0, 50]), phase)
        )
        tensors += writes
        known += [t.name for t in writes]
    return TrainingGraph(
        name="scrambled",
        tensors=tuple(tensors),
        inputs=inputs,
        outputs=tuple(t for t in known if rng.random() < 0.15),
        ops=tuple(made),
        ordered=tuple(op.name for op in made if rng.random() < 0.1),
    )
