"""A program that uses PyTorch and knows nothing of terrazzo: `test_strangers` runs it with and without the import.

It prints what it finds, by name, as JSON: results, types of what came out, and errors.
"""

# ruff: noqa: B023, E402  (functions are called where they are made; what is under test is imported first)

from __future__ import annotations

import copy
import gc
import importlib
import inspect
import io
import json
import pickle
import sys
import types
import warnings
import weakref

import torch

for name in sys.argv[1:]:
    importlib.import_module(name)

from torch import nn
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.utils.data import default_collate

FOUND: dict[str, object] = {}


def shown(value):
    """Something to compare by: tensors by class, values and whether they have a graph."""
    if isinstance(value, torch.Tensor):
        plain = value.inner if isinstance(value, Wrapped) else value.as_subclass(torch.Tensor)
        node = type(value.grad_fn).__name__ if value.grad_fn is not None else None
        return [type(value).__name__, str(value.dtype), node, plain.detach().double().tolist()]
    if isinstance(value, dict):
        return {str(k): shown(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *[shown(v) for v in value]]
    return repr(value)


def find(name, function):
    torch.manual_seed(0)
    Noted.seen.clear()
    Wrapped.seen.clear()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = shown(function())
    except Exception as error:
        result, caught = f"{type(error).__name__}: {str(error)[:300]}", []
    warned = sorted(f"{w.category.__name__}: {str(w.message)[:100]}" for w in caught)
    FOUND[name] = [result, list(Noted.seen), list(Wrapped.seen), warned]


# ------------------------------------------------------------------ subclasses


class Noted(torch.Tensor):
    """Sees functions."""

    seen: list[str] = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        Noted.seen.append(getattr(func, "__name__", str(func)))
        return super().__torch_function__(func, types, args, kwargs or {})


class Wrapped(torch.Tensor):
    """Sees operators: a wrapper around a tensor."""

    seen: list[str] = []

    @staticmethod
    def __new__(cls, inner):
        options = {"dtype": inner.dtype, "device": inner.device, "requires_grad": inner.requires_grad}
        return torch.Tensor._make_wrapper_subclass(cls, inner.size(), **options)

    def __init__(self, inner):
        self.inner = inner.detach()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        Wrapped.seen.append(str(func))

        def opened(x):
            return x.inner if isinstance(x, Wrapped) else type(x)(map(opened, x)) if type(x) in (list, tuple) else x

        result = func(*opened(list(args)), **{k: opened(v) for k, v in (kwargs or {}).items()})
        if not func._schema.returns:
            return None
        if func._schema.is_mutable:
            return args[0]
        return torch.utils._pytree.tree_map(lambda x: Wrapped(x) if isinstance(x, torch.Tensor) else x, result)

    __torch_function__ = torch._C._disabled_torch_function_impl


def parameter(kind, *shape):
    x = torch.randn(*shape)
    return nn.Parameter(x if kind is torch.Tensor else kind(x) if kind is Wrapped else x.as_subclass(kind))


# ------------------------------------------------------------------ optimizers

OPTIMIZERS = [
    kind
    for name, kind in sorted(vars(torch.optim).items())
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
]


def steps(kind, option, tensor):
    # Muon takes matrices only.
    parameters = [parameter(tensor, 3, 4), parameter(tensor, 4, 2)]
    settings = {"lr": 0.1} | ({option: True} if option else {"foreach": False} if option == "" else {})
    optimizer = kind(parameters, **settings)
    for _ in range(2):
        for p in parameters:
            g = torch.randn(p.shape)
            if kind is torch.optim.SparseAdam:
                g = g.to_sparse()
            p.grad = (
                g
                if tensor is torch.Tensor or g.is_sparse
                else Wrapped(g)
                if tensor is Wrapped
                else g.as_subclass(tensor)
            )
        optimizer.step(lambda: sum(p.grad.sum() for p in parameters))
    states = [dict(sorted(optimizer.state[p].items())) for p in parameters]
    return parameters, states, optimizer.state_dict()["state"]


def optimizers():
    for kind in OPTIMIZERS:
        takes = inspect.signature(kind).parameters
        for option in (None, "", "foreach", "fused", "capturable", "differentiable"):
            if option and option not in takes or option == "" and "foreach" not in takes:
                continue
            for tensor in (torch.Tensor, Noted, Wrapped):
                find(f"{kind.__name__} {option} {tensor.__name__}", lambda: steps(kind, option, tensor))


# ------------------------------------------------------------------ autograd


class Classic(torch.autograd.Function):
    """The documentation of one."""

    @staticmethod
    def forward(ctx, x, factor=2.0):
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * ctx.factor * x.sign(), None


class WithSetup(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x, y):
        return x * y, x.detach()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx, grad, _):
        x, y = ctx.saved_tensors
        return grad * y, grad * x

    @staticmethod
    def jvp(ctx, x_t, y_t):
        x, y = ctx.saved_tensors
        return x_t * y + x * y_t, None


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(3)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return grad * 3


