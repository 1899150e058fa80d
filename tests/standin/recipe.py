"""Quantizing with 4over6, which tries two block scales, and with one more scale a row."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import torch

from flashinfer_compat.numerics import Nvfp4Tensor, dequantize_nvfp4, encode_e2m1, pack_e2m1, quantize_nvfp4
from flashinfer_compat.numerics.nvfp4 import BLOCK_SIZE, E2M1_MAX, E4M3_MAX
from standin.calls import UNSET

__all__ = [
    "NVFP44Over6Config",
    "NVFP44Over6ErrMode",
    "check_per_token_scale",
    "per_token_scale_inv",
    "quantize",
    "quantize_per_token",
    "resolve",
]

_TOLERANCE = 1e-3


class NVFP44Over6ErrMode(enum.IntEnum):
    """`flashinfer.NVFP44Over6ErrMode`: what picks one of the two block scales."""

    MAE = 0
    MSE = 1


@dataclass(frozen=True)
class NVFP44Over6Config:
    """`flashinfer.NVFP44Over6Config`, 0.7.1 and newer.

    Raises:
        ValueError: `e4m3_max` is neither 256 nor 448, or `err_mode` unknown.
    """

    e4m3_max: int = 448
    err_mode: NVFP44Over6ErrMode | str = NVFP44Over6ErrMode.MAE
    err_use_fast_math: bool = False

    def __post_init__(self) -> None:
        if self.e4m3_max not in (256, 448):
            raise ValueError("NVFP4 4over6 E4M3 max must be either 256 or 448.")
        try:
            mode = self.err_mode
            found = NVFP44Over6ErrMode[mode.upper()] if isinstance(mode, str) else NVFP44Over6ErrMode(mode)
        except (KeyError, ValueError):
            raise ValueError("NVFP4 4over6 error mode must be MAE or MSE.") from None
        object.__setattr__(self, "err_mode", found)


def resolve(setting: Any) -> NVFP44Over6Config | None:
    """The recipe of an argument. The environment, which an omitted one reads, is taken to be off.

    Raises:
        TypeError: it is something else.
    """
    if setting is UNSET or setting is None:
        return None
    if isinstance(setting, NVFP44Over6Config):
        return setting
    raise TypeError(f"nvfp4_4over6 must be an NVFP44Over6Config or None; got {type(setting).__name__}.")


def per_token_scale_inv(recipe: NVFP44Over6Config | None) -> float:
    """`nvfp4_per_token_scale_inv`."""
    return 1.0 / ((E4M3_MAX if recipe is None else recipe.e4m3_max) * E2M1_MAX)


def check_per_token_scale(scale_inv: float, recipe: NVFP44Over6Config | None) -> None:
    """What `nvfp4_quantize` checks of its scale where the recipe is given, be it None.

    Raises:
        ValueError: the scale is not 1 / (6 * e4m3_max) of the recipe.
    """
    expected = per_token_scale_inv(recipe)
    if abs(scale_inv - expected) > _TOLERANCE * expected:
        raise ValueError(f"a_global_sf={scale_inv!r} does not match the requested NVFP4 4over6 recipe {recipe!r}")


def quantize(values: torch.Tensor, multiplier: torch.Tensor | float, recipe: NVFP44Over6Config | None) -> Nvfp4Tensor:
    """`quantize_nvfp4`, or with a recipe the better of it and of block scales for a largest code of 4.

    FlashInfer 0.7.4, `cvt_warp_fp16_to_fp4` (quantization_utils.cuh:520-640), but with divisions; a tie is for 6.

    Raises:
        NotImplementedError: the error is to be computed in float16.
    """
    six = quantize_nvfp4(values, multiplier, check=False)
    if recipe is None:
        return six
    if recipe.err_use_fast_math:
        raise NotImplementedError("err_use_fast_math=True is not modelled")
    four = _for_largest_code_4(values, six.global_scale)
    better = _error(values, four, recipe) < _error(values, six, recipe)
    codes = torch.where(better.repeat_interleave(BLOCK_SIZE // 2, dim=-1), four.codes, six.codes)
    # PyTorch does not select among float8 numbers; the bytes are what is moved.
    scale = torch.where(better, four.block_scale.view(torch.uint8), six.block_scale.view(torch.uint8))
    return Nvfp4Tensor(codes, scale.view(torch.float8_e4m3fn), six.global_scale)


def quantize_per_token(
    values: torch.Tensor, scale_inv: float, recipe: NVFP44Over6Config | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes uint8 [M, K/2], block scales float8_e4m3fn [M, K/16] and float32 [M]: amax of the row times `scale_inv`.

    FlashInfer 0.7.4, `nvfp4QuantAndPerTokenScaleKernel` (quantization.cuh:939-1073): a row of zeros has the scale 0.
    """
    scale = values.to(torch.float32).abs().amax(dim=-1) * values.new_tensor(scale_inv, dtype=torch.float32)
    found = quantize(values, torch.where(scale != 0, scale, 1.0), recipe)
    return found.codes, found.block_scale, scale


def _for_largest_code_4(values: torch.Tensor, multiplier: torch.Tensor) -> Nvfp4Tensor:
    blocks = _blocks(values.to(torch.float32))
    aligned = multiplier.reshape(*multiplier.shape, *[1] * (blocks.ndim - 1 - multiplier.ndim))
    scale = (1.5 * blocks.abs().amax(dim=-1) / (E2M1_MAX * aligned)).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
    step = (scale.to(torch.float32) * aligned).unsqueeze(-1)
    codes = encode_e2m1(torch.where(step != 0, blocks / step, 0.0).flatten(-2))
    return Nvfp4Tensor(pack_e2m1(codes), scale, multiplier)


def _error(values: torch.Tensor, candidate: Nvfp4Tensor, recipe: NVFP44Over6Config) -> torch.Tensor:
    """float32 [.., K/16]."""
    difference = dequantize_nvfp4(candidate) - values.to(torch.float32)
    each = difference.square() if recipe.err_mode == NVFP44Over6ErrMode.MSE else difference.abs()
    return _blocks(each).sum(dim=-1)


def _blocks(values: torch.Tensor) -> torch.Tensor:
    return values.reshape(*values.shape[:-1], -1, BLOCK_SIZE)
