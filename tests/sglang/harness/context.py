# SPDX-License-Identifier: Apache-2.0
"""The process context that SGLang's managers read, for every release that is tested, without a server."""
from __future__ import annotations

import importlib
import inspect
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

HOST = os.environ.get("SGLANG_HOST_IP", "127.0.0.1")    # where this side of a fleet is


@dataclass(frozen=True)
class Topology:
    """A rank's place: attention-TP size and rank within a data-parallel group, and which group of how many."""
    tp_size: int
    tp_rank: int
    dp_size: int = 1
    dp_rank: int = 0
    pp_size: int = 1
    pp_rank: int = 0
    cp_size: int = 1
    cp_rank: int = 0
    meeting: str = ""       # where the stages of a pipeline tell each other things: the beginning of a file's name

    @property
    def global_rank(self) -> int:
        return (self.dp_rank * self.cp_size + self.cp_rank) * self.tp_size + self.tp_rank


class _Bag:
    """A group of published settings; what is not named is off."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)
        self.__dict__["_fields"] = fields

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _Stage:
    """A stage's place in its pipeline, and the one collective call that a manager makes of it."""

    def __init__(self, place: Topology) -> None:
        self.rank_in_group, self.world_size = place.pp_rank, place.pp_size
        self.is_last_rank = place.pp_rank == place.pp_size - 1
        self._file = Path(f"{place.meeting}-{place.global_rank}")

    def broadcast_object(self, value: Any, src: int) -> Any:
        if self.rank_in_group == src:
            written = self._file.with_suffix(".new")
            written.write_text(json.dumps(value))
            written.rename(self._file)
            return value
        end = time.monotonic() + 20
        while not self._file.exists():
            if time.monotonic() > end:
                raise RuntimeError(f"stage {src} says nothing")
            time.sleep(0.01)
        return json.loads(self._file.read_text())


def enter(place: Topology, bootstrap_port: int, page_size: int, role_switch: bool) -> Any:
    """Make this process look like that rank of a server; returns the server arguments for a manager."""
    import sglang.srt.disaggregation.common.conn as common

    stage = _Stage(place)
    world = place.tp_size * place.cp_size * place.dp_size
    attention_dp = place.dp_size > 1
    # From 0.5.22 on dp_size counts replicas alone; the groups of data-parallel attention are counted by themselves.
    context = _runtime_context()
    dp_size = 1 if hasattr(context, "num_dp_ranks_of") else place.dp_size
    live = dict(attn_tp_size=place.tp_size, attn_tp_rank=place.tp_rank, attn_cp_size=place.cp_size,
                attn_cp_rank=place.cp_rank,
                attn_dp_size=place.dp_size, attn_dp_rank=place.dp_rank, attn_dcp_size=1, attn_dcp_rank=0,
                tp_size=world, tp_rank=place.global_rank, dp_size=dp_size, pp_size=place.pp_size, pp_group=stage)
    settings = dict(dist_init_addr=None, nnodes=1, num_dp_ranks=place.dp_size, dp_size=dp_size, pp_size=place.pp_size,
                    enable_dp_attention=attention_dp, load_balance_method="round_robin",
                    enable_dsa_cache_layer_split=False, enable_kv_cache_sharding=False,
                    enable_cp_tp_group_sharing=False)
    if context is not None:
        _publish(context, live, settings, bootstrap_port, page_size)
    # Releases before 0.5.21 ask these functions, by the names under which the module imported them.
    answers = {f"get_attention_{group}_{what}": live[f"attn_{group}_{what}"]
               for group in ("tp", "cp", "dp") for what in ("size", "rank")}
    for name, value in {**answers, "get_pp_group": stage}.items():
        if hasattr(common, name):
            setattr(common, name, lambda value=value: value)
    return SimpleNamespace(host=HOST, port=30000, disaggregation_bootstrap_port=bootstrap_port, dist_init_addr=None,
                           nnodes=1, pp_size=place.pp_size, tp_size=world, dp_size=place.dp_size, dcp_size=1,
                           enable_dp_attention=attention_dp, load_balance_method="round_robin", enable_trace=False,
                           enable_pd_role_switch=role_switch, enable_hisparse=False, page_size=page_size,
                           chunked_prefill_size=8192, kv_cache_dtype="auto")


def _runtime_context() -> Any:
    """SGLang's own process context, since 0.5.14."""
    try:
        return importlib.import_module("sglang.srt.runtime_context")
    except ModuleNotFoundError:
        return None


def _publish(context: Any, live: dict[str, Any], settings: dict[str, Any], bootstrap_port: int,
             page_size: int) -> None:
    parallel = context.get_parallel()
    parallel._overrides.update({**settings, **live})
    if not hasattr(parallel, "_config"):    # before 0.5.17 the server arguments have the rest
        return
    parallel._config = _Bag(**settings)
    context._CONTEXT._config_bags = dict(
        serving=_Bag(host=HOST, port=30000),
        disagg=_Bag(disaggregation_bootstrap_port=bootstrap_port, disaggregation_decode_allocation_policy="early"),
        observability=_Bag(enable_trace=False),
        schedule=_Bag(chunked_prefill_size=8192, kv_cache_dtype="auto", page_size=page_size),
        memory=_Bag(enable_unified_memory=False), device=_Bag(device="cpu", gpu_id=0), spec=_Bag())


def use_private_mooncake_engine(manager_class: Any) -> None:
    """Each manager makes its own engine on the loopback address; a server shares one that it made at start."""
    from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import MooncakeTransferEngine

    def init_engine(self: Any) -> None:
        self.engine = MooncakeTransferEngine(HOST, gpu_id=0, ib_device=None)

    manager_class.init_engine = init_engine


def sender_arguments(sender_class: Any) -> dict[str, Any]:
    """Up to 0.5.21 a sender wants to know where it sends to, and does not use it."""
    # A replaced __init__ is a C function without a signature: ask the one that it stands for.
    written = next(one.__dict__["__init__"] for one in sender_class.__mro__
                   if isinstance(one.__dict__.get("__init__"), FunctionType))
    parameters = inspect.signature(written).parameters
    arguments: dict[str, Any] = {}
    if "dest_tp_ranks" in parameters:
        arguments.update(dest_tp_ranks=[0], pp_rank=0)
    if "req_has_disagg_prefill_dp_rank" in parameters:
        arguments.update(req_has_disagg_prefill_dp_rank=True)
    return arguments