def backward_of(function):
    x = torch.arange(4.0, requires_grad=True)
    out = function(x)
    (out[0] if isinstance(out, tuple) else out).sum().backward()
    return out, x.grad


def functions():
    for kind in (torch.Tensor, Noted, Wrapped):
        find(f"Function of {kind.__name__}", lambda: Classic.apply(parameter(kind, 3), 4.0))
    find("Function", lambda: backward_of(lambda x: Classic.apply(x, 3.0)))
    find("Function with a default", lambda: backward_of(Classic.apply))
    find("Function with a keyword", lambda: backward_of(lambda x: Classic.apply(x, factor=3.0)))
    find("Function with setup_context", lambda: backward_of(lambda x: WithSetup.apply(x, x + 1)))
    find("Function in place", lambda: backward_of(lambda x: InPlace.apply(x * 1)))
    find(
        "Function twice",
        lambda: torch.autograd.gradgradcheck(Classic.apply, torch.rand(3, dtype=torch.double, requires_grad=True)),
    )
    find(
        "apply",
        lambda: [
            Classic.apply.__name__,
            Classic.apply.__qualname__,
            Classic.apply.__doc__,
            Classic.apply == Classic.apply,
        ],
    )
    find("signature of apply", lambda: str(inspect.signature(Classic.apply)))

    def is_freed():
        made = type("Made", (torch.autograd.Function,), {"forward": staticmethod(lambda ctx, x: x + 1)})
        made.apply(torch.ones(2))
        alive = weakref.ref(made)
        del made
        gc.collect()
        return alive() is None

    find("a Function that was made", is_freed)


# ------------------------------------------------------------------ transforms


def transforms():
    from torch.func import functional_call, grad, grad_and_value, hessian, jacfwd, jacrev, jvp, vjp, vmap

    x = torch.arange(1.0, 4.0)

    def cubes(a, b=None):
        return (a**3).sum() + (0 if b is None else (a * b).sum())

    find("grad", lambda: grad(cubes)(x))
    find("grad of two", lambda: grad(cubes, argnums=(0, 1))(x, x + 1))
    find("grad of the last", lambda: grad(cubes, argnums=-1)(x, x + 1))
    find("grad of none such", lambda: grad(cubes, argnums=5)(x))
    find("grad of a tree", lambda: grad(lambda tree: (tree["a"] * tree["b"][0]).sum())({"a": x, "b": [x]}))
    find("grad_and_value", lambda: grad_and_value(lambda a: (cubes(a), a), has_aux=True)(x))
    find("vmap of grad", lambda: vmap(grad(cubes))(torch.eye(3)))
    find("grad of a subclass", lambda: grad(cubes)(x.as_subclass(Noted)))
    find("grad of a wrapper", lambda: grad(cubes)(Wrapped(x)))
    find("jvp", lambda: jvp(cubes, (x,), (x,)))
    find("jvp of a mistake", lambda: jvp(cubes, x, (x,)))
    find("jvp of a subclass", lambda: jvp(cubes, (x.as_subclass(Noted),), (x,)))
    find("vjp", lambda: vjp(lambda a: a * 2, x)[1](x))
    find("jacrev", lambda: jacrev(lambda a: a**2)(x))
    find("jacfwd", lambda: jacfwd(lambda a: a**2)(x))
    find("hessian", lambda: hessian(cubes)(x))
    find("vmap of a Function", lambda: vmap(lambda a: WithSetup.apply(a, a)[0])(torch.eye(3)))
    find("jvp of a Function", lambda: jvp(lambda a: WithSetup.apply(a, a)[0], (x,), (x,)))
    find("functional_call", lambda: functional_call(nn.Linear(3, 2), {"bias": torch.zeros(2)}, (x,)))


# ------------------------------------------------------------------ compilation


