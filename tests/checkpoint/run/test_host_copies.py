"""Copies of the state in host memory: large tensors as bytes, with the same result as PyTorch's copy."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from terrazzo.checkpoint import BlockingAsyncStager
from terrazzo.checkpoint.run.staging import HostMemory

LARGE = 600_000  # elements; some bytes more than a page


def sources() -> dict[str, torch.Tensor]:
    real, numbers = torch.randn(LARGE), torch.randn(LARGE, dtype=torch.complex64)
    return {
        "plain": real,
        "bfloat16": real.bfloat16(),
        "turned": torch.randn(1000, 600).t(),
        "part": torch.randn(1000, 1200)[:, 1:601],
        "conj": numbers.conj(),
        "neg": torch._neg_view(real),
        "expanded": torch.randn(600, 1).expand(600, 1000),
        "parameter": torch.nn.Parameter(torch.randn(LARGE)),
        "small": torch.randn(7),
        "none": torch.empty(0, 3),
        "shifted": torch.randn(LARGE + 1)[1:],
    }


@pytest.mark.parametrize("threads", [1, 2])
def test_copies_are_what_pytorch_copies(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    stager = BlockingAsyncStager(cache_staged_state_dict=True)
    for _ in range(2):  # the second time into the same memory
        state = sources()
        expected = {name: value.detach().resolve_conj().resolve_neg().clone() for name, value in state.items()}
        staged = stager.stage(state)
        for name in state.keys() - {"expanded"}:
            state[name].detach().zero_()  # training goes on
        for name, value in expected.items():
            assert torch.equal(staged[name], value), name


def test_one_thread_copies_large_tensors_as_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[torch.Tensor] = []
    copy = torch._foreach_copy_

    def remembered(targets: Any, given: Any) -> None:
        copied.extend(given)
        copy(targets, given)

    monkeypatch.setattr(torch, "_foreach_copy_", remembered)
    state = sources()
    for threads, by_pytorch in (
        (1, {"turned", "part", "conj", "neg", "expanded", "small", "none"}),
        (2, set(state)),
    ):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        HostMemory().copy(list(state.values()))
        assert {name for name, value in state.items() if any(value is each for each in copied)} == by_pytorch
        copied.clear()
