"""A config is understood or refused; what is refused is named."""

from __future__ import annotations

import json

import pytest

from terrazzo.engine import EngineConfig
from terrazzo.engine.config import Batch, as_mapping, read_config
from terrazzo.errors import EngineConfigError

CURRICULUM = {"curriculum_metrics": {"m": {"min_difficulty": 1}}, "enabled": True}
LTD = {"enabled": True, "random_ltd_layer_id": [1]}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"train_batch": 4}, "train_batch"),
        ({"zero_optimization": {"stage": 4}}, r"zero_optimization\.stage"),
        ({"zero_optimization": {"stages": 1}}, "stages"),
        ({"gradient_clipping": -1}, "gradient_clipping"),
        ({"train_batch_size": "8"}, "train_batch_size"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fp16.enabled and bf16.enabled"),
        ({"fp16": {"enabled": True, "initial_scale_power": 2, "min_loss_scale": 8}}, "min_loss_scale"),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, "offload_optimizer needs .* 1 or 2 or 3"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, "'nvme' is not supported: a param"),
        ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, "needs nvme_path"),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": "x", "step_on": "device"}}},
            "'nvme' with step_on 'device'",
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": "x", "buffer_count": 0}}},
            "buffer_count",
        ),
        ({"aio": {"block_sise": 1}}, "block_sise; did you mean block_size"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "gpu"}}}, r"offload_param\.device"),
        (
            {
                "zero_optimization": {
                    "stage": 3,
                    "offload_param": {"device": "cpu"},
                    "offload_optimizer": {"device": "cpu", "step_on": "device"},
                }
            },
            "step_on 'device' with offload_param",
        ),
        ({"sparse_gradients": True}, "leave it out"),
        ({"data_efficiency": {"data_sampling": {"curriculum_learning": CURRICULUM}}}, "sampler of your own"),
        ({"data_efficiency": {"data_routing": {"random_ltd": LTD}}}, "in the model's forward"),
        ({"curriculum_learning": {"enabled": True}}, "sampler of your own"),
        ('{"train_batch_size": ', "not valid JSON"),
        ("[1]", "readable file"),
        ("/no/such/file.json", "readable file"),
    ],
)
def test_what_is_refused(given, message):
    with pytest.raises(EngineConfigError, match=message):
        read_config(given)


def test_objects_and_files_and_keys_without_meaning(tmp_path):
    given = {
        "train_batch_size": 8,
        "wall_clock_breakdown": False,
        "zero_optimization": {"stage": 2, "overlap_comm": True, "offload_optimizer": {"device": "cpu", "ratio": 1.0}},
    }
    (tmp_path / "config.json").write_text(json.dumps(given))
    for source in (given, json.dumps(given), tmp_path / "config.json"):
        config, ignored = read_config(source)
        assert config.zero_optimization.stage == 2
        assert ignored.harmless == [
            "wall_clock_breakdown",
            "zero_optimization.overlap_comm",
            "zero_optimization.offload_optimizer.ratio",
        ]
        assert not ignored.warned
        assert config.zero_optimization.offload_optimizer.device == "cpu"
    assert read_config(config) == (config, ([], {}))
    with pytest.raises(EngineConfigError, match="train_batch_size"):
        read_config(EngineConfig(train_batch_size="many"))


@pytest.mark.parametrize(
    ("total", "micro", "accumulation", "expected"),
    [
        (16, None, None, Batch(16, 4, 1)),
        (16, 2, None, Batch(16, 2, 2)),
        (16, None, 2, Batch(16, 2, 2)),
        (None, 3, 2, Batch(24, 3, 2)),
        (None, 3, None, Batch(12, 3, 1)),
        (16, 4, 2, None),
        (15, None, None, None),
        (None, None, 2, None),
    ],
)
def test_batch_sizes(total, micro, accumulation, expected):
    config = EngineConfig(
        train_batch_size=total, train_micro_batch_size_per_gpu=micro, gradient_accumulation_steps=accumulation
    )
    if expected is None:
        with pytest.raises(EngineConfigError, match="train_batch_size"):
            config.batch(4)
    else:
        assert config.batch(4) == expected


