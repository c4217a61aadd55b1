"""`sequence_parallel_size`: ranks that share sequences train as one device does, with its losses and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import terrazzo.deepspeed
from engine.runs import averaged, drawn
from engine.test_tensor_parallel import LENGTH, VOCABULARY, gpt
from installed import needs
from ranks import run_ranks
from terrazzo.engine import initialize
from terrazzo.errors import EngineConfigError, EngineError

needs("transformers")

STEPS, BATCH, SEQUENCE = 3, 4, 16


def llama(kind: str = "sdpa", **more: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 29}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return drawn(lambda: LlamaForCausalLM(LlamaConfig(**sizes, **heads, attn_implementation=kind, **more)))


def batches() -> list[dict[str, Tensor]]:
    """With labels that are left out, more of them in some parts than in others, and padding in one batch."""
    generator = torch.Generator().manual_seed(3)
    result = []
    for step in range(STEPS):
        ids = torch.randint(29, (BATCH, SEQUENCE), generator=generator)
        labels = ids.clone()
        labels[:, : 5 + step] = -100
        mask = torch.ones_like(ids)
        if step == 1:
            mask[:2, 13:] = 0
            labels[:2, 13:] = -100
        result.append({"input_ids": ids, "labels": labels, "attention_mask": mask})
    return result


def settings(**more: Any) -> dict[str, Any]:
    optimizer = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}}
    return {"train_batch_size": BATCH, "optimizer": optimizer, "gradient_clipping": 0.5, **more}


def one_device() -> tuple[list[float], dict[str, Tensor]]:
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    losses = []
    for batch in batches():
        # Samples are averaged over data-parallel ranks as their losses are, each of as many labels here as the others.
        loss = model(**batch).loss
        loss.backward()
        losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return losses, dict(model.named_parameters())


def check_llama(world: int) -> None:
    expected, weights = one_device()
    for size, method, stage, face in (
        (2, "ulysses", 3, False),
        (2, "ring", 1, False),
        (2, "ulysses", 2, True),
        (4, "ulysses", 0, False),  # more ranks than heads of keys
        (4, "ring", 3, False),
    ):
        if size > world:
            continue
        config = settings(zero_optimization={"stage": stage}, sequence_parallel_size=size)
        engine: Any
        if face:
            engine = terrazzo.deepspeed.initialize(model=llama(), config=config)[0]
            core = engine.core
        else:
            engine = core = initialize(llama(), config={**config, "sequence_parallel_method": method})
        samples = core.ranks.samples
        assert (samples.size, core.dp_world_size, core.ranks.sequence.size) == (world // size, world // size, size)
        losses = []
        for batch in batches():
            # Every other sample, so that the padded ones are shared out evenly.
            mine = {name: t[samples.index :: samples.size] for name, t in batch.items()}
            outputs = engine(**mine)
            assert outputs.logits.shape[1] == SEQUENCE // size
            engine.backward(outputs.loss)
            losses.append(averaged(outputs.loss.detach()))
            engine.step()
        name = f"{size} {method} {stage}"
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5, msg=lambda m: f"{name}: {m}")  # noqa: B023
        for at, value in core.module_state_dict().items():
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            torch.testing.assert_close(whole, weights[at].detach(), rtol=1e-4, atol=1e-4, msg=lambda m: f"{name}: {m}")  # noqa: B023


@pytest.mark.parametrize("world", [2, 4])
def test_a_model_of_hugging_face(world):
    run_ranks(world, check_llama, world)


class WithPlaces(nn.Module):
    """A GPT that is told the positions of its tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = gpt()

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        return self.gpt(self.gpt.words(x) + self.gpt.places(places))