def compiled(function, *args, backend="eager"):
    """What it returns, and the graphs that Dynamo made of it."""
    from torch._dynamo.backends.registry import lookup_backend

    torch.compiler.reset()
    graphs = []

    def counting(module, inputs):
        graphs.append(
            [str(node.target).split(" at 0x")[0] for node in module.graph.nodes if node.op == "call_function"]
        )
        return lookup_backend(backend)(module, inputs)

    result = torch.compile(function, backend=counting, fullgraph=True)(*args)
    return result, graphs


def compilation():
    x = torch.arange(1.0, 4.0)
    apply = Classic.apply
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    for backend in ("eager", "aot_eager"):
        find(f"{backend} of a module", lambda: compiled(model, x, backend=backend))
    find("compiled Function", lambda: compiled(lambda a: Classic.apply(a, 2.0).sum(), x.clone().requires_grad_()))
    find("compiled apply", lambda: compiled(lambda a: apply(a, 2.0).sum(), x.clone().requires_grad_()))
    find(
        "compiled setup_context", lambda: compiled(lambda a: WithSetup.apply(a, a)[0].sum(), x.clone().requires_grad_())
    )
    find("compiled grad", lambda: compiled(torch.func.grad(lambda a: (a**3).sum()), x))
    find(
        "compiled vmap of grad",
        lambda: compiled(torch.func.vmap(torch.func.grad(lambda a: (a**3).sum())), torch.eye(3)),
    )
    find("compiled jvp", lambda: compiled(lambda a: torch.func.jvp(lambda b: b.sin(), (a,), (a,)), x))
    find("compiled subclass", lambda: compiled(lambda a: a * 2 + 1, x.as_subclass(Noted)))

    def clip(p):
        p.grad = p.detach() * 10
        return clip_grad_norm_([p], 1.0), p.grad

    find("compiled clip", lambda: compiled(clip, nn.Parameter(x.clone())))

    for kind in (torch.optim.Adam, torch.optim.SGD, torch.optim.RMSprop):
        for foreach in (False, True):

            def step():
                p = nn.Parameter(x.clone())
                optimizer = kind([p], lr=0.1, foreach=foreach)
                for _ in range(2):
                    p.grad = p.detach() * 2
                    _, graphs = compiled(optimizer.step)
                return p, optimizer.state[p], graphs

            find(f"compiled {kind.__name__} {foreach}", step)


# ------------------------------------------------------------------ the rest


def clipping():
    def gradients(kind=torch.Tensor):
        parameters = [parameter(kind, 3), parameter(kind, 2, 2)]
        for p in parameters:
            p.grad = p.detach() * 10
        return [*parameters, nn.Parameter(torch.zeros(1))]

    for kind in (torch.Tensor, Noted, Wrapped):
        for order in (2.0, 1, float("inf"), 0, -1.0):
            for foreach in (None, True, False):

                def clip():
                    ps = gradients(kind)
                    return clip_grad_norm_(ps, 1.0, order, foreach=foreach), [p.grad for p in ps[:2]]

                find(f"clip {kind.__name__} {order} {foreach}", clip)
    find("clip of a generator", lambda: clip_grad_norm_((p for p in gradients()), 1.0))
    find("clip of nothing", lambda: clip_grad_norm_([], 1.0))
    find("clip of one", lambda: clip_grad_norm_(gradients()[0], 1.0))
    find("clip of nan", lambda: clip_grad_norm_([nn.Parameter(torch.zeros(1))], 1.0, error_if_nonfinite=True))
    find("norm of a generator", lambda: get_total_norm(x for x in (torch.ones(2), torch.ones(3))))
    find("norm of inf", lambda: get_total_norm([torch.tensor([float("inf")])], error_if_nonfinite=True))
    find("norm by keyword", lambda: get_total_norm(tensors=(torch.ones(2),), norm_type=1, foreach=False))
    find("norm of a mistake", lambda: get_total_norm(3))


def masked():
    x, mask = torch.arange(6.0).view(2, 3), torch.tensor([[True, False, True], [False, True, True]])
    for name in ("var", "std", "mean", "sum", "softmax"):
        for dim in (0, 1):
            function = getattr(torch.masked, name)
            find(f"masked {name} {dim}", lambda: function(x, dim, mask=mask))
            find(f"masked {name} {dim} without", lambda: function(x, dim))
            find(f"masked {name} {dim} Noted", lambda: function(x.as_subclass(Noted), dim))
    find("masked tensor", lambda: torch.masked.masked_tensor(x, mask).sum(1))