def test_offload_of_parameters_is_for_stage_3():
    """DeepSpeed ignores it in other stages; here that is said."""
    checked, ignored = read_config({"zero_optimization": {"stage": 1, "offload_param": {"device": "cpu"}}})
    assert checked.zero_optimization.offload_param.device == "none"
    assert "offload_param (parameters are offloaded in stage 3 only)" in ignored.warning()


def test_json_may_have_comments_but_no_key_twice():
    text = '{"train_batch_size": 8, # all ranks\n /* not // yet */ "optimizer": {"type": "Adam"} // "x": 1\n}'
    assert as_mapping(text) == {"train_batch_size": 8, "optimizer": {"type": "Adam"}}
    assert as_mapping('{"wandb": {"project": "a#b//c"}}') == {"wandb": {"project": "a#b//c"}}
    with pytest.raises(EngineConfigError, match="twice: train_batch_size"):
        as_mapping('{"train_batch_size": 8, "train_batch_size": 4}')


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"bf_16": {}}, "config: there is no key bf_16; did you mean bf16?"),
        ({"zero_optimization": {"stag": 3}}, "config: there is no key zero_optimization.stag; did you mean stage?"),
        (
            {"zero_optimization": {"overlap_com": True}},
            "no key zero_optimization.overlap_com; did you mean overlap_comm?",
        ),
        (
            {"bf16": {"enabled": True, "xyz": 1}},
            "config: there is no key bf16.xyz; there are enabled, check_grad_overflow",
        ),
        (
            {"activation_checkpointing": {"partition_activation": True}},
            "no key activation_checkpointing.partition_activation; did you mean partition_activations?",
        ),
        ({"checkpoint": {"foo": 1}}, "config: there is no key checkpoint.foo; there are tag_validation, load_univ"),
        ({"bf16": {"enabled": False, "enable": 1}}, "there is no key bf16.enable; did you mean enabled?"),
        ({"zero_optimization": {"stage": 4}}, "config: zero_optimization.stage must be 0, 1, 2 or 3, not 4"),
        ({"train_batch_size": "8"}, "config: train_batch_size must be an integer of at least 1 or null, not '8'"),
        ({"train_batch_size": 0}, "config: train_batch_size must be an integer of at least 1 or null, not 0"),
        ({"gradient_clipping": -1}, "config: gradient_clipping must be a number of at least 0, not -1"),
        ({"bf16": {"enabled": "yes"}}, "config: bf16.enabled must be true or false, not 'yes'"),
        ({"optimizer": {"params": {}}}, "config: optimizer.type is missing"),
        ({"optimizer": {"type": 3}}, "config: optimizer.type must be a string, not 3"),
        ({"zero_optimization": [3]}, "zero_optimization must be an object with keys of stage, offload_optimizer, "),
    ],
)
def test_an_error_names_the_key_what_is_allowed_and_what_may_be_meant(given, told):
    with pytest.raises(EngineConfigError) as error:
        read_config(given)
    assert told in str(error.value)


@pytest.mark.parametrize(
    ("given", "ranks", "told"),
    [
        ({"train_batch_size": 7}, 2, "7 is not a multiple of 2 data-parallel ranks: use one, such as 6 or 8"),
        (
            {"train_batch_size": 3, "train_micro_batch_size_per_gpu": 4}, 1,
            "3 is not a multiple of train_micro_batch_size_per_gpu 4 x 1 data-parallel ranks = 4: use one, such as 4",
        ),
        (
            {"train_batch_size": 7, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2}, 2,
            "train_batch_size 7 is not train_micro_batch_size_per_gpu 3 x gradient_accumulation_steps 2 x 2 "
            "data-parallel ranks = 12: leave out one of the three",
        ),
    ],
)  # fmt: skip
def test_an_error_of_batch_sizes_names_what_was_given(given, ranks, told):
    with pytest.raises(EngineConfigError) as error:
        read_config(given)[0].batch(ranks)
    assert told in str(error.value)