def check_loss_outside() -> None:
    generator = torch.Generator().manual_seed(2)
    x, y = (torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator) for _ in range(2))
    places = torch.arange(LENGTH).expand(BATCH, LENGTH)
    one = WithPlaces()
    expected = F.cross_entropy(one(x, places).flatten(0, 1), y.flatten())
    expected.backward()
    config = settings(sequence_parallel_size=2, gradient_clipping=0.0)
    engine = initialize(WithPlaces(), config=config)
    loss = F.cross_entropy(engine(x, places).flatten(0, 1), engine.sequences.part(y).flatten())
    engine.backward(loss)
    assert averaged(loss.detach()) == pytest.approx(expected.item(), rel=1e-5)
    wanted = dict(one.named_parameters())
    for name, p in engine.module.named_parameters():
        if p.requires_grad:
            torch.testing.assert_close(p.grad.full_tensor(), wanted[name].grad, rtol=1e-4, atol=1e-5)
    with pytest.raises(EngineError, match="5 positions on dim 1 .* pad the sequence to a multiple of 2"):
        engine(x[:, :5], places[:, :5])
    linear = initialize(nn.Linear(4, 4), config=config)
    with pytest.raises(EngineError, match="has not called torch's scaled_dot_product_attention"):
        linear(torch.ones(2, 4, 4))
    with pytest.raises(EngineConfigError, match="sequence_parallel_size 3 does not divide the 2"):
        initialize(nn.Linear(4, 4), config=settings(sequence_parallel_size=3))
    eager = initialize(llama("eager"), config=config)
    with pytest.raises(EngineError, match="attn_implementation='sdpa', not 'eager'"):
        eager(**batches()[0])
    from transformers import MistralConfig, MistralForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 29}
    windowed = MistralForCausalLM(MistralConfig(**sizes, num_attention_heads=2, sliding_window=8))
    with pytest.raises(EngineError, match=r"sliding_attention \(a window of 8 in sequences of 16\)"):
        initialize(windowed, config=config)(**batches()[0])


def check_other_labels() -> None:
    """Labels that are not shifted: the loss is one device's, or it is refused."""
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
        LlamaForSequenceClassification,
        LlamaForTokenClassification,
    )

    unclipped = settings(train_batch_size=2, sequence_parallel_size=2, gradient_clipping=0.0)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 29, "pad_token_id": 0}
    config = LlamaConfig(**sizes, num_attention_heads=2, num_labels=3, is_causal=True)
    ids = torch.randint(1, 29, (2, SEQUENCE), generator=torch.Generator().manual_seed(4))
    labels = ids % 3
    labels[:, [1, 9]] = -100
    model = drawn(lambda: LlamaForTokenClassification(config)).eval()
    expected = model(input_ids=ids, labels=labels).loss.item()
    engine = initialize(model, config=settings(train_batch_size=2, sequence_parallel_size=2))
    assert engine(input_ids=ids, labels=labels).loss.item() == pytest.approx(expected, rel=1e-5)
    labels[:, :3] = -100
    with pytest.raises(EngineError, match=r"have \[10, 14\] labels that count .* outside of the model"):
        engine(input_ids=ids, labels=labels)
    small = GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=29, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0)
    alone = drawn(lambda: GPT2LMHeadModel(small))  # Transformers does not know its loss by its name
    expected = alone(input_ids=ids, labels=ids).loss
    expected.backward()
    engine = initialize(drawn(lambda: GPT2LMHeadModel(small)), config=unclipped)
    loss = engine(input_ids=ids, labels=ids).loss
    engine.backward(loss)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for (name, p), wanted in zip(engine.module.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), wanted.grad, rtol=1e-4, atol=1e-5, msg=name)

    class Mine(LlamaForCausalLM):
        def forward(self, labels: Tensor, position_ids: Any = None, **more: Any) -> Any:
            logits = LlamaForCausalLM.forward(self, position_ids=position_ids, input_ids=more["input_ids"]).logits
            return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    with pytest.raises(EngineError, match="computes its loss by itself, of each part alone"):
        initialize(Mine(config), config=unclipped)(input_ids=ids, labels=ids)
    config.is_encoder_decoder = True  # T5Gemma 2 is told positions, those of its encoder
    with pytest.raises(EngineError, match="has an encoder and a decoder, with sequences of their own"):
        initialize(LlamaForCausalLM(config), config=unclipped)(input_ids=ids, labels=ids)
    config.is_encoder_decoder = False
    of_all = initialize(
        LlamaForSequenceClassification(config), config=settings(train_batch_size=2, sequence_parallel_size=2)
    )
    with pytest.raises(EngineError, match="result for a whole sequence of 16 positions"):
        of_all(input_ids=ids, labels=torch.tensor([0, 2]))


