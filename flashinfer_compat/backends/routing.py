"""Top-k outside a kernel, for the backends and strategies whose kernel cannot route."""

from __future__ import annotations

from flashinfer_compat.inputs import LogitsRouting
from flashinfer_compat.numerics.routing import TopK, route
from flashinfer_compat.problem import Problem
from flashinfer_compat.vocabulary import RoutedScaling

__all__ = ["topk_from_logits"]


def topk_from_logits(problem: Problem, routing: LogitsRouting) -> TopK:
    """The experts and final weights of each token, as `numerics.routing.route` defines them."""
    scaled_here = problem.routed_scaling is RoutedScaling.ROUTING_WEIGHTS
    return route(
        routing.logits,
        routing.bias,
        method=problem.routing_method,
        top_k=problem.top_k,
        n_group=problem.n_group,
        topk_group=problem.topk_group,
        routed_scaling_factor=problem.routed_scaling_factor if scaled_here else 1.0,
        norm_topk_prob=problem.norm_topk_prob,
    )
