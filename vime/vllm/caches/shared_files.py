"""A KV connector that passes prompts from prefill engines to decode engines through files of a shared folder.

It is vLLM's ExampleConnector, whose copies between files and the paged cache it uses, with three differences. Only a
request with `kv_transfer_params` is stored or loaded, as with vLLM's other connectors. A stored prompt has its own
folder, which the reader deletes. `reset_cache` deletes the folders of this engine, so no prompt outlives an update of
the weights. vLLM finds the class by `kv_connector_module_path`.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import (
    ExampleConnector,
    ExampleConnectorMetadata,
    ReqMeta,
    align_to_block_size,
)

from vime.vllm.caches.connector import NAME

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

_FOLDER = "folder"
"""Key of `kv_transfer_params`: the folder of the prompt, relative to the shared folder."""


class SharedFileConnector(ExampleConnector):
    """The connector of one engine. Its scheduler's side decides, its workers' side copies."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._root = Path(self._storage_path).resolve()
        self._engine = str(
            self._kv_transfer_config.get_from_extra_config(NAME, self._kv_transfer_config.engine_id)
        )
        if role is KVConnectorRole.SCHEDULER:
            self.reset_cache()  # prompts of an earlier process of this engine
        self._requests: dict[str, Request] = {}
        self._blocks: dict[str, list[int]] = {}

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Returns the number of tokens that a stored prompt has beyond the computed ones, and that loading is part of
        the step."""
        params = request.kv_transfer_params or {}
        if not params.get("do_remote_prefill") or not self._folder(params[_FOLDER]).is_dir():
            return 0, False
        stored = align_to_block_size(request.num_prompt_tokens, self._block_size)
        return max(0, stored - num_computed_tokens), False

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        if request.kv_transfer_params:
            self._requests[request.request_id] = request
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> ExampleConnectorMetadata:
        """Returns the prompts that this step loads, and those whose last part this step computes, which are stored."""
        meta = ExampleConnectorMetadata()
        for name, blocks, computed in self._steps(scheduler_output):
            request = self._requests.get(name)
            if request is None or request.kv_transfer_params is None:
                continue
            params = request.kv_transfer_params
            if name in self._requests_need_load:
                self._add(meta, request, blocks, params[_FOLDER], is_store=False)
            elif params.get("do_remote_decode"):
                done = computed + scheduler_output.num_scheduled_tokens[name]
                if computed < request.num_prompt_tokens <= done:
                    self._add(meta, request, blocks, self._name(request), is_store=True)
        self._requests_need_load.clear()
        return meta

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Returns the parameters with which a decode engine reads the prompt. The reader's own end deletes it."""
        self._requests.pop(request.request_id, None)
        self._blocks.pop(request.request_id, None)
        params = request.kv_transfer_params or {}
        if params.get("do_remote_prefill"):
            shutil.rmtree(self._folder(params[_FOLDER]), ignore_errors=True)
        elif params.get("do_remote_decode") and self._folder(self._name(request)).is_dir():
            return False, {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                _FOLDER: self._name(request),
            }
        return False, None

    def reset_cache(self) -> bool:
        """Deletes the prompts of this engine, which the previous weights computed."""
        shutil.rmtree(self._folder(self._engine), ignore_errors=True)
        return True

    def _steps(self, output: SchedulerOutput) -> list[tuple[str, list[int], int]]:
        """Returns (request, all its blocks, tokens computed before this step) for the step's requests."""
        new = [
            (each.req_id, each.block_ids[0], each.num_computed_tokens) for each in output.scheduled_new_reqs
        ]
        for name, blocks, _ in new:
            self._remember(name, list(blocks))
        again = output.scheduled_cached_reqs
        for name, added in zip(again.req_ids, again.new_block_ids, strict=True):
            known = [] if name in again.resumed_req_ids else self._blocks.get(name, [])
            self._remember(name, [*known, *(added[0] if added else ())])
        pairs = zip(again.req_ids, again.num_computed_tokens, strict=True)
        return [*new, *((name, self._blocks.get(name, []), computed) for name, computed in pairs)]

    def _remember(self, name: str, blocks: list[int]) -> None:
        if name in self._requests:
            self._blocks[name] = blocks

    def _add(
        self,
        meta: ExampleConnectorMetadata,
        request: Request,
        blocks: list[int],
        folder: str,
        *,
        is_store: bool,
    ) -> None:
        tokens = list(request.prompt_token_ids or [])
        count = align_to_block_size(len(tokens), self._block_size)
        if count == 0:
            return
        made = ReqMeta.make_meta(
            tokens, blocks[: count // self._block_size], self._block_size, is_store, [folder]
        )
        meta.requests.append(made)

    def _name(self, request: Request) -> str:
        return f"{self._engine}/{request.request_id}"

    def _folder(self, name: str) -> Path:
        """Returns the folder of a prompt. Raises ValueError for a name outside the shared folder."""
        folder = (self._root / name).resolve()
        if not folder.is_relative_to(self._root):
            raise ValueError(
                f"{_FOLDER} must lie under {self._root}, got {name}; use the folder that was offered"
            )
        return folder

    def _generate_foldername_debug(
        self, token_ids: torch.Tensor, mm_hashes: list[str], create_folder: bool = False
    ) -> str:
        """Returns the folder of a prompt. The folder's name is passed in `mm_hashes`, because hashes of images are not
        stored."""
        folder = self._folder(mm_hashes[0])
        if create_folder:
            folder.mkdir(parents=True, exist_ok=True)
        return str(folder)
