"""Tell how an MoE layer would run on a FlashInfer release and a GPU, and why not otherwise.

Without --flashinfer and --arch it speaks of this machine; with --arch alone of its FlashInfer on another GPU, with a
torch that can use that. Sizes default to DeepSeek-R1's.
Exit code: 0 with a plan, 1 when the asked-for strategy is refused, 2 when the question makes no sense.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace

from flashinfer_compat.architectures import parse_architecture
from flashinfer_compat.cli.console import heading, paragraph
from flashinfer_compat.errors import ArgumentError
from flashinfer_compat.features.target import Target
from flashinfer_compat.machine import this_machine, this_machine_without_policy
from flashinfer_compat.planning.decision import Plan
from flashinfer_compat.planning.plan import AUTO, plan
from flashinfer_compat.problem import DEEPSEEK_R1, Problem
from flashinfer_compat.vocabulary import (
    Activation,
    ActivationScaling,
    Backend,
    Evidence,
    Numerics,
    RoutedScaling,
    RoutingInput,
    RoutingMethod,
    SharedExpertFormat,
    SharedExpertPlacement,
    Strategy,
    parse,
)

__all__ = ["HELP", "add_arguments", "run"]

HELP = "how an MoE layer would run on a release and a GPU, and why not otherwise"
_R1 = DEEPSEEK_R1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own options. Names are checked later, where the nearest valid one is known."""
    target = parser.add_argument_group("target")
    target.add_argument("--flashinfer", metavar="VERSION", help="a recorded release (default: the installed one)")
    target.add_argument("--arch", metavar="ARCH", help="such as sm100, or none (default: this machine's GPU)")
    layer = parser.add_argument_group("layer")
    for name, value in _SIZES.items():
        layer.add_argument(f"--{name}", type=int, metavar="N", default=value, help=f"default: {value}")
    layer.add_argument("--n-group", type=int, metavar="N", help="default: 8 for DeepSeek-R1's routing, otherwise 1")
    layer.add_argument("--topk-group", type=int, metavar="N", help="default: 4 for DeepSeek-R1's routing, otherwise 1")
    layer.add_argument(
        "--routed-scaling-factor", type=float, metavar="F", help="default: 2.5 with deepseek_v3 routing, otherwise 1.0"
    )
    layer.add_argument("--no-norm-topk-prob", action="store_true", help="top-k weights are not renormalised")
    for name, kind, default in (
        ("routing", RoutingMethod, RoutingMethod.DEEPSEEK_V3.value),
        ("input", RoutingInput, RoutingInput.LOGITS.value),
        ("shared-format", SharedExpertFormat, "nvfp4 with shared experts"),
        ("activation", Activation, Activation.SWIGLU.value),
        ("numerics", Numerics, Numerics.W4A4.value),
        ("routed-scaling", RoutedScaling, RoutedScaling.ROUTING_WEIGHTS.value),
        ("activation-scaling", ActivationScaling, _R1.activation_scaling.value),
        ("shared-placement", SharedExpertPlacement, "not said"),
    ):
        names = ", ".join(member.value for member in kind)
        layer.add_argument(f"--{name}", metavar="NAME", help=f"{names} (default: {default})")
    layer.add_argument("--shared-gate", action="store_true", help="the shared experts have a sigmoid gate")
    choice = parser.add_argument_group("choice")
    evidence = [one.value for one in Evidence]
    choice.add_argument("--strategy", default=AUTO, metavar="NAME", help=_names(Strategy))
    choice.add_argument("--backend", default=AUTO, metavar="NAME", help=_names(Backend))
    choice.add_argument("--require", metavar="STATUS", help=f"least evidence to accept: {', '.join(evidence)}")


def run(options: argparse.Namespace) -> int:
    """Plan and print."""
    problem, target = _problem(options), _target(options)
    require = options.require and parse(Evidence, options.require, "--require")
    decision = plan(problem, target, strategy=options.strategy, backend=options.backend, require=require)
    if options.json:
        print(json.dumps({"target": target.to_dict(), **decision.to_dict()}, indent=2))
    else:
        _print(decision, target)
    return 0


_SIZES = {
    "hidden-size": _R1.hidden_size,
    "intermediate-size": _R1.intermediate_size,
    "num-experts": _R1.num_experts,
    "top-k": _R1.top_k,
    "shared-experts": _R1.num_shared_experts,
    "ep-size": 1,
}