def check_arguments() -> None:
    """What is no sequence stays whole, or is refused; a mask of padding is causal where attention is."""
    from transformers import (
        BartConfig,
        BartForConditionalGeneration,
        BertConfig,
        BertForQuestionAnswering,
        BertModel,
        GPT2Config,
        GPT2ForTokenClassification,
        LlamaConfig,
        LlamaForTokenClassification,
    )

    config = settings(train_batch_size=2, sequence_parallel_size=2)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 29}
    ids = torch.randint(1, 29, (2, SEQUENCE), generator=torch.Generator().manual_seed(4))
    mask = torch.ones_like(ids)
    mask[1, 12:] = 0
    for kind, tiny in (
        (LlamaForTokenClassification, LlamaConfig(**sizes, num_attention_heads=2, num_labels=3)),
        (GPT2ForTokenClassification, GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=29, num_labels=3)),
    ):
        alone = drawn(lambda: kind(tiny)).eval()  # noqa: B023  # called at once
        expected = alone(input_ids=ids, attention_mask=mask).logits.detach()
        engine = initialize(drawn(lambda: kind(tiny)), config=config)  # noqa: B023
        engine.eval()
        logits = engine(input_ids=ids, attention_mask=mask).logits
        real = engine.sequences.part(mask).bool()
        torch.testing.assert_close(logits[real], engine.sequences.part(expected)[real], rtol=1e-4, atol=1e-5)
    answers = initialize(BertForQuestionAnswering(BertConfig(**sizes, num_attention_heads=2)), config=config)
    for more in ({}, {"start_positions": torch.tensor([1, 9]), "end_positions": torch.tensor([2, 10])}):
        with pytest.raises(EngineError, match="a BertForQuestionAnswering has a result for a whole sequence of 16"):
            answers(input_ids=ids, **more)

    class Mine(BertForQuestionAnswering):
        """A user's own class."""

    for kind, words in ((Mine, "a BertForQuestionAnswering has"), (BertModel, "a BertModel with a pooler has")):
        engine = initialize(kind(BertConfig(**sizes, num_attention_heads=2)), config=config)
        with pytest.raises(EngineError, match=f"{words} a result for a whole sequence"):
            engine(input_ids=ids)
    widths = {"d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    both = BartForConditionalGeneration(BartConfig(**widths, **heads, vocab_size=29, pad_token_id=0))
    with pytest.raises(EngineError, match="BartForConditionalGeneration does not take position_ids"):
        initialize(both, config=config)(input_ids=ids, labels=ids)

    class Heads(WithPlaces):
        def forward(self, x: Tensor, places: Tensor, heads: Tensor) -> Tensor:
            return super().forward(x, places) * heads.sum()

    x = torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(2))
    engine = initialize(Heads(), config=config)
    places = torch.arange(LENGTH)[None]
    assert engine(x, places, torch.ones(3, LENGTH + 1)).shape[1] == LENGTH // 2
    with pytest.raises(EngineError, match=rf"argument 2 of shape \(3, {LENGTH}\) have the sequence of {LENGTH} pos"):
        engine(x, places, torch.ones(3, LENGTH))


def check_adapters() -> None:
    """peft's model around one of Hugging Face's."""
    peft = pytest.importorskip("peft")

    def adapted() -> nn.Module:
        return peft.get_peft_model(
            llama(), peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        )

    alone = drawn(adapted)
    expected = alone(**batches()[0]).loss
    expected.backward()
    engine = initialize(drawn(adapted), config=settings(sequence_parallel_size=2, gradient_clipping=0.0))
    outputs = engine(**batches()[0])
    engine.backward(outputs.loss)
    assert outputs.loss.item() == pytest.approx(expected.item(), rel=1e-5)
    wanted = dict(alone.named_parameters())
    trained = [(name, p) for name, p in engine.module.named_parameters() if p.requires_grad]
    assert len(trained) > 3
    for name, p in trained:
        torch.testing.assert_close(p.grad.full_tensor(), wanted[name].grad, rtol=1e-4, atol=1e-5)
    prompts = peft.get_peft_model(llama(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(EngineConfigError, match="peft puts a prompt before the sequence"):
        initialize(prompts, config=settings(sequence_parallel_size=2))


def check_outside_and_labels() -> None:
    check_adapters()
    check_loss_outside()
    check_other_labels()
    check_arguments()


def test_a_loss_outside_of_the_model_and_what_is_refused():
    run_ranks(2, check_outside_and_labels)
