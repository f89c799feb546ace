# SPDX-License-Identifier: Apache-2.0
"""Makes programs from seeds: models, regions, training loops, over the public API."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

from nets.program_text import Block, Program, Statement

DTYPES = ("torch.bfloat16", "torch.float16")
SIZE = 6

# {a}, {b}: any values; {w}: a weight; all are SIZE x SIZE, and so is the result.
OPS = (
    "torch.mm({a}, {w})",
    "torch.mm({w}, {a})",
    "F.linear({a}, {w})",
    "F.linear({a}, {w}, {w}[0])",
    "{a} @ {w}.t()",
    "{a} @ {w}.T",
    "{a} @ {w}.view(6, 6)",
    "{a} @ {w}.view(36).view(6, 6)",
    "{a} @ {w}.detach()",
    "{a} @ {w}[0:6]",
    "{a} @ {w}[:, [0, 1, 2, 3, 4, 5]]",
    "{a} @ {b}",
    "torch.matmul({a}, {w}[0]).expand(6, 6)",
    "torch.addmm({b}, {a}, {w})",
    "torch.addmv({b}[0], {a}, {w}[1]).expand(6, 6)",
    "torch.baddbmm({b}[None], {a}[None], {w}[None])[0]",
    "torch.bmm({a}[None], {w}[None])[0]",
    "torch.einsum('ij,jk->ik', {a}, {w})",
    "torch.einsum('ij->ji', {a}) + 0",
    "torch.linalg.multi_dot([{a}, {w}, {b}])",
    "F.conv1d({a}[None], {w}[:, :, None])[0]",
    "F.conv_transpose1d({a}[None], {w}[:, :, None])[0]",
    "F.conv2d({a}[None, None], {w}[None, None, :3, :3], padding=1)[0, 0]",
    "F.scaled_dot_product_attention({a}[None], {b}[None], {w}[None])[0]",
    "torch.softmax({a}, 1)",
    "F.log_softmax({a}, 0)",
    "F.layer_norm({a}, (6,), {w}[0], {w}[1])",
    "F.layer_norm({a}, (6,))",
    "F.group_norm({a}[None], 2)[0]",
    "F.batch_norm({a}, None, None, training=True)",
    "F.gelu({a})",
    "F.relu({a})",
    "F.dropout({a}, 0.3)",
    "F.embedding(torch.arange(6), {w})",
    "torch.tanh({a})",
    "torch.exp(torch.tanh({a}))",
    "torch.log1p({a}.abs())",
    "torch.rsqrt({a}.square() + 1)",
    "torch.pow({a}.abs() + 0.5, 0.5)",
    "torch.prod({a}, 1, keepdim=True).expand(6, 6)",
    "torch.cumsum({a}, 1) / 6",
    "torch.cdist({a}, {b})",
    "torch.cat([{a}, {b}])[:6]",
    "torch.stack([{a}, {b}])[1]",
    "torch.where({a} > 0, {a}, {b})",
    "torch.addcmul({a}, {b}, {b}, value=0.1)",
    "torch.atan2({a}, {b}.abs() + 1)",
    "torch.cross({a}[:, :3], {b}[:, :3], dim=1).repeat(1, 2)",
    "{a} + {b}",
    "{a} * 0.5",
    "{a} - {w}",
    "{a}.half()",
    "{a}.bfloat16()",
    "{a}.float()",
    "{a}.to({w}.dtype)",
    "{a}.t()",
    "{a}.contiguous()",
    "{a}[:, :].detach()",
    "{a}.mean(1, keepdim=True).expand(6, 6)",
    "{a}.norm(dim=1, keepdim=True).expand(6, 6)",
    "{a}.sum(0).expand(6, 6) / 6",
    "F.mse_loss({a}, {b}) + {a}",
    "F.l1_loss({a}, {b}) + {b}",
    "F.smooth_l1_loss({a}, {b}) * {a}",
    "F.cosine_similarity({a}, {b}, dim=1)[:, None].expand(6, 6)",
    "F.cross_entropy({a}, torch.arange(6)) * {b}",
    "F.binary_cross_entropy_with_logits({a}, {b}.sigmoid()) + {a}",
    "F.kl_div({a}, {b}.softmax(1), reduction='mean') + {b}",
    "F.interpolate({a}[None, None], scale_factor=2)[0, 0, ::2, ::2]",
    "F.avg_pool1d({a}[None], 3, 1, 1)[0]",
    "F.pad({a}, (1, 1))[:, 1:-1]",
    "torch.fft.ifft(torch.fft.fft({a})).real",
)
MODULES = (
    "nn.Linear(6, 6)",
    "nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6))",
    "nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6, bias=False), nn.GELU())",
    "nn.Sequential(nn.Linear(6, 6), nn.Softmax(1))",
    "nn.GRUCell(6, 6)",
    "nn.Bilinear(6, 6, 6)",
)
TORCH_OPTIMIZERS = (
    "torch.optim.SGD({params}, lr=0.1)",
    "torch.optim.SGD({params}, lr=0.1, momentum=0.9, foreach=False)",
    "torch.optim.SGD({params}, lr=0.1, fused=True)",
    "torch.optim.Adam({params}, lr=0.01)",
    "torch.optim.Adam({params}, lr=0.01, fused=True)",
    "torch.optim.AdamW({params}, lr=0.01, amsgrad=True, foreach=True)",
    "torch.optim.AdamW({params}, lr=0.01, fused=True)",
    "torch.optim.Adagrad({params}, lr=0.05, fused=True)",
    "torch.optim.RMSprop({params}, lr=0.01)",
)
FASTAMP_OPTIMIZERS = (
    "fastamp.optim.SGD({params}, lr=0.1, momentum=0.9{copies})",
    "fastamp.optim.SGD({params}, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1{copies})",
    "fastamp.optim.Adam({params}, lr=0.01{copies})",
    "fastamp.optim.AdamW({params}, lr=0.01, state_dtype=torch.bfloat16{copies})",
    "fastamp.optim.AdamW({params}, lr=0.01, amsgrad=True{copies})",
)


@dataclass
class Scope:
    """What a place in the program can name, and what is open around it."""

    values: list[str]
    casts: dict[str, str] | None = None  # of the outermost region: the dtype of each leaf's cast
    named: set[str] = field(default_factory=set)  # leaves and modules in the innermost region
    off: bool = True  # autocast is off
    closed: bool = False  # in a function, which cannot rebind what is outside
    thread: bool = False
    nested: bool = False  # in a reentrant checkpoint

    def inner(self, **changes: Any) -> Scope:
        own: dict[str, Any] = {"values": list(self.values)}
        return replace(self, **(own | changes))


class Maker:
    """Makes one program."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.draw = random.Random(seed)
        self.count = 0
        self.reference = "torch" if self.draw.random() < 0.75 else "fastamp"
        self.installed = self.reference == "torch" and self.draw.random() < 0.25
        self.params: list[str] = []
        self.modules: list[str] = []
        self.inputs: list[str] = []
        # What a value can be a view of, or the same tensor as: itself, if it is not here.
        self.origins: dict[str, frozenset[str]] = {}
        self.leaves: set[str] = set()  # what torch casts once in a region
        self.optimizers: list[str] = []
        self.copies = self.draw.choice(DTYPES)
        self.kept = self.reference == "torch" and self.draw.random() < 0.35

    def chance(self, part: float) -> bool:
        return self.draw.random() < part

    def new(self, kind: str) -> str:
        self.count += 1
        return f"{kind}{self.count}"

    # -- forward passes ---------------------------------------------------------------------------

    def expression(self, scope: Scope) -> str:
        """An op of any values; one that is refused is recorded, and gives its first value."""
        first = self.value(scope)
        a, b, w = first, self.value(scope), self.weight()
        scope.named |= self.origin(a) | self.origin(b) | self.origin(w)
        if scope.off and self.chance(0.9):
            a, b, w = f"{a}.float()", f"{b}.float()", f"{w}.float()"
        if self.modules and self.chance(0.15):
            module = self.draw.choice(self.modules)
            both = module.startswith("two")
            scope.named.add(module)
            scope.named |= self.origin(f"{module}.weight")
            text = f"{module}({a}, {b})" if both else f"{module}({a})"
        elif self.chance(0.08):
            kind = self.draw.choice(("plain", "carried", "float32", "bfloat16"))
            text = f"functions['{kind}'].apply({a}, {w})"
        else:
            text = self.draw.choice(OPS).format(a=a, b=b, w=w)
        return f"use(lambda: {text}, {first})"

    def value(self, scope: Scope) -> str:
        if self.chance(0.1):
            return self.weight()
        recent = scope.values[-3:] if self.chance(0.6) else scope.values
        return self.draw.choice(recent)

    def weight(self) -> str:
        return self.draw.choice(self.params)

    def origin(self, name: str) -> frozenset[str]:
        return self.origins.get(name, frozenset((name,)))

    def new_value(self, scope: Scope, text: str) -> str:
        """A line that names what an expression gives, which can be its first value."""
        name = self.new("v")
        first = text.rsplit(", ", 1)[1].removesuffix(")")
        self.origins[name] = self.origin(first)
        scope.values.append(name)
        return f"{name} = {text}"

    def region(self, scope: Scope, least: int, most: int, depth: int) -> Block:
        """A region around a few lines.

        torch has one cache for all regions in an outermost one, also if that is disabled. A leaf
        that it holds in one dtype is handed to ops of a region of another: such a region does not
        cache here.
        """
        casts = {} if scope.casts is None else scope.casts
        dtype = "" if self.chance(0.15) else self.draw.choice(DTYPES)
        inner = scope.inner(casts=casts, named=set(), off=not dtype)
        body = tuple(self.forward(inner, self.draw.randint(least, most), depth))
        if not inner.closed:
            scope.values = inner.values
        if not dtype:
            return Block("with amp('cpu', enabled=False):", body)
        cached = self.chance(0.85) and all(casts.get(name, dtype) == dtype for name in inner.named)
        if cached:
            casts.update(dict.fromkeys(inner.named, dtype))
        flag = "" if cached else ", cache_enabled=False"
        return Block(f"with amp('cpu', dtype={dtype}{flag}):", body)

    def block(self, scope: Scope, depth: int) -> list[Statement]:
        kind = self.draw.random()
        if kind < 0.45:
            return [self.region(scope, 1, 5, depth + 1)]
        if kind < 0.6:
            head = self.draw.choice(("torch.no_grad()", "torch.enable_grad()"))
            inner = scope.inner()
            body = self.forward(inner, self.draw.randint(1, 3), depth + 1)
            scope.values = inner.values
            return [Block(f"with {head}:", tuple(body))]
        if kind < 0.7 and not scope.closed:
            inner = scope.inner()
            body = self.forward(inner, self.draw.randint(1, 3), depth + 1)
            body.append(f"record({inner.values[-1]})")
            return [Block("with torch.inference_mode():", tuple(body))]
        if kind < 0.9 and not scope.nested:
            return self.checkpointed(scope, depth)
        return self.threads(scope) if scope.casts is None and not scope.thread else []

    def checkpointed(self, scope: Scope, depth: int) -> list[Statement]:
        name, result, argument = self.new("part"), self.new("v"), self.new("a")
        # Not reentrant ones yet: in some programs their backward pass comes to run itself, in
        # torch's own code and without an end.
        reentrant = False
        values = [argument] if reentrant else [*scope.values, argument]
        given = self.value(scope)
        self.origins[argument] = self.origin(given)
        # Its second run is within a region that checkpoint opens, if only a disabled one.
        casts = {} if scope.casts is None else scope.casts
        nested = scope.nested or reentrant
        inner = scope.inner(values=values, casts=casts, closed=True, nested=nested)
        body = self.forward(inner, self.draw.randint(1, 4), depth + 1)
        body.append(f"return {inner.values[-1]}")
        scope.values.append(result)
        self.origins[result] = self.origin(given) | self.origin(inner.values[-1])
        call = f"checkpoint({name}, {given}, use_reentrant={reentrant})"
        return [
            Block(f"def {name}({argument}):", tuple(body)),
            f"{result} = use(lambda: {call}, {given})",
        ]

    def threads(self, scope: Scope) -> list[Statement]:
        blocks: list[Statement] = []
        names, results = [], []
        for _ in range(self.draw.randint(1, 2)):
            name, found = self.new("work"), self.new("found")
            own = {self.new("v"): given for given in self.inputs}  # which it may write
            inner = scope.inner(values=[*self.inputs, *own], closed=True, thread=True)
            body: list[Statement] = [f"{name} = {given}.clone()" for name, given in own.items()]
            body += self.forward(inner, self.draw.randint(2, 5), 1)
            out = inner.values[-1]
            kept = f"torch.autograd.grad({out}.float().sum(), {self.weight()}, allow_unused=True)"
            body.append(f"{found}.append(tried(lambda: ({out}, {kept})))")
            blocks.append(f"{found} = []")
            blocks.append(Block(f"def {name}():", tuple(body)))
            names.append(name)
            results.append(found)
        blocks.append(f"in_threads({', '.join(names)})")
        blocks += [
            Block(
                f"for pair in {found}:", ("record(*(pair if isinstance(pair, tuple) else [pair]))",)
            )
            for found in results
        ]
        blocks += [f"record(len({found}))" for found in results]
        return blocks

    def forward(self, scope: Scope, count: int, depth: int = 0) -> list[Statement]:
        """Statements of a forward pass; new values are added to the scope."""
        found: list[Statement] = []
        for _ in range(count):
            if depth < 4 and self.chance(0.22):
                found += self.block(scope, depth)
                continue
            if self.chance(0.06):
                found += self.edit(scope)
                continue
            text = self.expression(scope)
            if scope.thread and "dropout" in text:
                continue  # threads share one generator
            found.append(self.new_value(scope, text))
            if self.chance(0.08) and not scope.thread:
                found.append(f"record({scope.values[-1]})")
        return found

    def edit(self, scope: Scope) -> list[Statement]:
        """Something written in place, or a flag or cache that changes in the middle."""
        kind = self.draw.random()
        value = self.draw.choice(scope.values)
        if kind < 0.5:
            how = self.draw.choice((".mul_(0.5)", ".add_(1)", ".zero_()", "[0].fill_(2)"))
        elif kind < 0.6 and not scope.thread:
            return ["torch.clear_autocast_cache()"]
        elif kind < 0.7:
            return [f"tried(lambda: {value}.retain_grad())"]
        else:
            how = f".{self.draw.choice(('relu_', 'tanh_', 'exp_'))}()"
        shared = self.leaves.union(self.inputs if scope.thread else ())
        # Not a weight in an open region, nor what other threads read.
        if (scope.casts is not None or scope.thread) and self.origin(value) & shared:
            return []
        return [f"tried(lambda: {value}{how} is None)"]

    # -- what is made at first --------------------------------------------------------------------

    def make_values(self) -> list[Statement]:
        made: list[Statement] = []
        for _ in range(self.draw.randint(1, 3)):
            name = self.new("p")
            frozen = ", requires_grad=False" if self.chance(0.12) else ""
            # Scalers refuse float16 gradients, and what torch's keep of that is not promised.
            low = self.draw.choice(DTYPES) if frozen else "torch.bfloat16"
            dtype = "" if self.chance(0.85) else f", dtype={low}"
            made.append(f"{name} = nn.Parameter(torch.randn(6, 6{dtype}){frozen})")
            self.params.append(name)
            self.leaves.add(name)
        if self.chance(0.2):
            name = self.new("p")
            tied = self.weight()
            made.append(f"{name} = {tied}  # tied")
            self.params.append(name)
            self.origins[name] = self.origin(tied)
        for _ in range(self.draw.randint(1, 2)):
            name = self.new("x")
            dtype = self.draw.choice(
                ("", "", "", ", dtype=torch.bfloat16", ", dtype=torch.float16")
            )
            grad = ".requires_grad_()" if self.chance(0.4) else ""
            self.leaves |= {name} if grad else set()
            made.append(f"{name} = torch.randn(6, 6{dtype}){grad}")
            self.inputs.append(name)
        for _ in range(self.draw.randint(0, 2)):
            text = self.draw.choice(MODULES)
            name = self.new("two" if "Cell" in text or "Bilinear" in text else "m")
            made.append(f"{name} = {text}")
            self.modules.append(name)
            if text == "nn.Linear(6, 6)" and self.chance(0.4):
                tied = self.weight()
                made.append(f"{name}.weight = {tied}  # tied")
                self.origins[f"{name}.weight"] = self.origin(tied)
        return made

    def all_weights(self) -> str:
        return (
            f"[{', '.join(self.params)}"
            + "".join(f", *{module}.parameters()" for module in self.modules)
            + "]"
        )

    def trained(self) -> list[Statement]:
        """The list of weights, each once, and optimizers over parts of it."""
        found: list[Statement] = [f"weights = list(dict.fromkeys({self.all_weights()}))"]
        if self.kept:
            kinds = self.draw.sample(("keep", "together"), self.draw.randint(1, 2))
            for kind in kinds:
                found.append(f"held_{kind} = fastamp.casts.{kind}(weights) if NEW else None")
        parts = ["weights"] if self.chance(0.6) else ["weights[::2]", "(weights[1::2] or weights)"]
        choices = TORCH_OPTIMIZERS if self.reference == "torch" else FASTAMP_OPTIMIZERS
        for part in parts:
            name = self.new("opt")
            copies = f", autocast_dtype={self.copies} if NEW else None"
            params = part
            if self.chance(0.2):
                params = f"[{{'params': {part}[:1]}}, {{'params': {part}[1:], 'lr': 0.02}}]"
            text = self.draw.choice(choices).format(params=params, copies=copies)
            found.append(f"{name} = {text}")
            self.optimizers.append(name)
        scale = self.draw.choice(("2.0**16", "2.0**8", "1024.0", "3.0"))
        options = [f"init_scale={scale}", f"growth_interval={self.draw.randint(1, 3)}"]
        if self.chance(0.3):
            options.append("growth_factor=1.5, backoff_factor=0.7")
        if self.chance(0.1):
            options.append("enabled=False")
        found.append(f"scaler = Scaler('cpu', {', '.join(options)})")
        return found

    # -- training ---------------------------------------------------------------------------------

    def backward(self, scope: Scope) -> list[Statement]:
        out = self.draw.choice(scope.values[-3:])
        form = self.draw.choice(
            (
                "{out}.float().square().mean()",
                "{out}.sum()",
                "F.mse_loss({out}.float(), {x}.float())",
                "({out} * {out2}).float().mean()",
            )
        ).format(out=out, out2=self.draw.choice(scope.values), x=self.draw.choice(self.inputs))
        loss = self.new("loss")
        found: list[Statement] = [f"{loss} = {form}"]
        if self.chance(0.1):
            found.append(f"{loss} = {loss} * {self.draw.choice(('inf', 'nan', '1e30', '1e-30'))}")
        if self.chance(0.15):
            grad = f"torch.autograd.grad({loss}, {self.params[0]}, None, True, allow_unused=True)"
            found.append(f"record(tried(lambda: {grad}))")
        found.append(f"record({loss})")
        found.append(f"record(tried(lambda: scaler.scale({loss}).backward()))")
        return found

    def before_step(self, optimizer: str) -> list[Statement]:
        found: list[Statement] = []
        # Without gradients torch marks the optimizer as unscaled, and refuses its step.
        call = f"record(tried(lambda: scaler.unscale_({optimizer})))"
        unscale = Block(f"if has_gradients({optimizer}):", (call,))
        if self.chance(0.2):
            value = self.draw.choice(("inf", "-inf", "nan", "3e38", "1e-40"))
            at = self.draw.randrange(3)
            found.append(
                Block(
                    f"for p in weights[{at}:{at + 1}]:",
                    (Block("if p.grad is not None:", (f"p.grad.view(-1)[1] = {value}",)),),
                )
            )
        if self.chance(0.4):
            found.append(unscale)
        if self.chance(0.3):
            clip = self.draw.choice(
                (
                    "torch.nn.utils.clip_grad_norm_(weights, 0.5)",
                    "torch.nn.utils.clip_grad_norm_(weights, 1.0, norm_type=inf)",
                    "torch.nn.utils.clip_grad_value_(weights, 0.01)",
                )
            )
            found.append(f"record(tried(lambda: {clip}))")
        if self.chance(0.08):
            found.append("weights[0].grad = None")
        if self.chance(0.05):
            found.append(unscale)
        return found

    def steps(self) -> list[Statement]:
        found: list[Statement] = []
        for optimizer in self.optimizers:
            found += self.before_step(optimizer)
            # A step without gradients, which both refuse, can be repeated in fastamp only.
            step = f"record(tried(lambda: scaler.step({optimizer}) is None))"
            twice = 1 + self.chance(0.04)
            if self.chance(0.95):
                found.append(Block(f"if has_gradients({optimizer}):", (step,) * twice))
        if self.chance(0.95):
            new = self.draw.choice(("", "", "", "", "", "", "", "64.0", "torch.tensor(32.0)"))
            found.append(f"record(tried(lambda: scaler.update({new})))")
        found += [f"{optimizer}.zero_grad()" for optimizer in self.optimizers if self.chance(0.9)]
        return found

    def between(self) -> list[Statement]:
        """What happens between two iterations."""
        found: list[Statement] = []
        if self.chance(0.25):
            way = self.draw.choice(("{}", "copy.deepcopy({})", "pickle.loads(pickle.dumps({}))"))
            found.append(f"state = {way.format('scaler.state_dict()')}")
            found.append("record(*state.values())")
            found.append("scaler = Scaler('cpu', enabled=scaler.is_enabled())")
            found.append("record(tried(lambda: scaler.load_state_dict(state)))")
        if self.chance(0.25):
            optimizer = self.draw.choice(self.optimizers)
            found.append(f"{optimizer}.load_state_dict(copy.deepcopy({optimizer}.state_dict()))")
        if self.chance(0.2):
            weight = self.weight()
            how = self.draw.choice(
                ("mul_(0.9)", "add_(0.01)", "clamp_(-1, 1)", "copy_(weights[0])")
            )
            found.append(Block("with torch.no_grad():", (f"{weight}.{how}",)))
        if self.chance(0.1):
            found.append(f"{self.weight()}.requires_grad_({self.chance(0.5)})")
        if self.chance(0.08):
            found.append(f"{self.draw.choice(self.optimizers)}.param_groups[0]['lr'] *= 0.5")
        if self.chance(0.08):
            found.append("scaler = use(lambda: pickle.loads(pickle.dumps(scaler)), scaler)")
        return found

    def iteration(self) -> list[Statement]:
        found: list[Statement] = []
        for _ in range(2 if self.chance(0.25) else 1):  # accumulation
            scope = Scope(list(self.inputs))
            found += self.block_of_regions(scope)
            found += self.backward(scope)
        found += [
            "record(*(p.grad for p in weights))",
            *self.steps(),
            "record(*weights, scaler.get_scale(), *scaler.state_dict().values())",
        ]
        return found

    def block_of_regions(self, scope: Scope) -> list[Statement]:
        found: list[Statement] = []
        for _ in range(self.draw.randint(1, 2)):
            found.append(self.region(scope, 2, 8, 1))
            if self.chance(0.3):
                found += self.forward(scope, 2)
        return found

    def program(self) -> Program:
        statements = [*self.make_values(), *self.trained()]
        body: list[Statement] = []
        if self.chance(0.4):
            body = [*self.iteration(), *self.between()]
            statements.append(Block(f"for _ in range({self.draw.randint(2, 4)}):", tuple(body)))
        else:
            for _ in range(self.draw.randint(1, 4)):
                statements += [*self.iteration(), *self.between()]
        statements.append("record(*weights)")
        for optimizer in self.optimizers:
            values = f"[v for s in {optimizer}.state.values() for k, v in s.items()]"
            statements.append(f"record(*{values})")
        return Program(self.seed, self.reference, tuple(statements), self.installed)


def make(seed: int) -> Program:
    """The program of a seed: the same one in every process."""
    return Maker(seed).program()


__all__ = ["Maker", "make"]
