"""What vLLM 0.32 answers, recorded from it; `tests/vllm` compares it with what it answers today.

Names stand for what differs from request to request.
"""

from __future__ import annotations

from typing import Any

USAGE: dict[str, Any] = {
    "prompt_tokens": 23,
    "total_tokens": 24,
    "completion_tokens": 1,
    "prompt_tokens_details": {
        "cached_tokens": 0,
        "created_cache_tokens": None,
        "multimodal_tokens": None,
    },
    "completion_tokens_details": None,
}
STREAM_USAGE: dict[str, Any] = {
    "prompt_tokens": 23,
    "total_tokens": 27,
    "completion_tokens": 4,
    "prompt_tokens_details": {"cached_tokens": 0},
}
OFFER: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1]],
    "remote_engine_id": "430d234b-aec9-44ca-bac7-66738bfa062a",
    "remote_request_id": "cmpl-abc-1-0-9971fc58",
    "remote_host": "localhost",
    "remote_port": 5601,
    "tp_size": 1,
    "dcp_size": 1,
    "pp_size": 1,
    "remote_num_tokens": 23,
    "remote_blocks_expiry_time": None,
    "transfer_mode": "pull",
    "remote_prefill_cached_tokens": 0,
}
COMPLETION: dict[str, Any] = {
    "id": "cmpl-abc-1",
    "object": "text_completion",
    "created": 1796287334,
    "model": "smol",
    "choices": [
        {
            "index": 0,
            "text": "\n",
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
            "token_ids": [198],
            "prompt_logprobs": None,
            "prompt_token_ids": [6403, 1980],
            "routed_experts": None,
        }
    ],
    "service_tier": None,
    "system_fingerprint": "vllm-0.32.0-5bb05d91",
    "usage": USAGE,
    "kv_transfer_params": None,
    "ec_transfer_params": None,
    "metrics": None,
}
CHAT: dict[str, Any] = {
    "id": "chatcmpl-abc-1",
    "object": "chat.completion",
    "created": 1796287341,
    "model": "smol",
    "choices": [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": "Hello! How can",
                "refusal": None,
                "annotations": None,
                "audio": None,
                "function_call": None,
                "reasoning": None,
            },
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
            "token_ids": [19556, 17, 1073, 416],
            "routed_experts": None,
        }
    ],
    "service_tier": None,
    "system_fingerprint": "vllm-0.32.0-5bb05d91",
    "usage": USAGE,
    "prompt_logprobs": None,
    "prompt_token_ids": [1, 9690],
    "prompt_text": None,
    "kv_transfer_params": None,
    "ec_transfer_params": None,
    "metrics": None,
}
COMPLETION_CHUNK: dict[str, Any] = {
    "id": "cmpl-abc-1",
    "object": "text_completion",
    "created": 1796287339,
    "model": "smol",
    "choices": [
        {
            "index": 0,
            "text": "were",
            "logprobs": None,
            "finish_reason": None,
            "stop_reason": None,
            "prompt_token_ids": None,
            "token_ids": [19878],
        }
    ],
}
CHAT_ROLE_CHUNK: dict[str, Any] = {
    "id": "chatcmpl-abc-1",
    "object": "chat.completion.chunk",
    "created": 1796287340,
    "model": "smol",
    "choices": [
        {
            "index": 0,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
    ],
    "prompt_token_ids": [1, 9690],
    "prompt_text": None,
}
CHAT_CHUNK: dict[str, Any] = {
    "id": "chatcmpl-abc-1",
    "object": "chat.completion.chunk",
    "created": 1796287340,
    "model": "smol",
    "choices": [
        {
            "index": 0,
            "delta": {"content": "Hello"},
            "logprobs": None,
            "finish_reason": None,
            "token_ids": [19556],
        }
    ],
}
USAGE_CHUNK: dict[str, Any] = {
    "id": "cmpl-abc-1",
    "object": "text_completion",
    "created": 1796287339,
    "model": "smol",
    "choices": [],
    "usage": STREAM_USAGE,
    "system_fingerprint": "vllm-0.32.0-5bb05d91",
}
MODELS: dict[str, Any] = {
    "object": "list",
    "data": [{"id": "smol", "object": "model", "created": 1796287333, "max_model_len": 2048}],
}
ERROR: dict[str, Any] = {
    "error": {"message": "…", "type": "BadRequestError", "param": "temperature", "code": 400}
}
LOST_KV: dict[str, Any] = {
    "error": {
        "message": "Internal server error",
        "type": "InternalServerError",
        "param": None,
        "code": 500,
    }
}
"""Inside a stream of status 200, when the source of the KV was killed; [DONE] follows it."""

METRICS = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
vllm:num_requests_running{engine="0",model_name="smol"} 2.0
vllm:num_requests_waiting{engine="0",model_name="smol"} 1.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="smol",reason="capacity"} 0.0
vllm:kv_cache_usage_perc{engine="0",model_name="smol"} 0.25
vllm:nixl_num_kv_expired_reqs_total{engine="0",model_name="smol"} 3.0
vllm:nixl_num_notifications_after_expiry_total{engine="0",model_name="smol"} 1.0
vllm:nixl_num_failed_transfers_total{engine="0",model_name="smol"} 4.0
vllm:cache_config_info{_block_size_resolved="True",block_size="128",num_gpu_blocks="182"} 1.0
"""
