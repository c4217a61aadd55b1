"""Each mutation finds its place in today's code; `make proofs` shows that each is found on the device."""

from __future__ import annotations

import pytest

from terrazzo.fsdp.plan.operations import Kind
from tests.testing.late.mutations import MUTATIONS, Mutation, place_of


def test_every_mutation_finds_its_place():
    gone = []
    for mutation in MUTATIONS:
        try:
            if mutation.old:
                place_of(mutation)
            elif mutation.planned[0] == "wait":
                Kind[mutation.planned[1]]
        except LookupError as error:
            gone.append(str(error))
    assert not gone, "\n".join(gone)


def test_what_is_gone_is_named():
    for what, old in (
        ("terrazzo.fsdp.offload:nothing", "x"),
        ("terrazzo.fsdp.nothing:x", "x"),
        ("terrazzo.fsdp.offload:to_host", "not there"),
    ):
        with pytest.raises(LookupError, match="mend this table"):
            place_of(Mutation(what, lambda device: None, old, "pass"))
