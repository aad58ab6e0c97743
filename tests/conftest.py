"""Settings of all tests: profiles of Hypothesis (`HYPOTHESIS_PROFILE=thorough`), one torch thread."""

from __future__ import annotations

import os

import hypothesis
import torch

_common = {"deadline": None, "derandomize": "CI" in os.environ, "print_blob": True}
hypothesis.settings.register_profile("default", max_examples=50, **_common)
hypothesis.settings.register_profile("thorough", max_examples=1000, **_common)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

torch.set_num_threads(1)  # two cores, several ranks
