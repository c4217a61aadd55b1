"""The operations that programs are made of, as text: `{}` is a tensor, `$name` is filled in by `generate`.

Entries are separated by lines or two blanks; one that stands twice is drawn twice as often.
"""

from __future__ import annotations


def _entries(text: str) -> tuple[str, ...]:
    return tuple(entry for line in text.splitlines() for entry in line.strip().split("  ") if entry)


SAME = _entries("""
    {}.float()  {}.double()  {}.half()  {}.long()  {}.bool()  {}.to($dtype)  {}.to($other_dtype)  {}.type($dtype)
    {}.to($partner)  {}.type_as($partner)  {}.to("cpu")  {}.cpu()  {}.to('cpu', $dtype)  {}.to(device='cpu')
    {}.to(dtype=$dtype, copy=True)  torch.Tensor.float({})  {}.contiguous()  {}.contiguous()
    {}.contiguous(memory_format=torch.contiguous_format)  (+{})  {}.positive()  torch.positive({})
    {}.detach()  torch.detach({})  {}.data  {}.conj()  torch.conj({})  {}.resolve_conj()  {}.resolve_neg()  {}.alias()
    {}.reshape($shape)  torch.reshape(input={}, shape=$shape)  {}.view($shape)  {}.view_as({})  {}.expand($shape)
    {}.expand_as({})  torch.broadcast_to({}, $shape)  {}.squeeze()  torch.squeeze(input={})  torch.flatten(input={})
    torch.ravel({})  torch.atleast_1d({})  torch.atleast_3d({})  {}.mH  {}.H  {}.real  torch.real({})  {}.imag
    {}.requires_grad_(False)  torch.nn.Identity()({})  F.dropout({}, 0.5, False)  F.dropout({}, 0.0)
    torch.asarray({})  torch.as_tensor({})  copy.copy({})  torch.unsafe_chunk({}, 1)[0]
    {}.clone()  torch.clone({})  copy.deepcopy({})  {}.conj_physical()  {}.abs()  ({} * 1)  (-{})
    {}.round()  {}.trunc()  {}.floor()  {}.sum(0)
""")
"""What returns the same tensor, or shares its memory, if there is nothing to do."""

OF_SCALARS = _entries("""
    {}.view(1)  {}.reshape(1, 1)  {}.unsqueeze(0)  {}.expand(2)  {}.flatten()  {}[None]
""")

VIEWS = _entries("""
    {}.view$reshaped  {}.view$reshaped  {}.reshape$reshaped  {}.reshape$reshaped  torch.reshape({}, $reshaped)
    {}.permute($permuted)  {}.permute(*$permuted)  torch.permute({}, dims=$permuted)
    {}.transpose($d, $e)  {}.swapaxes($d, $e)  {}.swapdims($d, $e)  {}.movedim($d, $e)  {}.moveaxis($d, $e)
    torch.transpose({}, $d, $e)  torch.swapaxes({}, $d, $e)  torch.movedim({}, $d, $e)
    {}.t()  torch.t({})  {}.T  {}.mT  {}.adjoint()
    {}.squeeze($d)  {}.squeeze()  torch.squeeze({}, ($d, $e))  {}.unsqueeze($d)  torch.unsqueeze({}, dim=$d)
    {}.flatten()  {}.flatten($d, $e)  torch.flatten({}, start_dim=$d)  {}.ravel()  {}.unflatten($d, $factors)
    {}.diagonal()  {}.diagonal($small, $d, $e)  {}.diag()  {}.unfold($d, $window, $window)  {}.as_strided((2,), (1,))
    {}.narrow($d, $range)  torch.narrow({}, $d, $range)  {}.select($d, $at)  torch.select({}, $d, $at)
    {}.split($window, $d)[$half]  {}.chunk(2, $d)[$half]  {}.unbind($d)[$half]  {}.split($sizes, $d)[$half]
    {}.tensor_split(2, $d)[$half]  {}.tensor_split([1], $d)[$half]  list({})[$half]
    {}.expand($expanded)  torch.broadcast_to({}, $expanded)  {}.expand_as($any)
    torch.view_as_real({})  {}.view(torch.int32)
    {}.flip($d)  {}.roll(1, $d)  {}.index_select($d, $row)  {}.sum($d)  {}.cumsum($d)
    {}.contiguous().take_along_dim($row)
    torch.cat([{}, {}])  torch.stack([{}, {}])  {}.repeat_interleave(2, $d)
""")