def exporting():
    from torch.utils import dlpack

    x = torch.arange(3.0)
    find("dlpack", lambda: dlpack.from_dlpack(dlpack.to_dlpack(x)))
    find("torch dlpack", lambda: torch.from_dlpack(torch.to_dlpack(x)))
    find("dlpack of a subclass", lambda: dlpack.from_dlpack(dlpack.to_dlpack(x.as_subclass(Noted))))
    find("dlpack of a graph", lambda: type(dlpack.to_dlpack(x.clone().requires_grad_())).__name__)
    find("dlpack of a mistake", lambda: dlpack.to_dlpack(3))
    find("numpy", lambda: x.numpy().tolist())

    def saved(value, **options):
        file = io.BytesIO()
        torch.save(value, file)
        file.seek(0)
        return torch.load(file, **options)

    adam = torch.optim.Adam([parameter(torch.Tensor, 2)])
    for kind in (torch.Tensor, Noted):
        find(f"pickle {kind.__name__}", lambda: pickle.loads(pickle.dumps(parameter(kind, 2))))
        find(f"save {kind.__name__}", lambda: saved(parameter(kind, 2), weights_only=False))
        find(f"save {kind.__name__} weights", lambda: saved(parameter(kind, 2)))
        find(f"copy {kind.__name__}", lambda: copy.deepcopy(parameter(kind, 2)))
    for value in (nn.Linear(2, 2).state_dict(), adam.state_dict(), {"f": Classic}):
        find(f"save {list(value)}", lambda: saved(value))
    find("pickled optimizer", lambda: pickle.loads(pickle.dumps(adam)).state_dict())
    named = (Classic.apply, get_total_norm, torch.masked.var, torch.func.grad, torch.optim.Adam.step, clip_grad_norm_)
    for function in (*named, torch.distributed.destroy_process_group):
        find(f"pickled {function.__qualname__}", lambda: pickle.loads(pickle.dumps(function)) == function)
    find("collate", lambda: default_collate([torch.ones(2), torch.zeros(2)]))


def scripted():
    """TorchScript reads the sources of what it is given, of torch's own functions too."""
    find(
        "scripted optimizers", lambda: importlib.import_module("torch.distributed.optim").DistributedOptimizer.__name__
    )

    def total(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.softmax(x, 0).sum() + torch.norm(x)

    find("scripted function", lambda: torch.jit.script(total)(torch.ones(3)))


def described(value):
    if not callable(value) or isinstance(value, types.ModuleType):
        return type(value).__name__
    try:
        signature = str(inspect.signature(value)).split(" at 0x")[0]
    except (TypeError, ValueError):
        signature = "none"
    return [
        signature,
        *(str(getattr(value, name, None))[:2000] for name in ("__module__", "__name__", "__qualname__")),
        hash_of(inspect.getdoc(value)),
    ]


def hash_of(text):
    return sum(map(ord, text or ""))


def public_names():
    homes = [
        *(torch, torch.nn, torch.nn.utils, torch.nn.functional, torch.optim, torch.autograd, torch.autograd.function),
        *(torch.func, torch.masked, torch.utils, torch.utils.dlpack, torch.distributed, torch.distributed.device_mesh),
        *(torch.distributed.distributed_c10d, torch.Tensor, nn.Module, nn.Parameter, torch.autograd.Function),
        *(torch.nn.utils.clip_grad, torch.overrides, torch.serialization, torch.compiler),
        *OPTIMIZERS,
    ]
    for home in homes:
        for name in dir(home):
            if not name.startswith("_"):
                FOUND[f"{home.__name__}.{name}"] = described(getattr(home, name, None))
    trusted = (f"{value.__module__}.{value.__qualname__}" for value in torch.serialization.get_safe_globals())
    FOUND["safe globals"] = sorted(name for name in trusted if not name.startswith("terrazzo."))
    FOUND["settings"] = [
        *(torch.is_grad_enabled(), str(torch.get_default_dtype()), torch.get_num_threads(), len(warnings.filters)),
        *(torch.overrides._len_torch_function_stack(), sys.excepthook is sys.__excepthook__),
        torch.initial_seed() if torch.manual_seed(3) is None else None,
        torch.utils.data.get_worker_info(),
    ]


sys.stderr.write(f"IMPORTED {sorted(name for name in sys.modules if name.startswith('terrazzo'))}\n")
public_names()
scripted()
optimizers()
functions()
transforms()
clipping()
masked()
exporting()
compilation()
public_names()  # what was used is still what it was
print("FOUND " + json.dumps(FOUND))
