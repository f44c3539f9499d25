"""Tests the import paths and parameter names that existing slime plug-ins use."""

from __future__ import annotations

import importlib
import inspect

import pytest

from slime import hooks, loss_mask, protocols, types
from slime.algo import surrogates
from slime.data import packing, prompts, source, tokenizer
from slime.peers import http
from slime.rollout import data_source, eval_datasets, generate, metrics, rewards, vllm_rollout
from slime.tracking import outbox

# Each line has a module, a name, and the parameters that a plug-in passes: a prefix of the signature. "=" marks a
# default.
PATHS = """
slime.utils.misc load_function path
slime.utils.misc group_by iterable key=
slime.utils.logging_utils log args metrics step_key
slime.utils.logging_utils configure_logger prefix=
slime.utils.tracking_utils log args metrics step_key
slime.utils.metric_utils compute_pass_rate flat_rewards group_size num_groups=
slime.utils.metric_utils compute_rollout_step args rollout_id
slime.utils.metric_utils compute_statistics values
slime.utils.metric_utils dict_add_prefix d prefix
slime.utils.metric_utils has_repetition text
slime.observability.logging_utils log args metrics step_key
slime.observability.logging_utils configure_logger prefix=
slime.observability.metric_utils compute_pass_rate flat_rewards group_size num_groups=
slime.observability.metric_utils compute_rollout_step args rollout_id
slime.observability.metric_utils compute_statistics values
slime.observability.metric_utils dict_add_prefix d prefix
slime.observability.metric_utils has_repetition text
slime.observability.rollout_metrics compute_metrics_from_samples args samples
slime.observability.rollout_metrics compute_perf_metrics_from_samples args samples rollout_time
slime.ray.rollout compute_metrics_from_samples args samples
slime.ray.rollout compute_perf_metrics_from_samples args samples rollout_time
slime.ray.rollout compute_rollout_step args rollout_id
slime.ray.rollout compute_pass_rate flat_rewards group_size num_groups=
slime.ray.rollout compute_statistics values
slime.ray.rollout dict_add_prefix d prefix
slime.ray.rollout has_repetition text
slime.ray.rollout_data_source RolloutDataSource args
slime.ray.rollout_data_source RolloutDataSourceWithBuffer args
slime.rollout.data_source RolloutDataSource args
slime.utils.http_utils get_host_info
slime.utils.mask_utils get_response_lengths loss_masks
slime.utils.http_utils post url payload max_retries= headers=
slime.utils.http_utils get url payload= max_retries= headers=
slime.utils.processing_utils load_tokenizer name_or_path
slime.utils.mask_utils MultiTurnLossMaskGenerator tokenizer tokenizer_type=
slime.utils.ppo_utils compute_approx_kl log_probs log_probs_base kl_loss_type importance_ratio=
slime.utils.ppo_utils compute_policy_loss ppo_kl advantages eps_clip eps_clip_high eps_clip_c=
slime.utils.ppo_utils compute_cispo_loss ppo_kl log_probs advantages eps_clip eps_clip_high
slime.utils.ppo_utils chunked_gae rewards values gamma lambd chunk_size=
slime.utils.ppo_utils vanilla_gae rewards values gamma lambd
slime.utils.ppo_utils chunked_discounted_returns rewards discount chunk_size=
slime.utils.ppo_utils get_reinforce_plus_plus_returns rewards kl loss_masks response_lengths total_lengths kl_coef gamma
slime.rollout.data_source pop_first args rollout_id buffer num_samples
slime.rollout.filter_hub.base_types should_drop_dynamic_filter_output output remaining_batch_size target_data_size
slime.rollout.sglang_rollout load_function path
slime.rollout.sglang_rollout async_rm args sample
slime.utils.ppo_utils calculate_log_probs_and_entropy logits tokens tp_group with_entropy= chunk_size=
slime.utils.data read_file path
slime.utils.data Dataset path tokenizer processor max_length
slime.utils.data filter_long_prompt samples tokenizer processor max_length
slime.utils.dp_schedule build_dp_schedule args total_lengths rollout_ids
slime.utils.eval_config build_eval_dataset_configs args raw_config defaults
slime.rollout.base_types RolloutFnTrainOutput samples metrics=
slime.rollout.base_types RolloutFnEvalOutput data metrics=
slime.rollout.base_types call_rollout_fn fn
slime.rollout.data_source RolloutDataSourceWithBuffer args
slime.rollout.filter_hub.base_types DynamicFilterOutput keep reason= keep_when_insufficient=
slime.rollout.filter_hub.dynamic_sampling_filters check_reward_nonzero_std args samples
slime.rollout.rm_hub async_rm args sample
slime.rollout.rm_hub batched_async_rm args samples
slime.rollout.rm_hub grade_answer_verl solution_str ground_truth
slime.rollout.rm_hub.math_utils grade_answer_verl solution_str ground_truth
slime.rollout.rm_hub get_deepscaler_rule_based_reward response label
slime.rollout.rm_hub extract_boxed_answer text
slime.rollout.rm_hub.math_utils extract_answer text
slime.rollout.rm_hub.math_utils extract_boxed_answer text
slime.rollout.rm_hub.math_dapo_utils compute_score solution_str ground_truth strict_box_verify=
slime.rollout.rm_hub.deepscaler get_deepscaler_rule_based_reward response label
slime.rollout.rm_hub.gpqa compute_gpqa_reward response label metadata=
slime.rollout.rm_hub.f1          f1_score                            prediction ground_truth
slime.rollout.sample_hooks apply_rollout_sample_hooks args sample
slime.utils.async_utils run coroutine
slime.utils.processing_utils load_processor name_or_path
slime.utils.processing_utils process_vision_info prompt processor
slime.utils.processing_utils encode_image_for_rollout_engine image
slime.rollout.filter_hub.base_types MetricGatherer
slime.rollout.filter_hub.base_types call_dynamic_filter fn args
slime.rollout.sample_hooks set_current_rollout_id rollout_id
slime.rollout.fully_async_rollout generate_rollout_fully_async args rollout_id data_source evaluation=
slime.rollout.on_policy_distillation reward_func args sample
slime.rollout.on_policy_distillation post_process_rewards args samples
slime.rollout.rm_hub.ifbench compute_ifbench_reward response label metadata=
slime.backends.megatron_utils.cp_utils all_gather_with_cp tensor total_length response_length
slime.backends.megatron_utils.cp_utils slice_log_prob_with_cp log_prob total_length response_length
slime.backends.megatron_utils.cp_utils slice_with_cp tokens pad_value=
slime.backends.megatron_utils.cp_utils get_sum_of_sample_mean total_lengths response_lengths loss_masks
slime.backends.megatron_utils.cp_utils get_logits_and_tokens_offset_with_cp total_length response_length
slime.backends.megatron_utils.loss get_log_probs_and_entropy logits
slime.backends.megatron_utils.loss compute_advantages_and_returns args rollout_data
slime.backends.megatron_utils.loss vanilla_tis_function args
slime.backends.megatron_utils.loss icepop_function args
slime.rollout.sglang_rollout generate_rollout args rollout_id data_source evaluation=
slime.rollout.sglang_rollout GenerateState args
slime.rollout.sglang_rollout generate args sample sampling_params
slime.rollout.sglang_rollout generate_and_rm args sample sampling_params evaluation=
slime.rollout.sglang_rollout abort args rollout_id
slime.rollout.sglang_rollout get_model_url args name endpoint=
slime.rollout.vllm_rollout GenerateState args
slime.rollout.vllm_rollout get_model_url args name endpoint=
slime.rollout.sft_rollout generate_rollout args rollout_id data_source evaluation=
slime.utils.misc get_current_node_ip
slime.utils.misc exec_command cmd capture_output=
slime.data.data_source RolloutDataSourceWithBuffer args
slime.data.data_source RolloutDataSource args
slime.data.data_source pop_first args rollout_id buffer num_samples
slime.data.data_source pop_oldest args rollout_id buffer num_samples
slime.utils.accelerator device_type
slime.utils.accelerator device_name index=
slime.utils.accelerator device index=
slime.utils.accelerator set_device index
slime.utils.accelerator current_device
slime.utils.accelerator synchronize device_arg=
slime.utils.accelerator mem_get_info device_arg=
slime.utils.accelerator process_group_backend default=
slime.utils.accelerator resolve_visible_device_id physical_device_id
slime.utils.staleness sample_staleness sample current_weight_version
slime.utils.staleness compute_staleness_metrics samples current_weight_version
slime.utils.score_centering score_centering_correction train_head_logp sampler_head_logp
slime.utils.weight_sync should_flush_cache flush_cache_interval weight_version initial_weight_version=
slime.observability.tensorboard_utils _TensorboardAdapter
slime.utils.external_utils.command_utils execute_train train_args num_gpus_per_node megatron_model_type
slime.utils.external_utils.command_utils convert_checkpoint model_name megatron_model_type num_gpus_per_node
slime.utils.external_utils.command_utils exec_command cmd capture_output=
slime.utils.external_utils.command_utils ExecuteTrainConfig cuda_core_dump= num_nodes= extra_env_vars=
slime.utils.external_utils.command_utils get_default_wandb_args test_file run_name_prefix= run_id=
slime.utils.external_utils.command_utils get_bool_env_var name default=
slime.utils.external_utils.command_utils save_to_temp_file text ext
slime.utils.external_utils.typer_utils dataclass_cli func env_var_prefix=
slime.agent.adapters.common flatten_content c
slime.agent.adapters.common tool_call_dict name arguments
slime.agent.trajectory TrajectoryManager
slime.agent.trajectory TurnRecord prompt_ids output_ids finish_reason output_log_probs=
slime.agent.trajectory TokenSegment prompt_ids response_ids loss_mask rollout_log_probs= metadata=
slime.agent.trajectory fan_out_sample_segments sample segments reward tokenizer
slime.agent.parsing parse_model_output raw_output
slime.agent.parsing parse_tool_uses body_text tools_schema tool_parser_name
slime.agent.parsing parse_xml_tool_uses body_text tools_schema
slime.agent.sandbox exec_and_wait sb
slime.agent.sandbox ensure_agent_user sb workdir
slime.agent.sandbox ModalSandbox image
slime.agent.harness.common install_npm_cli sb
slime.agent.harness.common install_node22 sb host_tarball
slime.agent.harness.common run_agent sb
"""


