"""Flags of the rollout section: sampling, orchestration and the hooks of generation."""

from __future__ import annotations

from dataclasses import dataclass

from slime.config.fields import flag
from slime.config.ranges import COUNT, COUNT_OR_ZERO, FRACTION, SECONDS, SEED, TEMPERATURE, TOP_K


@dataclass(frozen=True)
class RolloutConfig:
    """Generation. Lengths are in tokens and deadlines in seconds. Temperatures divide logits."""

    hf_checkpoint: str = flag(
        None,
        "Hugging Face checkpoint directory, or model OWNER/NAME of the hub, with shape, tokenizer, first weights",
    )
    rollout_function_path: str = flag(
        "slime.rollout.vllm_rollout.generate_rollout", "fn(args, rollout_id, data_source, evaluation=False)"
    )
    rollout_temperature: float = flag(
        1.0,
        "sampling temperature, above 0; the trainer divides its logits by the same number",
        range=TEMPERATURE,
    )
    rollout_top_p: float = flag(1.0, "nucleus sampling, above 0 and at most 1", range=FRACTION)
    rollout_top_k: int = flag(-1, "top-k sampling; -1 switches it off", range=TOP_K)
    rollout_max_response_len: int | None = flag(None, "maximum number of tokens of a response", range=COUNT)
    rollout_max_context_len: int | None = flag(
        None, "maximum number of tokens of prompt and response together", range=COUNT
    )
    rollout_max_prompt_len: int | None = flag(
        None,
        "maximum number of tokens of a prompt; longer prompts are dropped, counted and reported",
        range=COUNT,
    )
    rollout_skip_special_tokens: bool = flag(False, "remove special tokens from the text of a response")
    rollout_stop: list[str] | None = flag(None, "strings that end a response")  # noqa: RUF009
    rollout_stop_token_ids: list[int] | None = flag(  # noqa: RUF009
        None, "token ids that end a response", range=COUNT_OR_ZERO
    )
    rollout_shuffle: bool = flag(
        False, "shuffle the prompts in each epoch; --rollout-seed and the epoch decide the order"
    )
    rollout_seed: int = flag(42, "random seed of sampling and of the prompt order", range=SEED)
    over_sampling_batch_size: int = flag(
        None, "number of prompts submitted at a time (default: --rollout-batch-size)", range=COUNT
    )
    dynamic_sampling_filter_path: str | None = flag(None, "fn(args, samples) -> DynamicFilterOutput | bool")
    partial_rollout: bool = flag(False, "keep unfinished groups and their tokens for the next rollout")
    mask_offpolicy_in_partial_rollout: bool = flag(False, "do not train on tokens that older weights sampled")
    custom_generate_function_path: str | None = flag(None, "async fn(args, sample, sampling_params)")
    rollout_sample_hook_path: list[str] = flag(  # noqa: RUF009 (flag copies the default)
        [], "fn(args, sample, *, rollout_id, evaluation); may be repeated", append=True
    )
    custom_rollout_log_function_path: str | None = flag(
        None, "fn(rollout_id, args, samples, extra, time) -> bool"
    )
    custom_eval_rollout_log_function_path: str | None = flag(
        None, "fn(rollout_id, args, data, extra) -> bool"
    )
    buffer_filter_path: str | None = flag(None, "fn(args, rollout_id, buffer, num_samples) -> groups")
    buffer_sort_by_staleness: bool = flag(
        False,
        "take the groups with the oldest tokens from the buffer first; a --buffer-filter-path decides itself",
    )
    rollout_data_postprocess_path: str | None = flag(
        None, "fn(args, rollout_id, rollout_data) on each trainer rank"
    )
    rollout_sample_filter_path: str | None = flag(None, "fn(args, groups), sets remove_sample")
    rollout_all_samples_process_path: str | None = flag(None, "fn(args, all_samples, data_source)")
    max_staleness: int = flag(
        0,
        "maximum number of weight updates by which a sample may be behind; 0 is synchronous training",
        range=COUNT_OR_ZERO,
    )
    stale_samples: str = flag(
        "drop",
        "tokens beyond --max-staleness, which over-sampling may leave behind: drop their group, mask "
        "them (the sample still counts in its group), or keep them for --use-tis to correct; all are counted",
        choices=("drop", "mask", "keep"),
    )
    rollout_external_engine_addrs: list[str] | None = flag(  # noqa: RUF009
        None, "HOST:PORT of rollout engines that `vime serve engine` started; the run starts none of its own"
    )
    rollout_data_transport: str = flag(
        "object-store",
        "straw puts groups into a queue in a folder, so that the hosts of `vime rollout` generate for this trainer, "
        "too; object-store and nixl generate only with the engines of the run. Rank data always travel through Ray",
        choices=("object-store", "nixl", "straw"),
    )
    rollout_data_dir: str | None = flag(
        None,
        "folder of the queues of --rollout-data-transport straw, shared by trainer and rollout hosts (default: "
        "rollout_data in the folder of --save)",
    )
    rollout_queue_run_id: str | None = flag(
        None, "name of the run's queue in --rollout-data-dir (default: the name of --run-dir)"
    )
    rollout_queue_lease_seconds: float = flag(
        300.0,
        "seconds after which the groups of a rollout host that does not answer go to other hosts",
        range=SECONDS,
    )
    rollout_queue_segment_mib: int = flag(
        1024, "MiB at which a writer of the queue begins a new file", range=COUNT
    )
    rollout_queue_online_gc: bool = flag(False, "remove files of the queue whose groups are in a checkpoint")
    rollout_io_concurrency: int = flag(
        4,
        "number of threads per process that read and write the queue, each with its own file",
        range=COUNT,
    )
    rollout_storage_profile: str = flag(
        "local",
        "file system of --rollout-data-dir: juicefs checks that --rollout-storage-declaration has what straw needs",
        choices=("local", "juicefs"),
    )
    rollout_storage_declaration: str | None = flag(
        None,
        "JSON file that declares how the file system is mounted, for --rollout-storage-profile juicefs: direct_mount, "
        "writeback, open_cache, readdir_cache, client_version, durability_description",
    )
    rollout_deadline_s: float = flag(600.0, "maximum seconds per request, retries included", range=SECONDS)
