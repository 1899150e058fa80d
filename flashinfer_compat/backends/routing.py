"""Top-k outside a kernel, for the backends and strategies whose kernel cannot route."""

from __future__ import annotations

from flashinfer_compat.inputs import LogitsRouting, PackedTopKRouting, Routing
from flashinfer_compat.numerics.routing import TopK, route, unpack_topk
from flashinfer_compat.problem import Problem
from flashinfer_compat.vocabulary import RoutedScaling

__all__ = ["topk_from_logits", "topk_of"]


def topk_of(problem: Problem, routing: Routing) -> TopK:
    """The experts and weights that a call's routing says or means; given ids and weights keep their dtypes."""
    if isinstance(routing, LogitsRouting):
        return topk_from_logits(problem, routing)
    if isinstance(routing, PackedTopKRouting):
        return TopK(*unpack_topk(routing.packed))
    return TopK(routing.ids, routing.weights)


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