@pytest.mark.parametrize("line", PATHS.strip().splitlines(), ids=lambda line: ".".join(line.split()[:2]))
def test_path_and_parameters(line):
    module, name, *wanted = line.split()
    found = getattr(importlib.import_module(module), name)
    parameters = [
        p for p in inspect.signature(found).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    got = [p.name + ("" if p.default is p.empty else "=") for p in parameters]
    assert got[: len(wanted)] == wanted


def test_what_a_plug_in_awaits_is_a_coroutine():
    for module, names in {
        "slime.utils.http_utils": ["get", "post"],
        "slime.rollout.sglang_rollout": ["generate", "generate_and_rm", "abort"],
        "slime.rollout.rm_hub": ["async_rm", "batched_async_rm"],
        "slime.rollout.sample_hooks": ["apply_rollout_sample_hooks"],
    }.items():
        for name in names:
            assert inspect.iscoroutinefunction(getattr(importlib.import_module(module), name)), name


@pytest.mark.parametrize(
    ("path", "owner"),
    [
        ("slime.utils.types.Sample", types.Sample),
        ("slime.utils.misc.load_function", hooks.load_function),
        ("slime.utils.http_utils.post", http.post),
        ("slime.utils.processing_utils.load_tokenizer", tokenizer.load_tokenizer),
        ("slime.utils.mask_utils.MultiTurnLossMaskGenerator", loss_mask.MultiTurnLossMaskGenerator),
        ("slime.utils.ppo_utils.compute_policy_loss", surrogates.compute_policy_loss),
        ("slime.utils.data.read_file", prompts.read_file),
        ("slime.utils.dp_schedule.build_dp_schedule", packing.build_dp_schedule),
        ("slime.utils.eval_config.build_eval_dataset_configs", eval_datasets.build_eval_dataset_configs),
        ("slime.rollout.data_source.RolloutDataSourceWithBuffer", data_source.RolloutDataSourceWithBuffer),
        ("slime.ray.rollout_data_source.RolloutDataSource", data_source.RolloutDataSourceWithBuffer),
        ("slime.data.data_source.RolloutDataSource", data_source.RolloutDataSourceWithBuffer),
        ("slime.rollout.data_source.DataSource", protocols.DataSource),
        ("slime.utils.logging_utils.log", outbox.log),
        ("slime.utils.tracking_utils.log", outbox.log),
        ("slime.observability.logging_utils.log", outbox.log),
        ("slime.utils.metric_utils.compute_statistics", metrics.compute_statistics),
        ("slime.utils.metric_utils.has_repetition", metrics.ends_in_repetition),
        ("slime.utils.mask_utils.get_response_lengths", loss_mask.get_response_lengths),
        ("slime.rollout.rm_hub.async_rm", rewards.async_rm),
        ("slime.rollout.sglang_rollout.generate", generate.generate),
        ("slime.rollout.sglang_rollout.generate_rollout", vllm_rollout.generate_rollout),
    ],
)
def test_old_paths_lead_to_the_one_definition(path, owner):
    assert hooks.load_function(path) is owner


def test_sample_has_the_fields_and_methods_that_hooks_use():
    fields = """group_index index rollout_id prompt tokens multimodal_inputs multimodal_train_inputs
    multimodal_train_input_id apply_chat_template_kwargs response response_length label reward loss_mask
    weight_versions rollout_log_probs rollout_top_p_token_ids rollout_top_p_token_offsets
    rollout_topk_token_ids rollout_topk_log_probs rollout_routed_experts remove_sample teacher_log_probs teacher_top
    status metadata generate_function_path custom_rm_path train_metadata session_id non_generation_time
    spec_info prefix_cache_info columns"""
    assert fields.split() == list(inspect.signature(types.Sample).parameters)
    assert [status.name for status in types.Sample.Status] == [
        *("PENDING", "COMPLETED", "TRUNCATED", "ABORTED", "FAILED")
    ]
    assert types.Sample.SpecInfo is type(types.Sample().spec_info)
    methods = "to_dict from_dict get_reward_value append_response_tokens update_from_meta_info"
    assert all(hasattr(types.Sample, name) for name in methods.split())


def test_a_data_source_has_the_methods_that_subclasses_override():
    for name in ("get_samples", "add_samples", "save", "load", "__len__"):
        assert callable(getattr(source.PromptDataSource, name))


def test_arguments_by_name():
    """The arguments of append_response_tokens have names except `args`, and those of the log-probs except the
    logits."""
    names = "self args tokens log_probs trainable meta_info text update_terminal_info columns"
    parameters = inspect.signature(types.Sample.append_response_tokens).parameters
    assert list(parameters) == names.split()
    assert all(p.kind is p.KEYWORD_ONLY for p in list(parameters.values())[2:])


@pytest.mark.parametrize("line", PATHS.strip().splitlines(), ids=lambda line: ".".join(line.split()[:2]))
def test_upstream_vime_has_the_same_under_its_name(line):
    module, name, *_ = line.split()
    renamed = module.replace("slime.", "vime.", 1).replace("sglang_rollout", "vllm_rollout")
    assert getattr(importlib.import_module(renamed), name) is getattr(importlib.import_module(module), name)