WRITES = _entries("""
    {}.zero_()  {}.zero_()  {}.add_(1)  {}.add_(other=1)  {}.mul_(2)  {}.fill_($digit)  {}.neg_()  torch.neg_({})
    torch.Tensor.add_({}, 1)  torch.Tensor.zero_({})  {}.__iadd__(2)  {}.clamp_(-3, 4)  {}.clamp_min_(0)
    {}.abs_()  {}.sign_()  {}.relu_()  F.relu({}, inplace=True)  {}.floor_()  {}.ceil_()  {}.triu_()
    {}.conj_physical_()  {}.cumsum_($d)  {}.fill_diagonal_(7)  torch.nn.init.ones_({})  {}.bernoulli_(1.0)
    torch._foreach_add_([{}], 1)  torch._foreach_zero_([{}])
    {}.copy_($operand)  {}.copy_($operand)  {}.add_($operand)  {}.sub_($operand, alpha=2)
    {}.masked_fill_($mask, 5)  {}.masked_scatter_($mask, $constant)  {}.index_fill_($d, $row, 6)
    {}.index_copy_($d, $row, $slab)  {}.index_add_($d, $row, $slab)  {}.scatter_($d, $lane, 8)
    {}.index_put_(($row0,), torch.tensor(4))
    {}.t_()  {}.transpose_($d, 0)  {}.swapaxes_($d, 0)  {}.squeeze_()  {}.unsqueeze_(0)  {}.detach_()
    {}.resize_(2)
""")

OUTS = _entries("""
    torch.add($same, $operand, out={})  torch.add($same, 1, out={})  torch.neg($same, out={})
    torch.mul($same, other=$operand, out={})  torch.abs($same, out={})  torch.maximum($same, $operand, out={})
    torch.cumsum($same, 0, out={})  torch.clamp($same, min=0, out={})  torch.where($same > 0, $same, $operand, out={})
    torch.cat([$same], out={})  torch.sum(torch.stack([$same, $same]), 0, out={})
    torch.cat([$same[:1], $same[1:]], out={})
""")

PARTS = _entries("""
    {}.split($window, $d)  {}.split($sizes, dim=$d)  torch.split({}, 2)  torch.split_with_sizes({}, $sizes, $d)
    {}.chunk($window, $d)  torch.chunk(input={}, chunks=2, dim=$d)  {}.unbind($d)  torch.unbind({})
    {}.tensor_split($window, $d)  {}.tensor_split(($at,), $d)  {}.hsplit(2)  {}.vsplit(2)  {}
    torch.broadcast_tensors({}, $any)  torch.meshgrid({}, $any, indexing='ij')  torch.atleast_2d({}, $any)
    {}.aminmax(dim=$d)  {}.sort($d, stable=True)
""")
"""What gives several tensors."""

QUESTIONS = _entries("""
    {}.tolist()  len({})  {}.numel()  {}.dim()  {}.ndim  {}.item()  bool({}.any())  {}.all().item()  {}.shape
    {}.size()  {}.size(-1)  {}.size(0)  {}.size(dim=0)  {}.size(dim=5)  {}.dtype  float({}.sum())
    {}.max().item()  int({}.argmax())  torch.equal({}, $any)  {}.is_same_size($any)  {}.is_floating_point()
    {}.is_complex()  torch.is_complex({})  {}.element_size()  {}.nbytes  {}.nonzero().shape  list({}.shape)
    [t.shape for t in {}]  {}.T.shape  {}.requires_grad  {}.is_leaf  3 in {}  {}.count_nonzero().item()
    {}.unique().tolist()  torch.numel({})  torch.is_tensor({})  {}.is_contiguous()
""")
"""What gives no tensor."""
