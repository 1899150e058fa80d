"""One rank of a gloo group that compares plans with the other ranks.

Arguments: rank, ranks, the store, and JSON: scenarios, in each of them what is different about the ranks, by rank:
`{"release", "architecture", "strategy", "top_k", "routing_input", "group", "timeout", "absent"}`. Out: for each
scenario the error and its differences, or null.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed as distributed

import flashinfer_compat as fc
from flashinfer_compat.engines.agreement import RankDisagreementError, require_agreement
from flashinfer_compat.problem import DEEPSEEK_R1


def answer(rank: int, mine: dict[str, Any]) -> object:
    target = fc.Target.from_release(mine.get("release", "0.7.4"), mine.get("architecture", "sm100"))
    problem = replace(DEEPSEEK_R1, routing_input=mine.get("routing_input", "topk"), top_k=mine.get("top_k", 8))
    plan = fc.plan(problem, target, strategy=mine.get("strategy", "auto"), backend="trtllm")
    members = mine.get("group")
    # Every rank makes the group, also one that is not in it.
    group = None if members is None else distributed.new_group(members)
    if mine.get("absent"):
        return None
    try:
        require_agreement(plan, group, target=target, timeout=timedelta(seconds=mine.get("timeout", 60)))
    except RankDisagreementError as error:
        return [str(error), [[one.rank, one.fact, one.value, one.most] for one in error.differences]]
    except fc.ArgumentError as error:
        return [str(error), []]
    return None


number, ranks = int(sys.argv[1]), int(sys.argv[2])
distributed.init_process_group("gloo", init_method=sys.argv[3], rank=number, world_size=ranks)
print(json.dumps([answer(number, one[number]) for one in json.loads(sys.argv[4])]), flush=True)
# Nobody leaves before all have answered.
sys.stdin.read()
