"""The engines' rules by name, and what each would do with a request."""

from __future__ import annotations

from kvtide.sizing.sglang_rule import SglangRule
from kvtide.sizing.vllm_rule import VllmRule

__all__ = ["RULES"]

RULES: dict[str, type[VllmRule] | type[SglangRule]] = {"vllm": VllmRule, "sglang": SglangRule}
