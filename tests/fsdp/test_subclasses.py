"""Parameters that are tensor subclasses say what is gathered, and train as under PyTorch's fully_shard."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_map_only

from fsdp.compare import Counted
from ranks import device_type, run_ranks
from terrazzo.errors import FSDPError, FSDPValueError
from terrazzo.fsdp import MixedPrecisionPolicy, fully_shard, report
from terrazzo.tensor import DTensor, Shard, init_device_mesh

pytestmark = pytest.mark.on_late


class Pair(TwoTensor):
    """Gathers both of its tensors, with the older of the two signatures."""

    def fsdp_pre_all_gather(self, mesh):
        assert mesh.ndim == 1
        return (self.a, self.b), None

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        a, b = outputs
        if out is None:
            return Pair(a, b).to(param_dtype), outputs
        assert isinstance(out, TwoTensor)
        if a.dtype == param_dtype:
            assert (out.a.data_ptr(), out.b.data_ptr()) == (a.data_ptr(), b.data_ptr())
        else:
            out.a.copy_(a)
            out.b.copy_(b)
        return None


class Scaled8(Tensor):
    """Float outside, and in operations; gathered as int8 with a scale for each row, padded where rows do not divide."""

    @staticmethod
    def __new__(cls, data: Tensor):
        return Tensor._make_wrapper_subclass(cls, data.shape, dtype=data.dtype, device=data.device)

    def __init__(self, data: Tensor) -> None:
        self.inside = data

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        assert outer_size[1] == self.shape[1] and isinstance(module, nn.Linear) and mp_policy.param_dtype is None
        rows = -(-outer_size[0] // mesh.size())
        scale = torch.ones(rows, dtype=torch.float32, device=self.device)
        values = torch.zeros(rows, outer_size[1], dtype=torch.int8, device=self.device)
        if self.shape[0]:
            scale[: self.shape[0]] = self.inside.abs().amax(1).clamp(min=1e-6) / 127
            values[: self.shape[0]] = (self.inside / scale[: self.shape[0], None]).round().to(torch.int8)
        return (values, scale), "scaled"

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        assert metadata == "scaled"
        values, scale = outputs
        if out is None:
            made = values.to(param_dtype) * scale[:, None]
            return made, (*outputs, made)
        with torch.autograd._unsafe_preserve_version_counter(out):
            torch.mul(values[: out.shape[0]], scale[: out.shape[0], None], out=out.data)
        return None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(cls, lambda x: x.inside, (args, kwargs or {}))
        out = func(*args, **kwargs)
        return tree_map_only(Tensor, lambda x: x if isinstance(x, cls) else cls(x), out)

    def __tensor_flatten__(self):
        return ["inside"], None

    @staticmethod
    def __tensor_unflatten__(inner, meta, size, stride):
        return Scaled8(inner["inside"])


def make(kind: type[Tensor], widths: list[int]) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential()
    for a, b in zip(widths, widths[1:], strict=False):
        layer = nn.Linear(a, b, bias=kind is not Pair)
        data = layer.weight.detach()
        layer.weight = nn.Parameter(kind(data, data.clone()) if kind is Pair else kind(data))
        model.append(layer)
    return model


def shard(model: nn.Sequential, function, **options) -> None:
    for layer in model:
        function(layer, **options)
    function(model, **options)


def plain(x: Tensor) -> Tensor:
    x = x.to_local() if hasattr(x, "to_local") else x
    return x.a if isinstance(x, TwoTensor) else x.inside if isinstance(x, Scaled8) else x


def check_like_torchs(kind: type[Tensor], widths: list[int], world: int) -> None:
    mesh = init_device_mesh(device_type(), (world,))
    for reshard in (True, False):
        ours, theirs = make(kind, widths), make(kind, widths)
        shard(ours, fully_shard, mesh=mesh, reshard_after_forward=reshard)
        shard(theirs, torch_fsdp.fully_shard, mesh=mesh, reshard_after_forward=reshard)
        optimizers = [torch.optim.Adam(m.parameters(), lr=0.05) for m in (ours, theirs)]
        generator = torch.Generator().manual_seed(torch.distributed.get_rank())
        for step in range(4):
            x = torch.randn(3, widths[0], generator=generator)
            losses = []
            for model, optimizer in zip((ours, theirs), optimizers, strict=True):
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=step % 2 == 0)
                losses.append(plain(loss.detach()))
            torch.testing.assert_close(losses[0], losses[1])
        seen: list[Tensor] = []
        hook = ours[0].register_forward_hook(lambda module, args, out, seen=seen: seen.append(module.weight))
        with torch.no_grad():
            ours(x)
        hook.remove()
        assert (plain(seen[0]).untyped_storage().nbytes() == 0) is reshard  # memory is given back
        for layer in ours:
            layer.reshard()
            assert type(layer.weight.to_local()) is kind
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(plain(a.detach()), plain(b.detach()))


def test_both_tensors_of_a_pair():
    run_ranks(2, check_like_torchs, Pair, [4, 8, 4], 2)


def test_scaled_integers():
    run_ranks(2, check_like_torchs, Scaled8, [4, 6, 2], 2)


def check_uneven() -> None:
    """Rows that do not divide, and a rank without any: PyTorch does not run this twice, so it is checked by itself."""
    model = make(Scaled8, [3, 5, 1])
    reference = copy.deepcopy(model)
    shard(model, fully_shard, mesh=init_device_mesh(device_type(), (2,)), reshard_after_forward=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    weights = [layer.weight.inside.clone() for layer in reference]
    biases = [layer.bias.detach().clone() for layer in reference]
    for step in range(3):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        # By hand: operations see what the integers say, and the step goes to what they were made of.
        seen = []
        for w in weights:
            scale = w.abs().amax(1).clamp(min=1e-6) / 127
            seen.append(((w / scale[:, None]).round() * scale[:, None]).requires_grad_())
        free = [b.requires_grad_() for b in biases]
        y = x
        for w, b in zip(seen, free, strict=True):
            y = y @ w.T + b
        y.square().mean().backward()
        weights = [w - 0.05 * s.grad for w, s in zip(weights, seen, strict=True)]
        biases = [b.detach() - 0.05 * b.grad for b in free]
    for layer, w in zip(model, weights, strict=True):
        own = layer.weight.to_local().inside
        rows = -(-len(w) // 2)
        torch.testing.assert_close(own, w[rows * torch.distributed.get_rank() :][: len(own)])


def test_uneven_rows():
    run_ranks(2, check_uneven)


def check_half_and_replicas() -> None:
    """Computed with in half precision, from the meta device, on replicas: errors would show."""
    with torch.device("meta"):
        model = make(Pair, [4, 8, 4])
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    shard(model, fully_shard, mesh=init_device_mesh(device_type(), (2, 2)), mp_policy=policy)
    model.to_empty(device=device_type())
    for p in model.parameters():
        nn.init.trunc_normal_(p)
        p.detach().fill_(0.5)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(3):
        out = model(torch.ones(2, 4))
        assert out.dtype is torch.bfloat16
        out.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    values = plain(model[0].weight.detach())
    assert bool((values < 0.5).all()) and bool(values.isfinite().all())


def test_half_precision_meta_device_and_replicas():
    run_ranks(4, check_half_and_replicas)


def check_together() -> None:
    """Those of small groups share a message, which is the same numbers as one message each; also when they part."""
    mesh = init_device_mesh(device_type(), (2,))
    model, alone = make(Scaled8, [4, 6, 5, 8, 3]), make(Scaled8, [4, 6, 5, 8, 3])
    for each, nbytes in ((model, 4 << 20), (alone, 0)):
        shard(each, fully_shard, mesh=mesh, reshard_after_forward=True)
        each.set_coalesce_bytes(nbytes)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.05) for each in (model, alone)]
    for step in range(6):
        if step == 2:
            model.set_coalesce_bytes(0)
        elif step == 4:
            model.set_coalesce_bytes(4 << 20)
        for each in (model, alone):
            each.set_requires_gradient_sync(step % 2 == 1)
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
        with Counted() as kinds:
            model(x).square().mean().backward()
        if step % 2:  # for weights and for biases, in forward and in backward
            assert kinds.count("all_gather") == (16 if step == 3 else 4)
            # Rows of integers with a scale each, as many as the rank with most has; biases, padded on accelerators.
            sent = 3 * (4 + 4) + 3 * (6 + 4) + 4 * (5 + 4) + 2 * (8 + 4) + (11 if device_type() == "cpu" else 12) * 4
            assert sum(each.moved_forward for each in report(model).groups) == sent
        alone(x).square().mean().backward()
        if step % 2:
            for a, b in zip(model.parameters(), alone.parameters(), strict=True):
                assert torch.equal(plain(a.grad), plain(b.grad))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for a, b in zip(model.parameters(), alone.parameters(), strict=True):
            assert torch.equal(plain(a.detach()), plain(b.detach()))


def test_small_groups_share_messages():
    run_ranks(2, check_together)


class NoHooks(TwoTensor):
    pass


class Opaque(Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


class Named(nn.Parameter):
    pass


def check_refused() -> None:
    mesh = init_device_mesh(device_type(), (2,))

    def layer(weight: Tensor) -> nn.Linear:
        result = nn.Linear(4, 4, bias=False)
        result.weight = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight)
        return result

    with pytest.raises(FSDPError, match=r"'weight' is a NoHooks.*fsdp_pre_all_gather"):
        fully_shard(layer(NoHooks(torch.eye(4), torch.eye(4))), mesh=mesh)
    with pytest.raises(FSDPError, match=r"'weight' is a Opaque.*__tensor_flatten__"):
        fully_shard(layer(torch.eye(4).as_subclass(Opaque)), mesh=mesh)
    with pytest.raises(FSDPValueError, match="along dim 0"):
        fully_shard(layer(Pair(torch.eye(4), torch.eye(4))), mesh=mesh, shard_placement_fn=lambda p: Shard(1))
    # What was refused is as it was, and can be called again with other arguments.
    again = nn.Sequential(nn.Linear(4, 4), layer(NoHooks(torch.eye(4), torch.eye(4))))
    before = dict(again.named_parameters())
    with pytest.raises(FSDPError, match="or add the parameter to ignored_params"):
        fully_shard(again, mesh=mesh)
    assert all(p is before[name] for name, p in again.named_parameters())
    fully_shard(again, mesh=mesh, ignored_params={again[1].weight})
    assert isinstance(again[0].weight, DTensor) and again[1].weight is before["1.weight"]
    kept = layer(Named(torch.eye(4)))  # a class without operations of its own is a plain parameter
    fully_shard(kept, mesh=mesh)(torch.ones(1, 4)).sum().backward()


def test_refused():
    run_ranks(2, check_refused)


class Doubling(nn.Module):
    """Writes to its weight while it runs."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight, self.writes = weight, False

    def forward(self, x: Tensor) -> Tensor:
        if self.writes:
            with torch.no_grad():
                self.weight.mul_(2)
        return nn.functional.linear(x, self.weight)


def check_writes() -> None:
    """A write that cannot reach the shards raises: one in forward, and one after an evaluation."""
    x = torch.randn(3, 4)
    for reshard in (True, False):
        model = Doubling(make(Pair, [4, 4])[0].weight)
        fully_shard(model, mesh=init_device_mesh(device_type(), (2,)), reshard_after_forward=reshard)
        before = plain(model.weight.to_local().detach()).clone()
        for _ in range(2):  # gathering again is no write
            model(x).sum().backward()
            with torch.no_grad():
                model(x)
        if reshard:
            model.writes = True
        else:
            model.zero_grad()  # while it has a gradient, the module shows the sharded parameter after an evaluation
            with torch.no_grad():
                model(x)
                model.weight.mul_(2)
        with pytest.raises(FSDPError, match=r"'weight' was written to.* is a Pair"):
            model(x)
        model.writes = False
        model.reshard()
        assert torch.equal(plain(model.weight.to_local().detach()), before)
        model(x).sum().backward()  # it goes on


def test_a_write_to_an_unsharded_subclass_raises():
    run_ranks(2, check_writes)