def _names(kind: type[Strategy] | type[Backend]) -> str:
    return ", ".join([AUTO, *(member.value for member in kind)]) + f" (default: {AUTO})"


def _target(options: argparse.Namespace) -> Target:
    for name in ("flashinfer", "arch"):
        if getattr(options, name) == "":
            raise ArgumentError(f"--{name}", "a name", "an empty one", "Leave the option out for this machine.")
    here = this_machine_without_policy()
    architecture = here.architecture
    if options.arch is not None:
        architecture = None if options.arch == "none" else parse_architecture(options.arch)
    if options.flashinfer is None and architecture == here.architecture:
        return this_machine()
    target = here if options.flashinfer is None else Target.from_release(options.flashinfer, None)
    if architecture not in (None, here.architecture):
        # Who asks about another GPU takes a torch for granted that can use it, and Triton with that.
        target = replace(target, torch_cuda="any", libraries={"triton": "", **target.libraries})
    # What was found and measured here says nothing of another GPU or release.
    return replace(target, architecture=architecture, self_checks=(), policy=())


def _problem(options: argparse.Namespace) -> Problem:
    method = parse(RoutingMethod, options.routing or RoutingMethod.DEEPSEEK_V3, "--routing")
    like_r1 = method is RoutingMethod.DEEPSEEK_V3 and options.num_experts == _R1.num_experts
    n_group = options.n_group if options.n_group is not None else _R1.n_group if like_r1 else 1
    topk_group = options.topk_group
    if topk_group is None:
        topk_group = _R1.topk_group if like_r1 and n_group == _R1.n_group else 1
    factor = _R1.routed_scaling_factor if method is RoutingMethod.DEEPSEEK_V3 else 1.0
    default_format = SharedExpertFormat.NVFP4 if options.shared_experts else SharedExpertFormat.NONE
    placement = options.shared_placement
    return Problem(
        hidden_size=options.hidden_size,
        intermediate_size=options.intermediate_size,
        num_experts=options.num_experts,
        top_k=options.top_k,
        num_shared_experts=options.shared_experts,
        shared_format=parse(SharedExpertFormat, options.shared_format or default_format, "--shared-format"),
        routing_method=method,
        routing_input=parse(RoutingInput, options.input or RoutingInput.LOGITS, "--input"),
        n_group=n_group,
        topk_group=topk_group,
        routed_scaling_factor=factor if options.routed_scaling_factor is None else options.routed_scaling_factor,
        norm_topk_prob=not options.no_norm_topk_prob,
        routed_scaling=parse(RoutedScaling, options.routed_scaling or _R1.routed_scaling, "--routed-scaling"),
        activation=parse(Activation, options.activation or _R1.activation, "--activation"),
        numerics=parse(Numerics, options.numerics or _R1.numerics, "--numerics"),
        activation_scaling=parse(
            ActivationScaling, options.activation_scaling or _R1.activation_scaling, "--activation-scaling"
        ),
        shared_gate=options.shared_gate,
        ep_size=options.ep_size,
        shared_placement=placement and parse(SharedExpertPlacement, placement, "--shared-placement"),
    )


def _print(decision: Plan, target: Target) -> None:
    flashinfer = target.flashinfer.version if target.flashinfer else "none"
    paragraph(f"FlashInfer {flashinfer}, GPU {target.architecture or 'none'}", indent=0)
    print(f"strategy  {decision.strategy.value}")
    print(f"backend   {decision.backend.value}")
    print(f"status    {decision.status.value}")
    if decision.call is not None:
        call = decision.call
        print(f"call      {call.entry_point}")
        shared = call.num_fused_shared_experts
        print(
            f"          num_experts={call.num_experts} top_k={call.top_k} weight rows={call.weight_rows}"
            + (f" num_fused_shared_experts={shared}" if shared else "")
        )
    if decision.dense is not None:
        print(f"dense     mm_fp4 backend={decision.dense.backend}")
        for reason in decision.dense.passed_over:
            paragraph(reason, label="passed over:", indent=10)
    for note in decision.notes:
        paragraph(note, label="note:", indent=0)
    if decision.rejected:
        heading("Not taken")
    for one in decision.rejected:
        paragraph(f"{one.reason} [{one.reason.code.value}]", label=f"{one.strategy.value} on {one.backend.value}:")
