"""Which blocks a cache keeps and which it stores: eviction and admission. Pure and synchronous, as ``slab`` is.

``api.Policy`` is the contract. ``make_policy`` puts one together from an eviction and an admission of the
registry; any combines with any.
"""

from kvfuse.policy.api import HOLD_SECONDS, Policy, Victim
from kvfuse.policy.registry import ADMISSIONS, DEFAULT_ADMISSION, DEFAULT_POLICY, POLICIES, make_policy

__all__ = [
    "ADMISSIONS",
    "DEFAULT_ADMISSION",
    "DEFAULT_POLICY",
    "HOLD_SECONDS",
    "POLICIES",
    "Policy",
    "Victim",
    "make_policy",
]
